"""What is asked of lattices afterwards, against all of their paths, one by one."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest

from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.graph.word_boosting import build_word_boosting
from tests.graph.toy import PIECES
from tests.oracles.ngram import sentence_cost
from tests.random_models import random_log_probs
from tests.search.word_graph.models import make, make_paged, random_lm, toy_graph


class Whole(NamedTuple):
    """One path through a lattice, as it is written there."""

    words: tuple[str, ...]
    labels: tuple[int, ...]  # column read in each frame
    cost: float
    acoustic_cost: float
    graph_cost: float  # of arcs, closure arcs and the final state, unweighted


def all_paths(lattice):
    """Every path: of small lattices only."""
    graph = lattice.graph
    arcs, epsilons, finals = graph.arrays.arcs, graph.arrays.epsilons, graph.arrays.states["final_cost"]
    found = []

    def texts(*labels):
        return tuple(graph.words[word] for label in labels for word in graph.expanded(int(label)))

    def walk(node, words, labels, cost, acoustic, graph_cost):
        for end in lattice.ends[lattice.ends["node"] == node]:
            e, state, own, last = end["epsilon"], end["state"], 0.0, ()
            if e >= 0:
                state, own, last = epsilons[e]["target"], epsilons[e]["cost"], texts(epsilons[e]["olabel"])
            if lattice.reaches_end:
                own += finals[state]
            found.append(Whole(words + last, labels, cost + end["cost"], acoustic, graph_cost + own))
        for link in lattice.links[lattice.links["source"] == node]:
            own, emitted = 0.0, []
            for table, n in ((epsilons, link["epsilon"]), (arcs, link["arc"])):
                if n >= 0:
                    own += table[n]["cost"]
                    emitted.append(table[n]["olabel"])
            walk(
                link["target"], words + texts(*emitted), (*labels, int(link["ilabel"])), cost + link["cost"],
                acoustic + link["acoustic_cost"], graph_cost + own,
            )  # fmt: skip

    walk(0, (), (), 0.0, 0.0, 0.0)
    return found


def least(paths, cost):
    """{words: least cost}."""
    texts: dict = {}
    for path in paths:
        texts[path.words] = min(texts.get(path.words, math.inf), cost(path))
    return texts


def small_lattice(seed, *, topology="compact", frames=7, beam=4.0, requests=None, **options):
    decoder = make(toy_graph(seed), topology=topology, lattice=True, lattice_beam=beam, **options)
    log_probs = random_log_probs(1, frames, len(PIECES) + 1, seed=seed)
    return decoder, decoder.decode(log_probs, [frames], requests)[0]


# ----------------------------------------------------------------------------------- rescoring
@pytest.mark.parametrize("lm_share", [0.0, 0.3])
@pytest.mark.parametrize("topology", ["compact", "normal", "minimal"])
@pytest.mark.parametrize("seed", range(3))
def test_rescored_lattices_are_their_paths_rescored(topology, seed, lm_share):
    decoder, nbest = small_lattice(seed, topology=topology, lm_weight=0.8)
    lm, weight = random_lm(seed + 5), 0.7
    paths = all_paths(nbest.lattice)

    def cost(path):
        kept = path.cost - (1 - lm_share) * 0.8 * path.graph_cost
        return kept + weight * sentence_cost(lm.table, path.words)

    expected = least(paths, cost)
    second = nbest.lattice.rescored(lm.packed, weight, lm_share=lm_share)
    assert least(all_paths(second), lambda path: path.cost) == pytest.approx(expected, abs=1e-4)
    assert len(all_paths(second)) == len(paths)
    found = decoder.n_best(second, len(expected) + 1)
    assert {path.text: -path.score for path in found} == pytest.approx(
        {" ".join(words): cost for words, cost in expected.items()}, abs=1e-4
    )
    for path in found:
        parts = path.parts
        assert parts.second_pass == pytest.approx(-weight * sentence_cost(lm.table, path.text.split()), abs=1e-4)
        assert parts.acoustic + parts.lm + parts.second_pass == pytest.approx(path.score, abs=1e-4)


def test_boosting_outlives_rescoring():
    graph = toy_graph(1)
    requests = [Request(boosting=build_word_boosting({"cab": 2.5}, graph))]
    decoder, nbest = small_lattice(1, requests=requests, beam=6.0)
    second = decoder.n_best(nbest.lattice.rescored(random_lm(3).packed, 1.0), 50)
    boosted = [path for path in second if "cab" in path.text.split()]
    assert boosted
    for path in boosted:
        bonus = 2.5 * path.text.split().count("cab")
        assert path.parts.boosting == pytest.approx(bonus)
        lm_cost = sentence_cost(random_lm(3).table, path.text.split())
        assert path.score == pytest.approx(path.parts.acoustic - lm_cost + bonus, abs=1e-4)


@pytest.mark.parametrize("difference", ["never", "auto"])
def test_the_large_lm_of_the_search_is_replaced_as_well(difference):
    small, large, other = random_lm(1), random_lm(2), random_lm(3)
    decoder = make_paged(small, large, lm_weight=0.9, lattice=True, lattice_beam=5.0, difference=difference)
    lattice = decoder.decode(random_log_probs(1, 7, len(PIECES) + 1, seed=3), [7])[0].lattice
    kept = lattice.rescored(other.packed, 0.0, lm_share=1.0)
    assert kept.links["cost"].tolist() == pytest.approx(lattice.links["cost"].tolist())
    second = decoder.n_best(lattice.rescored(other.packed, 1.1), 100)
    paths = least(all_paths(lattice), lambda path: path.acoustic_cost)
    expected = {" ".join(words): cost + 1.1 * sentence_cost(other.table, words) for words, cost in paths.items()}
    assert {path.text: -path.score for path in second} == pytest.approx(expected, abs=1e-4)


def test_the_same_lm_changes_nothing():
    lm = random_lm(2)
    decoder = make(lm.graph, lattice=True)
    nbest = decoder.decode(random_log_probs(1, 9, len(PIECES) + 1, seed=2), [9])[0]
    best = decoder.n_best(nbest.lattice.rescored(lm.packed, 1.0)).best
    assert best.text == nbest.best.text
    assert best.tokens.tolist() == nbest.best.tokens.tolist()
    assert best.score == pytest.approx(nbest.best.score, abs=1e-4)


def test_pruning_keeps_the_paths_within_the_beam():
    _, nbest = small_lattice(0, beam=6.0)
    before = least(all_paths(nbest.lattice), lambda path: path.cost)
    after = least(all_paths(nbest.lattice.pruned(2.0)), lambda path: path.cost)
    inside = {words: cost for words, cost in before.items() if cost <= min(before.values()) + 2.0}
    assert {words: after[words] for words in inside} == pytest.approx(inside)
    assert len(after) < len(before)


def test_what_cannot_be_rescored():
    _, nbest = small_lattice(0)
    lm = random_lm(1).packed
    with pytest.raises(ValueError, match="weight is -1"):
        nbest.lattice.rescored(lm, -1.0)
    with pytest.raises(ValueError, match="lm_share is nan"):
        nbest.lattice.rescored(lm, 1.0, lm_share=math.nan)
    with pytest.raises(ValueError, match=r"the lattice was rescored with .*, expected the search's own"):
        nbest.lattice.rescored(lm, 1.0).rescored(lm, 1.0)
    with pytest.raises(ValueError, match="beam is 0"):
        nbest.lattice.pruned(0.0)
