"""The kernels, run by the emulator, find what the CPU finds: to the bit, whatever the options."""

import pytest
import torch

from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.graph.build import load_fst_graph
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.graph.word_boosting import build_word_boosting
from nemo_gpu_decoding.search.word_graph import cuda_engine, kernel_abi
from tests.graph.test_store import fst
from tests.graph.toy import BLANK, PIECES, write_tlg
from tests.random_models import random_log_probs
from tests.search.word_graph.both import (
    RANDOM_COLUMNS,
    WORDS,
    assert_equal,
    assert_equal_paged,
    checked,
    limit_tokens,
    on,
    on_cpu,
    random_case,
)
from tests.search.word_graph.models import LM, fst_of, lm_table, nested_pair, random_graph, random_lm, toy_graph

pytest.importorskip("kaldifst")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("emulated_runtime", "small_blocks")]
COLUMNS, T = len(PIECES) + 1, 20
TOPOLOGIES = ("compact", "normal", "minimal")


def log_probs_of(seed, batch=3, frames=T, columns=COLUMNS, sharpness=2.0):
    return random_log_probs(batch, frames, columns, seed=seed, sharpness=sharpness)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("sharpness", [0.5, 3.0])
def test_kernel_on_word_graphs_equals_the_cpu(topology, sharpness):
    for seed in range(3):
        assert_equal(
            toy_graph(seed), log_probs_of(seed, sharpness=sharpness), [T, 0, 13],
            topology=topology, beam=12.0, lm_weight=0.7, acoustic_scale=1.3,
        )  # fmt: skip


@pytest.mark.parametrize("topology", [*TOPOLOGIES, "graph"])
@pytest.mark.parametrize("seed", range(4))
def test_kernel_on_random_graphs_equals_the_cpu(topology, seed):
    graph = random_graph(seed, columns=12, blank=11 if topology == "graph" else None)
    found = assert_equal(
        graph, log_probs_of(seed, 2, 12, 12, sharpness=1.5), [12, 9], vocab_size=11, blank_id=11,
        topology=topology, beam=(3.0, 6.0, 9.0, 20.0)[seed], lm_weight=0.8,
    )  # fmt: skip
    assert any(nbest.best.words for nbest in found)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_kernel_on_ready_made_graphs_equals_the_cpu(tmp_path, topology):
    graph = toy_graph(1)
    write_tlg(fst_of(graph), topology, BLANK, len(PIECES), tmp_path / "tlg.fst")
    ready_made = load_fst_graph(tmp_path / "tlg.fst", graph.words)
    assert_equal(ready_made, log_probs_of(7), [T, 12, 5], topology="graph", beam=15.0)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_kernel_with_boosting_per_utterance_equals_the_cpu(topology):
    graph = toy_graph(0)
    phrases = [{"cab": 3.0, "a bb": 2.0}, {"abc abc": 5.0, "bb": 1.0}, {"AB": 1.5}]
    trees = [build_word_boosting(bonuses, graph) for bonuses in phrases]
    requests = [
        Request(boosting=trees[0], boosting_weight=1.5, lm_weight=0.3), None,
        Request(boosting=trees[1]), Request(lm_weight=0.0), Request(boosting=trees[1], lm_weight=2.0),
    ]  # fmt: skip
    lengths = [T, 11, 0, 17, T]
    for own in (None, trees[2]):
        assert_equal(graph, log_probs_of(4, 5), lengths, requests, topology=topology, boosting=own, beam=10.0)


def test_kernel_with_word_sequences_equals_the_cpu():
    words = ("<eps>", "zero", "one", "two")
    arcs = [(0, 1, 1, 0.1, 1), (1, 0, 2, 0.2, 2), (2, 0, 3, 0.3, 3), (3, 2, 0, 0.0, 4), (4, 1, 0, 0.1, 1)]
    graph = WordGraph.from_fst(fst(arcs, 5, [4]), words)
    assert len(graph.arrays.word_sequences)
    boosting = build_word_boosting({"zero one two": 2.5, "two": 1.0, "one": 0.5}, graph)
    assert_equal(graph, log_probs_of(0, 2, 9, 4), [9, 6], vocab_size=3, blank_id=3, boosting=boosting, beam=9.0)


