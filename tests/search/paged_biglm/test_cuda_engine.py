"""What surrounds the kernel: launches, uploads, room, errors, the choice of the backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.search.word_graph import cuda_composition, cuda_engine, kernel_abi
from tests.contract.facts import all_facts
from tests.cuda_emulator.emulator import EmulatedRuntime
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
    full = int(streams.engine._state.progress["back_pointers"].max())
    few = streams.engine._state.back_pointers[:, :full].contiguous()
    streams.engine._state = streams.engine._state._replace(back_pointers=few)
    rest, bad = log_probs[:, 4:], log_probs[:, 4:].clone()
    bad[0, 5, 2] = float("nan")
    with pytest.raises(ValueError, match=r"log_probs\[0, 5, 2\] is nan"):
        decoder.push(streams, bad, [6, 0, 2])
    decoder.push(streams, rest, [6, 0, 2])
    assert all_facts(decoder.close(streams)) == expected[3]


def test_records_get_more_room(monkeypatch, log_probs, expected):
    for name in ("FIRST_BACK_POINTERS", "BACK_POINTERS_PER_ACTIVE"):
        monkeypatch.setattr(cuda_engine, name, 1)
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
    placed = cuda_composition.PlacedLM

    def scarce(arrays, how, cache_bytes, name):
        from nemo_gpu_decoding.lm.placement import Memory

        return placed(arrays, how, cache_bytes, name, lambda device: Memory(100, 100, 100))

    monkeypatch.setattr(cuda_composition, "PlacedLM", scarce)
    graph, lms = random_case(6)
    with pytest.raises(ValueError, match=r"placement is 'paged': .* needs"):
        on("cuda", graph, lms, placement="paged", **OPTIONS).decode(log_probs, LENGTHS)


def test_working_memory_of_an_utterance():
    capacity = kernel_abi.lm_capacity_for(10_000, 1025)
    assert (capacity.tokens, capacity.groups, capacity.group_arcs) == (40_000, 20_000, 40_000)
    taken = kernel_abi.working_bytes(kernel_abi.LM_TOKEN, kernel_abi.LM_BUFFERS, capacity)
    assert 7.0e6 < taken < 8.2e6


def test_working_memory_is_what_is_allocated(log_probs, monkeypatch):
    seen = []
    buffers = cuda_engine.CUDAEngine._buffers
    monkeypatch.setattr(
        cuda_engine.CUDAEngine,
        "_buffers",
        lambda engine, n, capacity: (
            seen.append((n, capacity, buffers(engine, n, capacity))) or seen[-1][2]
        ),
    )
    on("cuda", *random_case(0), **OPTIONS).decode(log_probs, LENGTHS)
    n, capacity, found = seen[-1]
    own = sum(tensor.numel() * tensor.element_size() for tensor in found.values())
    token = kernel_abi.LM_TOKEN
    expected = kernel_abi.working_bytes(token, kernel_abi.LM_BUFFERS, capacity)
    assert own + n * 2 * capacity.tokens * token.itemsize == n * expected


def test_static_shared_memory_is_left_free(tmp_path):
    """Rows in shared memory leave the kernel what it takes for itself."""
    source = tmp_path / "sizes.cu"
    source.write_text(
        '#define COMPOSE 1\n#include "search/word_graph/lm_workspace.cuh"\n'
        f'static_assert(sizeof(LmShared) + 8 <= {kernel_abi.STATIC_SHARED_BYTES}, "");\n'
        f'static_assert(sizeof(Counters) == {kernel_abi.COUNTERS.itemsize}, "");\n'
    )
    EmulatedRuntime(cache=tmp_path).load(str(source), torch.device("cpu"))
    columns, most = 11_000, 90_000  # two rows fit just so without what the kernel takes for itself
    assert kernel_abi.shared_bytes(columns, 4, most)[1] > 0
    own = cuda_composition.LmComposition.static_shared_bytes
    assert kernel_abi.shared_bytes(columns, 4, most - own)[1] == 0
