"""The kernels under the race and bounds checker: clean on any schedule, no barrier is idle. Lattices."""

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.cuda.compile import read_source
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.graph.word_boosting import build_word_boosting
from nemo_gpu_decoding.search.word_graph import cuda_engine, kernel_abi
from nemo_gpu_decoding.search.word_graph.decoder import NO_END
from nemo_gpu_decoding.search.word_graph.lattice import links
from tests.contract.subject import all_facts
from tests.cuda_emulator.fixtures import on_any_schedule
from tests.cuda_emulator.mutations import assert_needed, barriers_of
from tests.graph.test_store import fst
from tests.random_models import random_log_probs
from tests.search.word_graph.both import (
    assert_equal,
    assert_equal_lattices,
    assert_equal_paged,
    assert_same_lattice,
    limit_tokens,
    on_cpu,
    on_cuda,
    pair,
)
from tests.search.word_graph.models import random_graph

pytest.importorskip("kaldifst")

pytestmark = pytest.mark.slow
COLUMNS, T = 40, 4
OPTIONS = {"vocab_size": COLUMNS - 1, "blank_id": COLUMNS - 1, "max_active": 12, "beam": 6.0}
FOLDER = "search/word_graph"
# what a search without composition is made of
OWN = [f"{FOLDER}/kernel.cu", f"{FOLDER}/frame.cuh", f"{FOLDER}/prune.cuh", f"{FOLDER}/compact.cu"]
OWN += [name for name in read_source(f"{FOLDER}/frame.cuh").headers if name.startswith(FOLDER)]
OF_LINKS = f"{FOLDER}/links.cuh"  # of no use without links, as the rest is with them
BARRIERS = [
    *barriers_of(f"{FOLDER}/kernel.cu", OWN),
    *barriers_of(f"{FOLDER}/compact.cu", OWN),
    *barriers_of(f"{FOLDER}/best_path.cu", [f"{FOLDER}/best_path.cu"]),
]


@pytest.fixture
def short_lists(monkeypatch):
    """Lists and tables so short that every frame goes through each of the kernel's loops."""
    monkeypatch.setattr(kernel_abi, "THREADS", 64)
    monkeypatch.setattr(kernel_abi, "CANDIDATES", 192)
    monkeypatch.setattr(kernel_abi, "LEAST_GROUPS", 64)
    limit_tokens(monkeypatch, 48)


def log_probs_of(seed: int, sharpness: float = 0.7) -> torch.Tensor:
    return random_log_probs(2, T, COLUMNS, seed=seed, sharpness=sharpness)


def search_everything(topology: str) -> None:
    """Ties, full tables, boosting, utterances of different lengths; then the same with lattices."""
    graph = random_graph(1, columns=COLUMNS, states=40, coarse=True)
    boosting = build_word_boosting({"w1": 1.0, "w2 w3": 2.0}, graph)
    log_probs = torch.round(log_probs_of(1))
    options = {"topology": topology, "boosting": boosting, **OPTIONS}
    assert_equal(graph, log_probs, [T, 2], **options)
    assert_equal_lattices(graph, log_probs, [T, 2], n_best=3, **options)


def search_in_chunks(monkeypatch: pytest.MonkeyPatch, lattice: bool = False) -> None:
    """Tokens come back from global memory, records have to be compacted in between."""
    for name in ("FIRST_BACK_POINTERS", "BACK_POINTERS_PER_ACTIVE", "FIRST_LINKS"):
        monkeypatch.setattr(cuda_engine, name, 1)
    graph = random_graph(1, columns=COLUMNS, states=40)
    for sharpness, beam, capacity in ((0.5, 6.0, 48), (0.5, 2.5, 48), (3.0, 6.0, 16)):
        limit_tokens(monkeypatch, capacity)
        decoder = on_cuda(graph, topology="normal", lattice=lattice, **{**OPTIONS, "beam": beam})
        streams, log_probs = decoder.open(2), log_probs_of(1, sharpness)
        decoder.push(streams, log_probs[:, :3], [3, 1])
        decoder.push(streams, log_probs[:, 3:], [1, 0])
        decoder.close(streams)


@pytest.mark.parametrize("topology", ["compact", "normal"])
@on_any_schedule
def test_no_races_and_no_stray_accesses(emulated_runtime, short_lists, topology, monkeypatch):
    search_everything(topology)
    for lattice in (False, True):
        search_in_chunks(monkeypatch, lattice)