@pytest.mark.parametrize(("min_active", "lattice"), [(40, False), (40, True), (200, False)])
def test_kernel_with_min_active_equals_the_cpu(min_active, lattice):
    for seed in range(2):
        graph, log_probs = random_graph(seed, columns=12, coarse=seed == 1), log_probs_of(seed, 2, 10, 12, 0.7)
        options = {"vocab_size": 11, "blank_id": 11, "beam": 1.0, "min_active": min_active}
        found = assert_equal(graph, log_probs, [10, 8], **options, lattice=lattice)
        narrow = on_cpu(graph, **{**options, "min_active": 0}).decode(log_probs, [10, 8])
        assert [nbest.best.score for nbest in found] != [nbest.best.score for nbest in narrow]


@pytest.mark.parametrize("capacity", [4, 16, 60])
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("topology", ["compact", "normal"])
def test_full_token_tables_equal_the_cpu(monkeypatch, capacity, coarse, topology):
    limit_tokens(monkeypatch, capacity)
    overflows = 0
    for seed in range(3):
        log_probs = log_probs_of(seed, 2, 8, 12, 0.5)
        found = assert_equal(
            random_graph(seed, columns=12, coarse=coarse),
            torch.round(log_probs) if coarse else log_probs,
            [8, 5], vocab_size=11, blank_id=11, max_active=capacity // 4, beam=12.0, topology=topology,
        )  # fmt: skip
        overflows += sum("a table was full" in note for nbest in found for note in nbest.notes)
    assert overflows > 0


@pytest.mark.parametrize("topology", ["compact", "normal"])
def test_kernel_with_more_groups_than_fit_equals_the_cpu(monkeypatch, topology):
    monkeypatch.setattr(kernel_abi, "LEAST_GROUPS", 32)
    for seed in range(3):
        for coarse in (False, True):
            log_probs = log_probs_of(seed, 2, 8, 12, 0.7)
            assert_equal(
                random_graph(seed, columns=12, states=60, coarse=coarse), log_probs, [8, 5],
                vocab_size=11, blank_id=11, max_active=16, beam=12.0, topology=topology,
            )  # fmt: skip


@pytest.mark.parametrize("blank_id", [0, 2])
def test_blank_may_be_any_column(blank_id):
    graph = toy_graph(0)
    arcs = graph.arrays.arcs.copy()
    arcs["ilabel"] += arcs["ilabel"] >= blank_id
    moved = WordGraph(graph.arrays._replace(arcs=arcs), graph.start, graph.words, None, name="moved")
    for topology in TOPOLOGIES:
        assert_equal(moved, log_probs_of(2), [T, 9, 1], blank_id=blank_id, topology=topology, beam=9.0)


@pytest.mark.parametrize("threads", [32, 64, 160])
def test_kernel_with_any_block_size_equals_the_cpu(monkeypatch, threads):
    monkeypatch.setattr(kernel_abi, "THREADS", threads)
    graph = random_graph(1, columns=70)
    assert_equal(graph, log_probs_of(1, 2, 6, 70), [6, 4], vocab_size=69, blank_id=69, topology="normal", beam=9.0)


@pytest.mark.parametrize("rows", [0, 1, 2])
@pytest.mark.parametrize("emulated_runtime", [{}, {"check": True}], indirect=True, ids=["", "checked"])
def test_as_many_rows_as_fit_are_in_shared_memory(emulated_runtime, rows):
    columns = 71  # rows of all alignments
    with_two, _ = kernel_abi.shared_bytes(columns, 4, emulated_runtime.most_shared_bytes)
    emulated_runtime.most_shared_bytes = with_two - (2 - rows) * 304 + 150
    assert kernel_abi.shared_bytes(columns, 4, emulated_runtime.most_shared_bytes)[1] == rows
    graph, log_probs = random_graph(1, columns=columns), log_probs_of(1, 2, 6, columns)
    assert_equal(graph, log_probs, [6, 4], vocab_size=70, blank_id=70, topology="normal", beam=9.0)


