"""What surrounds the kernels: launches, uploads, room for records, errors, the choice of the backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.fusion import on_device
from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.search.cuda_wfst import cuda, launch_shape
from nemo_gpu_decoding.search.cuda_wfst.boosting import build_word_boosting
from nemo_gpu_decoding.search.cuda_wfst.cpu_engine import CPUEngine
from tests.contract.word_decoder import all_facts
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
    assert emulated_runtime.launches == before + 2  # and the records that are left are collected


def test_graphs_and_phrases_are_uploaded_once_and_not_kept_longer_than_needed(log_probs):
    graph = random_graph(5, columns=COLUMNS)
    boosting = build_word_boosting({"w1": 2.0}, graph)
    kept = len(on_device._uploaded_arrays), len(on_device._uploaded)
    decoder = on_cuda(graph, boosting=boosting, **OPTIONS)
    decoder.decode(log_probs, LENGTHS)
    copies = on_device.arrays_on_device(graph, graph.arrays, torch.device("cpu"))
    decoder.decode(log_probs, LENGTHS)
    assert on_device.arrays_on_device(graph, graph.arrays, torch.device("cpu")) is copies
    for copy, array in zip(copies, graph.arrays, strict=True):
        assert copy.numpy().tobytes() == array.tobytes()
    assert (len(on_device._uploaded_arrays), len(on_device._uploaded)) == (kept[0] + 1, kept[1] + 1)
    del decoder, graph, boosting
    assert (len(on_device._uploaded_arrays), len(on_device._uploaded)) == kept


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


@pytest.mark.parametrize(
    ("options", "message"),
    [({"n_best": 3}, "n_best is 3"), ({"lattice": True}, "lattice is True")],
)
def test_lattices_are_searched_on_the_cpu_and_that_is_said(log_probs, options, message):
    with pytest.raises(
        ValueError, match=f"backend is 'cuda'.*the kernels keep no lattice, and {message}"
    ):
        on_cuda(toy_graph(0), **OPTIONS, **options).decode(log_probs, LENGTHS)


def test_auto_chooses_the_cpu_for_lattices_and_says_why(log_probs, monkeypatch):
    chosen = []

    def choose(wanted, device, obstacle):
        chosen.append(obstacle(device))
        return "cpu"

    monkeypatch.setattr("nemo_gpu_decoding.search.cuda_wfst.decoder.choose_backend", choose)
    decoder = make(toy_graph(0), backend="auto", n_best=2, **OPTIONS)
    streams = decoder.open(3)
    decoder.push(streams, log_probs, LENGTHS)
    assert chosen == ["the kernels keep no lattice, and n_best is 2"]
    assert isinstance(streams.engine, CPUEngine)


def test_working_memory_of_an_utterance():
    room = launch_shape.Room(tokens=40_000, groups=20_000, seconds=False, ways=8192, columns=1025)
    assert 4.0e6 < room.working_bytes < 4.8e6
    shape = launch_shape.room_for(10_000, 1025, normal=False)
    assert shape.tokens == 40_000
    assert launch_shape.room_for(10_000, 1025, normal=True).working_bytes > shape.working_bytes


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
