"""What surrounds the kernels: launches, uploads, room for records, errors, the choice of the backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.cuda import upload
from nemo_gpu_decoding.fusion import on_device
from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.graph.word_boosting import build_word_boosting
from nemo_gpu_decoding.search.word_graph import cuda, launch_shape
from tests.contract.facts import all_facts
from tests.graph.toy import PIECES
from tests.random_models import random_log_probs
from tests.search.cuda_wfst.both import on_cpu, on_cuda
from tests.search.cuda_wfst.models import make, random_graph, toy_graph

pytest.importorskip("kaldifst")
pytestmark = pytest.mark.usefixtures("emulated_runtime", "small_blocks")

COLUMNS, T = len(PIECES) + 1, 20
LENGTHS = [T, 0, 13]
OPTIONS = {"beam": 9.0, "max_active": 200}


@pytest.fixture
def log_probs():
    return random_log_probs(3, T, COLUMNS, seed=1)


@pytest.fixture
def expected(log_probs):
    return all_facts(on_cpu(toy_graph(0), **OPTIONS).decode(log_probs, LENGTHS))


def test_a_chunk_is_one_launch(log_probs, emulated_runtime):
    decoder = on_cuda(toy_graph(0), **OPTIONS)
    streams = decoder.open(3)
    for begin in (0, 10):
        before = emulated_runtime.launches
        decoder.push(streams, log_probs[:, begin : begin + 10], [10, 0, 3])
        assert emulated_runtime.launches == before + 1
    decoder.close(streams)
    assert emulated_runtime.launches == before + 2  # and the best paths are picked out


def test_graphs_and_phrases_are_uploaded_once_and_not_kept_longer_than_needed(log_probs):
    graph = random_graph(5, columns=COLUMNS)
    boosting = build_word_boosting({"w1": 2.0}, graph)
    kept = len(upload._uploaded), len(on_device._uploaded)
    decoder = on_cuda(graph, boosting=boosting, **OPTIONS)
    decoder.decode(log_probs, LENGTHS)
    copies = upload.arrays_on_device(graph, graph.arrays, torch.device("cpu"))
    decoder.decode(log_probs, LENGTHS)
    assert upload.arrays_on_device(graph, graph.arrays, torch.device("cpu")) is copies
    for copy, array in zip(copies, graph.arrays, strict=True):
        assert copy.numpy().tobytes() == array.tobytes()
    assert (len(upload._uploaded), len(on_device._uploaded)) == (kept[0] + 1, kept[1] + 1)
    del decoder, graph, boosting
    assert (len(upload._uploaded), len(on_device._uploaded)) == kept


@pytest.mark.parametrize("sizes", [(1,), (3, 7), (20,)])
def test_records_are_compacted_and_get_more_room(monkeypatch, log_probs, expected, sizes):
    """Where they fill their room, within a chunk and from chunk to chunk."""
    compactions = []
    compacted = cuda.CUDAEngine._compacted
    monkeypatch.setattr(
        cuda.CUDAEngine, "_compacted", lambda *given: compactions.append(given) or compacted(*given)
    )
    decoder = on_cuda(toy_graph(0), **OPTIONS)
    streams, done, turn = decoder.open(3), np.zeros(3, int), 0
    decoder.push(streams, log_probs[:, :0], [0, 0, 0])
    streams.engine._state = streams.engine._state._replace(
        records=streams.engine._state.records[:, :4].contiguous()
    )
    while (done < LENGTHS).any():
        size = np.minimum(sizes[turn % len(sizes)], np.array(LENGTHS) - done)
        chunk = torch.zeros(3, T, COLUMNS)
        for b in range(3):
            chunk[b, : size[b]] = log_probs[b, done[b] : done[b] + size[b]]
        decoder.push(streams, chunk, size.tolist())
        done, turn = done + size, turn + 1
    assert len(compactions) >= 2
    assert all_facts(decoder.close(streams)) == expected


def test_an_error_leaves_streams_alone_even_after_compacting(log_probs, expected):
    decoder = on_cuda(toy_graph(0), **OPTIONS)
    streams = decoder.open(3)
    decoder.push(streams, log_probs[:, :8], [8, 0, 8])
    streams.engine._state = streams.engine._state._replace(
        records=streams.engine._state.records[:, : streams.engine._state.progress["records"].max()]
        .contiguous()
    )  # fmt: skip
    rest, bad = log_probs[:, 8:], log_probs[:, 8:].clone()
    bad[0, 11, 2] = float("nan")
    with pytest.raises(ValueError, match=r"log_probs\[0, 11, 2\] is nan"):
        decoder.push(streams, bad, [12, 0, 5])
    decoder.push(streams, rest, [12, 0, 5])
    assert all_facts(decoder.close(streams)) == expected


def test_a_path_that_cannot_go_on_is_named():
    log_probs = random_log_probs(1, 4, COLUMNS, seed=1)
    log_probs[0, 0, 1:] = -np.inf
    log_probs[0, 1, [0, 1, 2, 3, 5]] = -np.inf
    with pytest.raises(ValueError, match=r"log_probs\[0, 1\] makes every path .* impossible"):
        on_cuda(toy_graph(0)).decode(log_probs, [4])


def test_utterances_with_phrases_of_their_own_in_one_batch(log_probs):
    graph = toy_graph(0)
    requests = [Request(boosting=build_word_boosting({word: 3.0}, graph)) for word in ("a", "bb", "cab")]
    together = on_cuda(graph, **OPTIONS).decode(log_probs, LENGTHS, requests)
    alone = [
        on_cuda(graph, **OPTIONS).decode(log_probs[b : b + 1], [LENGTHS[b]], [requests[b]])[0]
        for b in range(3)
    ]
    assert all_facts(together) == all_facts(alone)


@pytest.mark.parametrize("options", [{"n_best": 3}, {"lattice": True}])
def test_lattices_are_searched_on_the_gpu_too(log_probs, options):
    decoder = make(toy_graph(0), backend="cuda", **OPTIONS, **options)
    streams = decoder.open(3)
    decoder.push(streams, log_probs, LENGTHS)
    assert isinstance(streams.engine, cuda.CUDAEngine)
    assert all(word.confidence is not None for n in decoder.close(streams) for word in n.best.words)


# ------------------------------------------------------------------------------ what is copied back


@pytest.fixture(params=["cpu", "cuda"])
def pushed(request, log_probs):
    """A decoder, and streams of which the second has heard nothing."""
    decoder = make(toy_graph(0), backend=request.param, **OPTIONS)
    streams = decoder.open(3)
    decoder.push(streams, log_probs[:, :10], [10, 0, 7])
    return decoder, streams


@pytest.mark.parametrize("rows", [[2], [1, 0], [0, 0, 2], []])
def test_partial_results_of_some_streams(pushed, rows):
    decoder, streams = pushed
    everything = decoder.partial(streams)
    some = decoder.partial(streams, rows=rows)
    assert all_facts(some) == [all_facts(everything)[row] for row in rows]
    assert [nbest.relative_cost for nbest in some] == [everything[row].relative_cost for row in rows]
    assert [nbest.num_frames for nbest in some] == [(10, 0, 7)[row] for row in rows]


@pytest.mark.parametrize("topology", ["compact", "normal", "minimal"])
def test_what_it_costs_to_end_is_known_to_the_bit(topology):
    """Ends by epsilon records and words, with phrases that break off, and streams that may not end."""
    for seed in range(3):
        graph = random_graph(seed, columns=12, coarse=seed == 2)
        boosting = build_word_boosting({"w1": 2.0, "w2 w3": 3.0, "w4 w1 w2": 4.0}, graph)
        options = {"vocab_size": 11, "blank_id": 11, "topology": topology, "boosting": boosting}
        early = []
        for build in (on_cpu, on_cuda):
            decoder = build(graph, beam=8.0, max_active=100, **options)
            streams = decoder.open(3)
            decoder.push(streams, torch.round(random_log_probs(3, 9, 12, seed=seed)), [9, 4, 1])
            partial = decoder.partial(streams)
            early.append((all_facts(partial), [nbest.relative_cost for nbest in partial]))
        assert early[0] == early[1]


def test_long_pasts_are_copied_whole(monkeypatch, log_probs, expected):
    monkeypatch.setattr(cuda, "FIRST_PAST", 1)
    assert all_facts(on_cuda(toy_graph(0), **OPTIONS).decode(log_probs, LENGTHS)) == expected


def test_no_more_than_best_paths_is_copied(monkeypatch, log_probs):
    monkeypatch.setattr(cuda.CUDAEngine, "utterances", lambda engine: pytest.fail("all is copied"))
    decoder = on_cuda(toy_graph(0), **OPTIONS)
    streams = decoder.open(3)
    decoder.push(streams, log_probs, LENGTHS)
    decoder.partial(streams)
    for known in streams.engine.results(range(3), 1, final=False):
        assert len(known.tokens) <= 2
        assert len(known.records) <= known.frames
    decoder.close(streams)


# ------------------------------------------------------------------------------------------ memory


def test_working_memory_of_an_utterance():
    room = launch_shape.Room(tokens=40_000, groups=20_000, seconds=False, ways=8192, columns=1025)
    assert 4.0e6 < room.working_bytes < 4.8e6
    shape = launch_shape.room_for(10_000, 1025, seconds=False)
    assert shape.tokens == 40_000
    assert launch_shape.room_for(10_000, 1025, seconds=True).working_bytes > shape.working_bytes


def test_working_memory_is_what_is_allocated(log_probs, monkeypatch):
    seen = []
    tables = cuda.CUDAEngine._tables

    def noted(engine, n, room):
        found = tables(engine, n, room)
        seen.append((n, room, found))
        return found

    monkeypatch.setattr(cuda.CUDAEngine, "_tables", noted)
    for topology in ("compact", "normal"):
        on_cuda(toy_graph(0), topology=topology, **OPTIONS).decode(log_probs, LENGTHS)
        n, room, found = seen[-1]
        own = sum(t.numel() * t.element_size() for t in found.values() if t is not None)
        tokens = n * 2 * room.tokens * launch_shape.TOKEN.itemsize
        assert own + tokens == n * room.working_bytes
