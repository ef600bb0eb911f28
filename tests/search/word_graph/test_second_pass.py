"""What is asked of lattices afterwards, against all of their paths, one by one."""

import math

import numpy as np
import pytest

from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.graph.word_boosting import build_word_boosting
from nemo_gpu_decoding.search.alternatives import word_alternatives
from nemo_gpu_decoding.search.word_graph import cpu_engine, cuda_engine
from nemo_gpu_decoding.search.word_graph.lattice import links
from nemo_gpu_decoding.search.word_graph.lattice.determinize import WORD_ARC
from nemo_gpu_decoding.search.word_graph.lattice.links import grown
from nemo_gpu_decoding.search.word_graph.lattice.word_lattice import WordLattice
from nemo_gpu_decoding.search.word_graph.result import matches, posteriors
from nemo_gpu_decoding.vocabulary import Vocabulary
from tests.contract.subject import all_facts
from tests.graph.toy import PIECES
from tests.oracles.ngram import sentence_cost
from tests.random_models import random_log_probs
from tests.search.word_graph.both import assert_same_lattice
from tests.search.word_graph.models import (
    all_paths,
    least,
    make,
    make_paged,
    nested_pair,
    random_graph,
    random_lm,
    toy_graph,
)

pytestmark = pytest.mark.slow


def small_lattice(seed, *, topology="compact", frames=7, beam=4.0, requests=None, **options):
    decoder = make(toy_graph(seed), topology=topology, lattice=True, lattice_beam=beam, **options)
    return decoder, decoder.decode(random_log_probs(1, frames, len(PIECES) + 1, seed=seed), [frames], requests)[0]


# ----------------------------------------------------------------------------------- rescoring
@pytest.mark.parametrize("lm_share", [0.0, 0.3])
@pytest.mark.parametrize("topology", ["compact", "normal", "minimal"])
@pytest.mark.parametrize("seed", range(3))
def test_rescored_lattices_are_their_paths_rescored(topology, seed, lm_share):
    decoder, nbest = small_lattice(seed, topology=topology, lm_weight=0.8)
    lm, weight = random_lm(seed + 5), 0.7
    paths = all_paths(nbest.lattice)

    def cost(path):
        return path.cost - (1 - lm_share) * 0.8 * path.graph_cost + weight * sentence_cost(lm.table, path.words)

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
    requests = [Request(boosting=build_word_boosting({"cab": 2.5}, toy_graph(1)))]
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


def test_pruning_keeps_the_paths_within_the_beam():
    _, nbest = small_lattice(0, beam=6.0)
    before = least(all_paths(nbest.lattice), lambda path: path.cost)
    after = least(all_paths(nbest.lattice.pruned(2.0)), lambda path: path.cost)
    inside = {words: cost for words, cost in before.items() if cost <= min(before.values()) + 2.0}
    assert {words: after[words] for words in inside} == pytest.approx(inside)
    assert len(after) < len(before)


def test_rescoring_errors_are_named():
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


# ----------------------------------------------------------------------------- determinisation
def by_text(lattice, n=5000):
    found = lattice.n_best(n)
    assert len({sequence.words for sequence in found}) == len(found)
    assert [sequence.cost for sequence in found] == sorted(sequence.cost for sequence in found)
    return {sequence.words: sequence for sequence in found}


@pytest.mark.parametrize("topology", ["compact", "normal", "minimal"])
@pytest.mark.parametrize("seed", range(3))
def test_a_determinised_lattice_has_each_text_once_at_its_least_cost(topology, seed):
    _, nbest = small_lattice(seed, topology=topology, beam=5.0, lm_weight=0.8)
    paths = all_paths(nbest.lattice)
    expected, beam = least(paths, lambda path: path.cost), 3.5
    found = by_text(nbest.lattice.determinized(beam))
    inside = {words for words, cost in expected.items() if cost <= min(expected.values()) + beam - 1e-4}
    assert inside <= set(found) < set(expected)
    for words, sequence in found.items():
        same = [path for path in paths if path.words == words and path.labels == tuple(sequence.ilabels.tolist())]
        best = min(same, key=lambda path: path.cost)
        assert sequence.cost == pytest.approx(expected[words], abs=1e-4) == pytest.approx(best.cost, abs=1e-4)
        assert sequence.acoustic_cost == pytest.approx(best.acoustic_cost, abs=1e-4)
    everything = by_text(nbest.lattice.determinized())
    assert set(everything) >= {words for words, cost in expected.items() if cost <= min(expected.values()) + 5 - 1e-4}