def test_rows_that_exceed_shared_memory_are_read_where_they_lie():
    columns = 60_000
    assert kernel_abi.shared_bytes(columns, 4, 227 * 1024)[1] == 0
    graph = random_graph(1, columns=30)
    log_probs = log_probs_of(1, 1, 3, columns, sharpness=4.0)
    assert_equal(graph, log_probs, [3], vocab_size=columns - 1, blank_id=columns - 1, beam=9.0)


# --------------------------------------------------------------------------------- with a large LM
PAGED_TOPOLOGIES = ("compact", "normal", "minimal", "graph")
FRAMES = 8
PHRASES = {"w1": 2.0, "w2 w3": 3.0, "w4 w1 w2": 4.0, "w3": 0.5}


def inputs_of(seed, frames=FRAMES, columns=RANDOM_COLUMNS, sharpness=1.0):
    return random_log_probs(2, frames, columns, seed=seed, sharpness=sharpness)


def case(seed, topology="compact", **options):
    return random_case(seed, blank=RANDOM_COLUMNS - 1 if topology == "graph" else None, **options)


@checked
@pytest.mark.parametrize("difference", ["always", "never"])
@pytest.mark.parametrize("topology", PAGED_TOPOLOGIES)
def test_paged_kernel_on_random_graphs_equals_the_cpu(topology, difference):
    for seed in range(2):
        tokens, _, works, *_ = assert_equal_paged(
            *case(seed, topology, nested=True), inputs_of(seed), [FRAMES, FRAMES - 3], topology=topology,
            difference=difference, beam=(5.0, 8.0)[seed], lm_weight=0.8,
            large_lm_weight=(0.6, 1.0)[seed], chunk=(0, 3)[seed],
        )  # fmt: skip
        assert min(map(len, tokens)) > 1
        assert min(look_ups for look_ups, *_ in works) > 0


@checked
@pytest.mark.parametrize("topology", PAGED_TOPOLOGIES[:3])
def test_paged_kernel_on_word_graphs_equals_the_cpu(topology):
    for lms in (nested_pair(0), (random_lm(1), random_lm(20, keep=0.8))):
        log_probs = random_log_probs(3, 16, len(PIECES) + 1, seed=2, sharpness=3.0)
        assert_equal_paged(
            lms[0].graph, lms, log_probs, [16, 0, 11],
            topology=topology, columns=BLANK + 1, beam=9.0, acoustic_scale=1.3, chunk=5,
        )  # fmt: skip


@checked
@pytest.mark.parametrize("topology", ["compact", "normal"])
def test_paged_kernel_with_boosting_per_utterance_equals_the_cpu(topology):
    graph, lms = case(1)
    boosting = build_word_boosting(PHRASES, graph)
    requests = [Request(boosting=boosting, boosting_weight=1.5, lm_weight=0.3), None]
    assert_equal_paged(graph, lms, inputs_of(4), [FRAMES, 7], requests, topology=topology, beam=8.0)
    assert_equal_paged(graph, lms, inputs_of(5), [FRAMES, 7], topology=topology, boosting=boosting, beam=8.0)


@checked
@pytest.mark.parametrize("group_size", [1, 3])
def test_paged_kernel_with_any_group_size_equals_the_cpu(group_size):
    graph, lms = case(3)
    narrow, full = (
        assert_equal_paged(graph, lms, inputs_of(3, sharpness=0.5), [FRAMES, 5], beam=12.0, group_size=size)
        for size in (group_size, 0)
    )
    assert narrow[0] != full[0]