@pytest.mark.parametrize("barrier", BARRIERS, ids=str)
def test_every_barrier_is_needed(request, tmp_path, short_lists, monkeypatch, barrier):
    cache = request.config.cache.mkdir("cuda_emulator")
    lattice = barrier.file == OF_LINKS
    assert_needed(barrier, lambda: search_in_chunks(monkeypatch, lattice), tmp_path, cache)


# -------------------------------- The kernel under the race and bounds checker: clean on any schedule
def paged_search_everything(monkeypatch: pytest.MonkeyPatch, topology: str, **options) -> None:
    """Ties, full tables, boosting, paged arcs, utterances of different lengths, chunks, few records."""
    limit_tokens(monkeypatch, 48)
    for name in ("FIRST_BACK_POINTERS", "BACK_POINTERS_PER_ACTIVE", "FIRST_LINKS"):
        monkeypatch.setattr(cuda_engine, name, 1)
    graph, lms = random_graph(1, columns=COLUMNS, states=40, coarse=True), pair(1, coarse=True)
    boosting = build_word_boosting({"w1": 1.0, "w2 w3": 2.0}, graph)
    log_probs = torch.round(random_log_probs(2, T, COLUMNS, seed=1, sharpness=0.7))
    monkeypatch.setattr(kernel_abi, "THREADS", 64)
    assert_equal_paged(
        graph, lms, log_probs, [T, 2], topology=topology, boosting=boosting, columns=COLUMNS,
        max_active=12, beam=6.0, placement="paged", chunk=3, **options,
    )  # fmt: skip


@pytest.mark.parametrize("topology", ["compact", "normal"])
@pytest.mark.parametrize(
    "emulated_runtime",
    [{"check": True, "seed": 100, "yield_percent": 50, "resident": 1}, {"check": True, "order": "descending"}],
    indirect=True,
)
def test_no_races_and_no_stray_accesses_paged(emulated_runtime, small_lists, topology, monkeypatch):
    paged_search_everything(monkeypatch, topology)
    paged_search_everything(monkeypatch, topology, group_size=2)
    paged_search_everything(monkeypatch, topology, lattice=True, n_best=3)


# - Lattices of the kernels, run by the emulator: link for link those of the CPU, whatever the options

in_small_blocks = pytest.mark.usefixtures("emulated_runtime", "small_blocks")
TOPOLOGIES = ("compact", "normal", "minimal", "graph")
FEW = 12
SEARCH = {"vocab_size": FEW - 1, "blank_id": FEW - 1, "beam": 8.0, "n_best": 6}


def inputs_of(seed, frames=8, columns=FEW, sharpness=1.0):
    return random_log_probs(2, frames, columns, seed=seed, sharpness=sharpness)


def graph_of(seed, topology="compact", **shape):
    return random_graph(seed, columns=FEW, blank=FEW - 1 if topology == "graph" else None, **shape)


@in_small_blocks
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("lattice_beam", [1.0, 6.0])
def test_kernel_on_random_graphs_equals_the_cpu(topology, lattice_beam):
    links = 0
    for seed in range(2):
        graph = graph_of(seed, topology)
        results = assert_equal_lattices(
            graph, inputs_of(seed), [8, 5], topology=topology, lattice_beam=lattice_beam, lm_weight=0.7,
            boosting=build_word_boosting({"w1": 1.5, "w2 w3": 2.0}, graph) if seed else None, acoustic_scale=1.3,
            **SEARCH,
        )  # fmt: skip
        links += sum(nbest.lattice.num_links for nbest in results)
    assert links > 50
    assert any(len(nbest) > 1 for nbest in results)
    assert all(word.posterior is not None for nbest in results for word in nbest.best.words)