@pytest.mark.parametrize("seed", range(4))
def test_determinised_lattice_equals_that_of_openfst(seed):
    """Costs of texts, and numbers of states and arcs, with links of several words and costs below zero."""
    kaldifst = pytest.importorskip("kaldifst")
    graph = random_graph(seed, columns=6, states=12)
    decoder = make(graph, vocab_size=5, blank_id=5, lattice=True, lattice_beam=1.5)
    lattice = decoder.decode(random_log_probs(1, 6, 6, seed=seed), [6])[0].lattice
    assert (lattice.links["epsilon"] >= 0).any()
    ours = lattice.determinized(50.0)
    assert ours.beam == 50.0
    rows = lattice.arcs()
    acceptor = kaldifst.compile(
        "\n".join(f"{a['source']} {a['target']} {a['word']} {a['graph_cost'] + a['acoustic_cost']}" for a in rows)
        + f"\n{rows['target'].max()}\n", acceptor=True,
    )  # fmt: skip
    kaldifst.rmepsilon(acceptor)
    theirs = kaldifst.determinize(acceptor)

    def texts_of(fst, state, words, cost, texts):
        final = float(fst.final(state).value)
        if final < math.inf:
            assert words not in texts
            texts[words] = cost + final
        for arc in kaldifst.ArcIterator(fst, state):
            own = (graph.words[arc.ilabel],) if arc.ilabel else ()
            texts_of(fst, arc.nextstate, words + own, cost + float(arc.weight.value), texts)
        return texts

    expected = texts_of(theirs, theirs.start, (), 0.0, {})
    assert {words: s.cost for words, s in by_text(ours, 10**6).items()} == pytest.approx(expected, abs=1e-3)
    written = kaldifst.compile(ours.to_openfst_text(), acceptor=True)
    assert texts_of(written, written.start, (), 0.0, {}) == pytest.approx(expected, abs=1e-3)


def test_max_states_reduces_the_lattice_beam():
    _, nbest = small_lattice(1, beam=9.0)
    all_of_it = nbest.lattice.determinized()
    whole = by_text(all_of_it)
    least_cost = min(sequence.cost for sequence in whole.values())
    seen = set()
    for share in (0.1, 0.4, 0.6, 0.8, 0.95):
        max_states = max(1, int(share * (all_of_it.num_states - 1)))
        lattice = nbest.lattice.determinized(max_states=max_states)
        assert 0 <= lattice.beam < 9.0
        assert lattice.num_states <= max(max_states, 6) + 1
        found = by_text(lattice)
        assert set(found) == {words for words, sequence in whole.items() if sequence.cost <= least_cost + lattice.beam}
        seen.add(len(found))
    assert len(seen) > 2
    with pytest.raises(ValueError, match="max_states is 0"):
        nbest.lattice.determinized(max_states=0)


