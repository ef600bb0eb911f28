"""What surrounds the kernel: launches, uploads, room, errors, the choice of the backend."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_gpu_decoding.search.word_graph import cuda as wfst_cuda
from nemo_gpu_decoding.search.word_graph.composition import cuda, launch_shape
from tests.contract.facts import all_facts
from tests.random_models import random_log_probs
from tests.search.paged_biglm.both import COLUMNS, everything, on, random_case

pytest.importorskip("kaldifst")
pytestmark = [
    pytest.mark.usefixtures("emulated_runtime", "small_blocks"),
    pytest.mark.parametrize("emulated_runtime", [{"check": True}], indirect=True, ids=["checked"]),
]

T, LENGTHS = 10, [10, 0, 6]
OPTIONS = {"beam": 6.0}


@pytest.fixture
def log_probs():
    return random_log_probs(3, T, COLUMNS, seed=1)


@pytest.fixture
def expected(log_probs):
    return everything(on("cpu", *random_case(0), **OPTIONS), log_probs, LENGTHS)


def test_a_chunk_is_one_launch(log_probs, emulated_runtime):
    decoder = on("cuda", *random_case(0), **OPTIONS)
    streams = decoder.open(3)
    for begin in (0, 5):
        before = emulated_runtime.launches
        decoder.push(streams, log_probs[:, begin : begin + 5], [5, 0, 3])
        assert emulated_runtime.launches == before + 1


def test_lms_are_uploaded_once(log_probs, monkeypatch):
    from nemo_gpu_decoding.lm import on_device

    uploads = []
    upload = on_device._upload
    monkeypatch.setattr(on_device, "_upload", lambda *given: uploads.append(1) or upload(*given))
    graph, lms = random_case(5)
    decoder = on("cuda", graph, lms, difference="never", **OPTIONS)
    decoder.decode(log_probs, LENGTHS)
    assert len(uploads) == 2  # the large one and the small one
    decoder.decode(log_probs, LENGTHS)
    on("cuda", graph, lms, difference="never", **OPTIONS).decode(log_probs, LENGTHS)
    assert len(uploads) == 2
    graph, lms = random_case(5, nested=True)
    on("cuda", graph, lms, difference="always", **OPTIONS).decode(log_probs, LENGTHS)
    assert len(uploads) == 3  # their difference


def test_an_error_leaves_streams_alone(log_probs, expected):
    """Even where records have been compacted before the bad frame."""
    decoder = on("cuda", *random_case(0), **OPTIONS)
    streams = decoder.open(3)
    decoder.push(streams, log_probs[:, :4], [4, 0, 4])
    full = int(streams.engine._state.progress["records"].max())
    few = streams.engine._state.records[:, :full].contiguous()
    streams.engine._state = streams.engine._state._replace(records=few)
    rest, bad = log_probs[:, 4:], log_probs[:, 4:].clone()
    bad[0, 5, 2] = float("nan")
    with pytest.raises(ValueError, match=r"log_probs\[0, 5, 2\] is nan"):
        decoder.push(streams, bad, [6, 0, 2])
    decoder.push(streams, rest, [6, 0, 2])
    assert all_facts(decoder.close(streams)) == expected[3]


def test_records_get_more_room(monkeypatch, log_probs, expected):
    for name in ("FIRST_RECORDS", "RECORDS_PER_ACTIVE"):
        monkeypatch.setattr(wfst_cuda, name, 1)
    assert everything(on("cuda", *random_case(0), **OPTIONS), log_probs, LENGTHS) == expected


def test_a_path_that_cannot_go_on_is_named(log_probs):
    log_probs[0, 1, :] = -np.inf
    with pytest.raises(ValueError, match=r"log_probs\[0, 1\]"):
        on("cuda", *random_case(0), **OPTIONS).decode(log_probs, LENGTHS)


def test_work_does_not_depend_on_chunks(log_probs):
    decoder = on("cuda", *random_case(0), **OPTIONS)
    streams = decoder.open(3)
    decoder.push(streams, log_probs[:, :3], [3, 0, 3])
    decoder.push(streams, log_probs[:, 3:], [7, 0, 3])
    in_chunks = [n.work._replace(cache_hits=0) for n in decoder.close(streams)]
    whole = [n.work for n in decoder.decode(log_probs, LENGTHS)]
    assert in_chunks == [work._replace(cache_hits=0) for work in whole]
    assert 0 < whole[0].cache_hits < whole[0].look_ups


def test_lms_that_do_not_fit_are_refused(log_probs, monkeypatch):
    placed = cuda.PlacedLM

    def scarce(arrays, how, cache_bytes, name):
        from nemo_gpu_decoding.lm.placement import Memory

        return placed(arrays, how, cache_bytes, name, lambda device: Memory(100, 100, 100))

    monkeypatch.setattr(cuda, "PlacedLM", scarce)
    graph, lms = random_case(6)
    with pytest.raises(ValueError, match=r"placement is 'paged': .* needs"):
        on("cuda", graph, lms, placement="paged", **OPTIONS).decode(log_probs, LENGTHS)


def test_working_memory_of_an_utterance():
    room = launch_shape.Room(
        tokens=40_000, members=20_000, visits=40_000, ways=8192, errands=4096, answers=8192, columns=1025
    )
    assert 7.0e6 < room.working_bytes < 8.2e6
    assert launch_shape.room_for(10_000, 1025).tokens == 40_000
    assert launch_shape.room_for(10_000, 1025).members == 20_000


def test_working_memory_is_what_is_allocated(log_probs, monkeypatch):
    seen = []
    rooms = cuda.CUDAEngine._rooms
    monkeypatch.setattr(
        cuda.CUDAEngine,
        "_rooms",
        lambda engine, n, room: seen.append((n, room, rooms(engine, n, room))) or seen[-1][2],
    )
    on("cuda", *random_case(0), **OPTIONS).decode(log_probs, LENGTHS)
    n, room, found = seen[-1]
    own = sum(tensor.numel() * tensor.element_size() for tensor in found.values())
    assert own + n * 2 * room.tokens * launch_shape.TOKEN.itemsize == n * room.working_bytes


def test_static_shared_memory_is_left_free():
    most = 100_000
    columns = 11_000  # two rows fit just so without what the kernel takes for itself
    dynamic, row_bytes = launch_shape.shared_bytes(columns, 4, most)
    assert dynamic <= most - launch_shape.STATIC_SHARED_BYTES
    assert row_bytes * 2 < dynamic