@in_small_blocks
@pytest.mark.parametrize("first_links", [1, 1 << 15])
def test_lattice_kernel_with_chunks_and_little_room_equals_the_cpu(monkeypatch, first_links):
    """Links that fill their room, within a chunk and from chunk to chunk; partial results on the way."""
    monkeypatch.setattr(cuda_engine, "FIRST_LINKS", first_links)
    monkeypatch.setattr(cuda_engine, "FIRST_BACK_POINTERS", 1)
    grown = []
    grow = cuda_engine.CUDAEngine._with_room_for_links
    monkeypatch.setattr(cuda_engine.CUDAEngine, "_with_room_for_links", lambda *given: grown.append(1) or grow(*given))
    graph, log_probs, lengths = graph_of(1), inputs_of(1), [8, 5]
    options = {**SEARCH, "max_active": 30, "lattice": True}
    streams = (decoder := on_cuda(graph, **options)).open(2)
    for begin, end in ((0, 1), (1, 5), (5, 8)):
        decoder.push(streams, log_probs[:, begin:end], np.clip(np.array(lengths) - begin, 0, end - begin).tolist())
        decoder.partial(streams)
    expected = on_cpu(graph, **options).decode(log_probs, lengths)
    found = decoder.close(streams)
    assert all_facts(found) == all_facts(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert_same_lattice(ours.lattice, theirs.lattice)
    assert (len(grown) > 1) == (first_links == 1)


@in_small_blocks
@pytest.mark.parametrize("chunk", [9, 72])
def test_links_dropped_early_are_not_in_the_lattice(monkeypatch, chunk):
    """Two streams that fill their room in other frames, so that one is pruned beside the other; then both again."""
    monkeypatch.setattr(cuda_engine, "FIRST_LINKS", 256)
    frames, lengths, options = 72, [72, 50], {**SEARCH, "max_active": 30, "lattice": True, "lattice_beam": 2.0}
    log_probs, decoder = 2 * inputs_of(1, frames=frames), on_cuda(graph_of(1), **options)
    expected = on_cpu(graph_of(1), **options).decode(log_probs, lengths)
    held, prune_links = [], links.prune_links
    for prunes in (True, False):
        if not prunes:
            monkeypatch.setattr(links, "prune_links", lambda *given: prune_links(*given[:3], np.inf, given[4]))
        streams = decoder.open(2)
        for begin in range(0, frames, chunk):
            sizes = np.clip(np.array(lengths) - begin, 0, chunk).tolist()
            decoder.push(streams, log_probs[:, begin : begin + chunk], sizes)
        held.append(np.array([len(utterance.links) for utterance in streams.engine.utterances(range(2))]))
        found = decoder.close(streams, rows=[1, 0])
        for row in (1, 0):
            decoder.reopen(streams, [row])
            decoder.push(streams, log_probs[[row]], lengths[row : row + 1], rows=[row])
            found += decoder.close(streams, rows=[row])
        for ours, theirs in zip(found, 2 * expected[::-1], strict=True):
            assert all_facts([ours]) == all_facts([theirs])
            assert_same_lattice(ours.lattice, theirs.lattice)
    assert (held[0] < held[1]).all()
    assert 2 * held[0].sum() < held[1].sum()


@in_small_blocks
@pytest.mark.parametrize("first_links", [64, 1 << 15])
def test_a_refused_chunk_leaves_links_alone(monkeypatch, first_links):
    """Even those that were dropped, or went to the host, before the bad frame."""
    monkeypatch.setattr(cuda_engine, "FIRST_LINKS", first_links)
    graph, log_probs = graph_of(2), inputs_of(2)
    decoder = on_cuda(graph, **SEARCH, max_active=100, lattice=True)
    streams = decoder.open(2)
    decoder.push(streams, log_probs[:, :4], [4, 4])
    bad = log_probs[:, 4:].clone()
    bad[1, 2, 3] = float("nan")
    with pytest.raises(ValueError, match=r"log_probs\[1, 2, 3\] is nan"):
        decoder.push(streams, bad, [4, 4])
    decoder.push(streams, log_probs[:, 4:], [4, 1])
    for ours, theirs in zip(decoder.close(streams), decoder.decode(log_probs, [8, 5]), strict=True):
        assert_same_lattice(ours.lattice, theirs.lattice)


@in_small_blocks
def test_without_an_end_the_lattice_ends_anywhere():
    graph = WordGraph.from_fst(fst([(0, 1, 1, 0.1, 1), (1, 2, 2, 0.1, 2)], 3, [2]), ("<eps>", "a", "b"))
    (nbest,) = assert_equal_lattices(graph, random_log_probs(1, 1, 3, seed=0), [1], vocab_size=2, blank_id=2, n_best=3)
    assert nbest.notes == (NO_END,)
    assert not nbest.lattice.reaches_end
    assert {path.text for path in nbest} == {"", "a"}