def test_kaldis_compact_lattice_reads_as_written():
    _, nbest = small_lattice(2)
    lattice = nbest.lattice.determinized()
    key, *lines = lattice.to_kaldi_text("utt7").split("\n")
    assert (key, lines[-2:]) == ("utt7", ["", ""])
    arcs, finals = {}, {}
    for line in lines[:-2]:
        *fields, weight = line.split()
        graph_cost, acoustic_cost, labels = weight.split(",")
        own = float(graph_cost) + float(acoustic_cost), tuple(map(int, labels.split("_"))) if labels else ()
        if len(fields) == 1:
            finals[int(fields[0])] = own
        else:
            arcs.setdefault(int(fields[0]), []).append((int(fields[1]), int(fields[2]), own))
    texts = {}

    def walk(state, words, cost, labels):
        if state in finals:
            texts[words] = cost + finals[state][0], labels + finals[state][1]
        for target, word, own in arcs.get(state, ()):
            walk(target, (*words, nbest.lattice.graph.words[word]), cost + own[0], labels + own[1])

    walk(0, (), 0.0, ())
    for words, sequence in by_text(lattice).items():
        cost, labels = texts.pop(words)
        assert cost == pytest.approx(sequence.cost, abs=1e-3)
        assert labels == tuple(label + 1 for label in sequence.ilabels.tolist())
        assert len(labels) == 7
    assert not texts


def test_state_frames_equal_frames_read():
    _, nbest = small_lattice(0, frames=9)
    lattice = nbest.lattice.determinized()
    for arc in lattice.arcs:
        frames = lattice.state_frames[[arc["source"], arc["target"]]]
        assert frames[1] - frames[0] == arc["end"] - arc["begin"]
    assert lattice.state_frames[-1] == 9
    nothing = make(toy_graph(0), lattice=True).decode(random_log_probs(1, 3, len(PIECES) + 1, seed=0), [0])[0]
    assert [sequence.words for sequence in nothing.lattice.determinized().n_best(3)][:1] == [()]


# ------------------------------------------------------------------- posteriors over all of it
def tree_of(lattice):
    """The same texts with a state for each beginning of one."""
    texts = lattice.n_best(10**6)
    rows, states = [], {(): 0}
    for sequence in texts:
        words = [lattice.words.index(word) for word in sequence.words]
        for n in range(len(words)):
            if tuple(words[: n + 1]) not in states:
                states[tuple(words[: n + 1])] = len(states)
                rows.append((states[tuple(words[:n])], len(states) - 1, words[n], 0.0))
        rows.append((states[tuple(words)], -1, 0, sequence.cost))
    arcs = np.zeros(len(rows), WORD_ARC)
    for arc, (source, target, word, cost) in zip(arcs, rows, strict=True):
        arc["source"], arc["target"] = source, target if target >= 0 else len(states)
        arc["word"], arc["graph_cost"] = word, cost
    arcs = arcs[np.argsort(arcs["source"], kind="stable")]
    return WordLattice(lattice.words, np.zeros(len(states) + 1, np.int32), arcs, np.zeros(0, np.int32), lattice.beam)


@pytest.mark.parametrize("seed", range(3))
def test_alternatives_of_a_lattice_are_those_of_all_its_texts(seed):
    _, nbest = small_lattice(seed, n_best=10, beam=5.0)
    lattice = nbest.lattice.determinized()
    texts = lattice.n_best(10**6)
    shares = posteriors([-sequence.cost for sequence in texts])
    ids = [[lattice.words.index(word) for word in sequence.words] for sequence in texts]
    vocabulary = Vocabulary.from_pieces(PIECES)
    for path in nbest:
        labels = [word.label for word in path.words]
        expected = shares @ np.array([matches(labels, other) for other in ids])
        for form in (lattice, tree_of(lattice)):
            slots = word_alternatives([path], vocabulary, form)
            options = [dict(slot.alternatives) for slot in slots if slot.word_index is not None]
            shown = [words[word.text] for words, word in zip(options, path.words, strict=True)]
            assert shown == pytest.approx(expected, abs=0.15)  # ties of alignments


# -------------------------------------------------------------------------------- long streams
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("chunk", [7, 300])
def test_links_dropped_early_are_not_in_the_lattice(monkeypatch, chunk, paged):
    frames, options = 300, {"beam": 12.0, "lattice": True, "lattice_beam": 3.0}
    decoder = make_paged(*nested_pair(1), **options) if paged else make(toy_graph(1), **options)
    log_probs = 2 * random_log_probs(1, frames, len(PIECES) + 1, seed=5)

    def streamed():
        streams, sizes = decoder.open(1), []
        for begin in range(0, frames, chunk):
            decoder.push(streams, log_probs[:, begin : begin + chunk], [min(chunk, frames - begin)])
            sizes.append(len(streams.engine.results([0], 1, final=False)[0].links))
        return decoder.close(streams)[0].lattice, sizes

    lattice, sizes = streamed()
    monkeypatch.setattr(cpu_engine, "grown_links", lambda links, counts, beam: grown(links, int(counts["links"][0])))
    everything, unpruned = streamed()
    assert_same_lattice(lattice, everything)
    assert sizes[-1] <= unpruned[-1] / 4