@checked
@pytest.mark.parametrize(("min_active", "coarse"), [(12, False), (150, True)])
def test_paged_kernel_with_min_active_equals_the_cpu(min_active, coarse):
    graph, lms = case(2, coarse=coarse)
    options = {"max_active": 200, "beam": 1.0}
    one, two = (
        assert_equal_paged(graph, lms, inputs_of(2, sharpness=0.7), [FRAMES, 6], min_active=least, **options)
        for least in (min_active, 0)
    )
    assert len(one[0][0]) > len(two[0][0])


@checked
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("capacity", [4, 16])
def test_full_token_tables_equal_the_cpu_paged(monkeypatch, capacity, coarse):
    limit_tokens(monkeypatch, capacity)
    graph, lms = case(1, coarse=coarse)
    log_probs = inputs_of(1, sharpness=0.5)
    _, limits, *_ = assert_equal_paged(
        graph, lms, torch.round(log_probs) if coarse else log_probs, [FRAMES, 5],
        max_active=capacity // 4, beam=12.0, topology="normal",
    )  # fmt: skip
    assert sum(overflowed for ((_, overflowed),) in limits) > 0


@checked
@pytest.mark.parametrize("lattice_beam", [1.0, 8.0])
@pytest.mark.parametrize("topology", ["compact", "normal", "graph"])
def test_lattice_kernel_equals_the_cpu(topology, lattice_beam):
    for seed in range(2):
        graph, lms = case(seed, topology, coarse=seed == 1)
        boosting = build_word_boosting(PHRASES, graph) if seed else None
        *_, lattices = assert_equal_paged(
            graph, lms, inputs_of(seed, 6), [6, 4], topology=topology, beam=8.0, boosting=boosting,
            lattice=True, n_best=5, lattice_beam=lattice_beam, chunk=4,
        )  # fmt: skip
        assert max(map(len, lattices)) > 6


@checked
def test_paged_kernel_with_many_histories_in_one_state_equals_the_cpu():
    graph, _ = case(0, states=6)
    lms = LM(lm_table(seed=1, words=WORDS)), LM(lm_table(seed=2, words=WORDS, order=4, keep=0.9))
    tokens, *_ = assert_equal_paged(graph, lms, inputs_of(1, 7, sharpness=0.2), [7, 2], beam=40.0, max_active=2000)
    keys = [key >> 32 for key, *_ in tokens[0]]
    assert max(map(keys.count, keys)) > kernel_abi.SORTED_BY_WARP


@checked
@pytest.mark.parametrize("least_groups", [4, 1000])
def test_members_and_visits_get_more_room(monkeypatch, least_groups):
    monkeypatch.setattr(kernel_abi, "LEAST_GROUPS", least_groups)
    graph, lms = case(2, states=60)
    options, log_probs = {"max_active": 8, "beam": 12.0}, inputs_of(2, sharpness=0.7)
    assert_equal_paged(graph, lms, log_probs, [FRAMES, 5], **options)
    decoder = on("cuda", graph, lms, **options)
    streams = decoder.open(2)
    decoder.push(streams, log_probs, [FRAMES, 5])
    assert (streams.engine._grown > 0) == (least_groups == 4)


@checked
@pytest.mark.parametrize("cache_bytes", [16, 10**6])
def test_arcs_in_host_memory_give_the_same(monkeypatch, cache_bytes):
    placed = cuda_engine.PlacedLM
    monkeypatch.setattr(cuda_engine, "PlacedLM", lambda arrays, how, _, name: placed(arrays, how, cache_bytes, name))
    graph, lms = case(1)
    options = {"beam": 9.0, "placement": "paged"}
    assert_equal_paged(graph, lms, inputs_of(1), [FRAMES, 5], **options)
    for nbest in on("cuda", graph, lms, **options).decode(inputs_of(1), [FRAMES, 5]):
        work = nbest.work
        assert 0 < work.query_hits < work.look_ups
        assert work.cache_misses > 0
        assert (work.cache_hit_rate > 0.5) == (cache_bytes > 16)
        assert 32 * work.cache_misses <= work.bus_bytes <= 64 * work.cache_misses