@pytest.mark.usefixtures("emulated_runtime", "small_blocks")
@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_a_long_stream_holds_the_links_that_its_lattice_needs(monkeypatch, backend):
    """Words and short silences. A GPU holds the links of the last frames, in an array that does not grow."""
    monkeypatch.setattr(cuda_engine, "FIRST_LINKS", 1024)
    chunks = [random_log_probs(1, 20, len(PIECES) + 1, seed=seed, sharpness=4.0) for seed in range(50)]
    for chunk in chunks:
        chunk[:, 12:, :-1], chunk[:, 12:, -1] = -20.0, 0.0
    decoder = make(toy_graph(1), backend=backend, beam=12.0, lattice=True, lattice_beam=3.0)

    def streamed():
        streams, held, on_device = decoder.open(1), [], set()
        for chunk in chunks:
            decoder.push(streams, chunk, [20])
            if backend == "cuda":
                state = streams.engine._state
                on_device.add(state.links.shape[1])
                held.append(sum(map(len, state.former_links[0])) + int(state.counters["links"][0]))
            else:
                held.append(int(streams.engine._streams[0].counters["links"][0]))
        return held, on_device, decoder.close(streams)[0].lattice

    held, on_device, lattice = streamed()
    prune_links = links.prune_links
    monkeypatch.setattr(links, "prune_links", lambda *given: prune_links(*given[:3], np.inf, given[4]))
    found, _, everything = streamed()
    assert_same_lattice(lattice, everything)
    needed = lattice.num_links / len(chunks)  # of a chunk
    assert all(links <= 4 * needed * (n + 10) for n, links in enumerate(held))
    assert found[-1] > 10 * lattice.num_links
    assert on_device == ({1024} if backend == "cuda" else set())


@pytest.mark.usefixtures("emulated_runtime", "small_blocks")
@pytest.mark.parametrize("composition", [None, "lazy"])
def test_a_running_stream_has_alternatives(composition):
    def decoder_of(backend):
        options = {"backend": backend, "max_active": 200, "n_best": 5, "lattice_beam": 8.0}
        if composition is None:
            return make(toy_graph(1), **options)
        return make_paged(*nested_pair(1), composition=composition, **options)

    log_probs, decoder = random_log_probs(2, 14, len(PIECES) + 1, seed=5), decoder_of("cpu")
    on_device = decoder_of("cuda")
    streams, same = decoder.open(2), on_device.open(2)
    decoder.push(streams, log_probs[:, :8], [8, 5])
    on_device.push(same, log_probs[:, :8], [8, 5])
    for rows in ([0, 1], [1]):
        found, expected = (one.partial(own, 4, rows=rows) for one, own in ((on_device, same), (decoder, streams)))
        assert all_facts(found) == all_facts(expected)
        assert [nbest.committed for nbest in found] == [nbest.committed for nbest in expected]
    for one, many in zip(decoder.partial(streams), decoder.partial(streams, n_best=4), strict=True):
        assert [path.text for path in many][:1] == [one.best.text]
        assert many.best.score == pytest.approx(one.best.score, abs=1e-4)
        assert many.relative_cost == one.relative_cost
        assert len({path.text for path in many}) == len(many) == 4
        assert [path.score for path in many] == sorted((path.score for path in many), reverse=True)
    decoder.push(streams, log_probs[:, 8:], [6, 0])
    assert all_facts(decoder.close(streams)) == all_facts(decoder.decode(log_probs, [14, 5]))
