"""What surrounds the kernels: launches, uploads, room for records, errors, the choice of the backend."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.cuda import upload
from nemo_gpu_decoding.graph.word_boosting import build_word_boosting
from nemo_gpu_decoding.search.word_graph import cuda_engine, kernel_abi
from nemo_gpu_decoding.search.word_graph.cuda_engine import CUDAEngine
from tests.contract.subject import all_facts
from tests.cuda_emulator.emulator import EmulatedRuntime
from tests.graph.toy import PIECES
from tests.random_models import random_log_probs
from tests.search.pushes import operators
from tests.search.word_graph.both import RANDOM_COLUMNS, checked, on, on_cuda, random_case
from tests.search.word_graph.models import make, make_paged, nested_pair, random_graph, toy_graph

pytest.importorskip("kaldifst")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("emulated_runtime", "small_blocks")]
COLUMNS, T = len(PIECES) + 1, 20
LENGTHS = [T, 0, 13]
OPTIONS = {"beam": 9.0, "max_active": 200}


@pytest.fixture
def log_probs():
    return random_log_probs(3, T, COLUMNS, seed=1)


@pytest.fixture
def paged_log_probs():
    return random_log_probs(3, PAGED_T, RANDOM_COLUMNS, seed=1)


@pytest.fixture
def search(request, log_probs, paged_log_probs):
    """A search in a toy graph, or with a large LM: what makes its decoder, log-probs, lengths."""
    if getattr(request, "param", False):
        return (
            lambda backend="cuda", **more: on(backend, *random_case(0), **PAGED_OPTIONS, **more),
            paged_log_probs,
            PAGED_LENGTHS,
        )
    return lambda backend="cuda", **more: make(toy_graph(0), backend=backend, **OPTIONS, **more), log_probs, LENGTHS


@pytest.fixture
def expected(search):
    new, inputs, lengths = search
    return all_facts(new("cpu").decode(inputs, lengths))


def both_searches(test):
    """Without a large LM, and with one under the race checker, as its kernel is compiled for all tests."""
    test = pytest.mark.usefixtures("small_lists")(test)
    cases = [pytest.param(False, {}, id="plain"), pytest.param(True, {"check": True}, id="composes")]
    return pytest.mark.parametrize(("search", "emulated_runtime"), cases, indirect=True)(test)


@both_searches
@pytest.mark.parametrize("lattice", [False, True])
def test_pushes_allocate_nothing_and_copy_twice(search, emulated_runtime, lattice):
    """From the second push on; each push is a frame of 80 ms: one upload, one launch, one copy back."""
    new, inputs, lengths = search
    decoder, expected = new(lattice=lattice), all_facts(new("cpu", lattice=lattice).decode(inputs, lengths))
    streams = decoder.open(3)
    for t, chunk in enumerate(inputs.split(1, dim=1)):
        before, chunk = emulated_runtime.launches, chunk.contiguous()
        with operators() as done:
            decoder.push(streams, chunk, [int(t < length) for length in lengths])
        assert emulated_runtime.launches == before + 1
        _, buffers = streams.engine._working
        for name, values in buffers.items():
            assert not name.endswith("slots") or not values.any(), name
        if t > 0:
            assert done.work == ["copy_", "copy_"]
            assert done.moves == ["to"]  # of the log-probs
    assert all_facts(decoder.close(streams)) == expected


def test_graphs_and_phrases_are_uploaded_once_and_not_kept_longer_than_needed(log_probs):
    graph = random_graph(5, columns=COLUMNS)
    boosting = build_word_boosting({"w1": 2.0}, graph)
    kept = len(upload._uploaded)
    decoder = on_cuda(graph, boosting=boosting, **OPTIONS)
    decoder.decode(log_probs, LENGTHS)
    copies = upload.arrays_on_device(graph, graph.arrays, torch.device("cpu"))
    decoder.decode(log_probs, LENGTHS)
    assert upload.arrays_on_device(graph, graph.arrays, torch.device("cpu")) is copies
    for copy, array in zip(copies, graph.arrays, strict=True):
        assert copy.numpy().tobytes() == array.tobytes()
    assert len(upload._uploaded) == kept + 2
    del decoder, graph, boosting
    assert len(upload._uploaded) == kept


@pytest.mark.parametrize("sizes", [(1,), (3, 7), (20,)])
def test_records_are_compacted_and_get_more_room(monkeypatch, log_probs, expected, sizes):
    """Where they fill their room, within a chunk and from chunk to chunk."""
    compactions = []
    compacted = CUDAEngine._compacted
    monkeypatch.setattr(CUDAEngine, "_compacted", lambda *given: compactions.append(given) or compacted(*given))
    decoder = on_cuda(toy_graph(0), **OPTIONS)
    streams, done, turn = decoder.open(3), np.zeros(3, int), 0
    decoder.push(streams, log_probs[:, :0], [0, 0, 0])
    streams.engine._state = streams.engine._state._replace(
        back_pointers=streams.engine._state.back_pointers[:, :4].contiguous()
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


@both_searches
def test_refused_chunk_after_compacting_does_not_change_streams(search, expected):
    new, inputs, lengths = search
    decoder, done = new(), 4
    streams = decoder.open(3)
    decoder.push(streams, inputs[:, :done], [done, 0, done])
    full = int(streams.engine._state.counters["back_pointers"].max())
    few = streams.engine._state.back_pointers[:, :full].contiguous()
    streams.engine._state = streams.engine._state._replace(back_pointers=few)
    rest, bad, sizes = inputs[:, done:], inputs[:, done:].clone(), [lengths[0] - done, 0, lengths[2] - done]
    bad[0, 5, 2] = float("nan")
    with pytest.raises(ValueError, match=r"log_probs\[0, 5, 2\] is nan"):
        decoder.push(streams, bad, sizes)
    decoder.push(streams, rest, sizes)
    assert all_facts(decoder.close(streams)) == expected


# ------------------------------------------------------------------------------ what is copied back
@both_searches
def test_results_copy_only_best_paths(monkeypatch, search):
    """However many tokens and back-pointers streams have in memory."""
    new, inputs, lengths = search
    decoder = new()
    streams = decoder.open(3)
    decoder.push(streams, inputs, lengths)
    copied, on_host = [], cuda_engine._on_host
    monkeypatch.setattr(cuda_engine, "_on_host", lambda *given: copied.append(on_host(*given)) or copied[-1])
    monkeypatch.setattr(CUDAEngine, "utterances", lambda engine: pytest.fail("all is copied"))
    back_pointer = kernel_abi.BACK_POINTER.itemsize
    held = int(streams.engine._state.counters["back_pointers"].sum()) * back_pointer
    found = kernel_abi.LM_BEST_PATH.itemsize + kernel_abi.WORK.itemsize + max(lengths) * back_pointer
    for final in (False, True):
        copied.clear()
        for known in streams.engine.results(range(3), 1, final=final):
            assert len(known.tokens) <= 2
            assert len(known.back_pointers) <= known.frames
        assert 0 < sum(values.nbytes for values in copied) <= 3 * found < held
    decoder.partial(streams)
    decoder.close(streams)


@pytest.mark.parametrize("composes", [False, True])
def test_partial_results_of_long_streams_copy_the_last_words_only(monkeypatch, composes):
    """Bytes of a partial result, and back-pointers that a stream has on the device: as many late as early."""
    monkeypatch.setattr("nemo_gpu_decoding.search.committed.MIN_COMMIT", 16)
    for name in ("FIRST_BACK_POINTERS", "BACK_POINTERS_PER_ACTIVE"):
        monkeypatch.setattr(cuda_engine, name, 1)
    copied, held, on_host = [], [], cuda_engine._on_host
    monkeypatch.setattr(cuda_engine, "_on_host", lambda *given: copied.append(on_host(*given)) or copied[-1])
    frames, chunk, decoder = 1200, 12, on_cuda(toy_graph(0), **{**OPTIONS, "max_active": 50})
    if composes:
        small, large = nested_pair(0)
        decoder = make_paged(small, large, **OPTIONS, backend="cuda")
    log_probs, streams, sizes = random_log_probs(1, frames, COLUMNS, seed=3, sharpness=4.0), decoder.open(1), []
    for begin in range(0, frames, chunk):
        decoder.push(streams, log_probs[:, begin : begin + chunk], [chunk])
        copied.clear()
        decoder.partial(streams)
        sizes.append(sum(values.nbytes for values in copied))
        held.append(streams.engine._state.back_pointers.shape[1])
    assert all_facts(decoder.close(streams)) == all_facts(decoder.decode(log_probs, [frames]))
    half = len(sizes) // 2
    assert max(sizes[half:]) <= 1.5 * max(sizes[:half]) < 10_000
    assert max(held[half:]) <= 1.5 * max(held[:half])


# ------------------------------------------------------------------------------------------ memory
@both_searches
def test_working_memory_is_what_is_allocated(monkeypatch, search):
    seen = []
    buffers = CUDAEngine._buffers

    def noted(engine, n, capacity):
        seen.append((n, capacity, buffers(engine, n, capacity)))
        return seen[-1][2]

    monkeypatch.setattr(CUDAEngine, "_buffers", noted)
    new, inputs, lengths = search
    composes = inputs.shape[1] == PAGED_T
    fields = kernel_abi.LM_BUFFERS if composes else kernel_abi.PLAIN_BUFFERS
    for decoder in [new()] if composes else [new(), on_cuda(toy_graph(0), topology="normal", **OPTIONS)]:
        decoder.decode(inputs, lengths)
        n, capacity, found = seen[-1]
        sizes = (math.prod(kernel_abi.buffer_shape(tensor, 1, capacity)) for tensor in fields.values())
        assert sum(t.numel() * t.element_size() for t in found.values()) == n * sum(sizes)


# --------------------------------------------------------------------------------- with a large LM
PAGED_T, PAGED_LENGTHS = 10, [10, 0, 6]
PAGED_OPTIONS = {"beam": 6.0}


@checked
def test_lms_are_uploaded_once(paged_log_probs, monkeypatch):
    from nemo_gpu_decoding.lm import on_device

    uploads = []
    upload = on_device._upload
    monkeypatch.setattr(on_device, "_upload", lambda *given: uploads.append(1) or upload(*given))
    graph, lms = random_case(5)
    decoder = on("cuda", graph, lms, difference="never", **PAGED_OPTIONS)
    decoder.decode(paged_log_probs, PAGED_LENGTHS)
    assert len(uploads) == 2  # the large one and the small one
    decoder.decode(paged_log_probs, PAGED_LENGTHS)
    on("cuda", graph, lms, difference="never", **PAGED_OPTIONS).decode(paged_log_probs, PAGED_LENGTHS)
    assert len(uploads) == 2
    graph, lms = random_case(5, nested=True)
    on("cuda", graph, lms, difference="always", **PAGED_OPTIONS).decode(paged_log_probs, PAGED_LENGTHS)
    assert len(uploads) == 3  # their difference


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("topology", ["compact", "normal", "minimal", None])
@checked
def test_best_paths_and_final_costs_equal_the_cpu(monkeypatch, topology, seed):
    """`topology` None: with a large LM. Streams end by epsilon records, in phrases that break off, or may not end."""
    monkeypatch.setattr(cuda_engine, "FIRST_PATH", 1)
    graph, lms = random_case(seed, coarse=seed == 2, nested=seed == 1)
    boosting = build_word_boosting({"w1": 2.0, "w2 w3": 3.0, "w4 w1 w2": 4.0}, graph)
    options = {"beam": 8.0, "max_active": 100, "boosting": boosting}
    log_probs = torch.round(random_log_probs(3, 9, RANDOM_COLUMNS, seed=seed))
    seen: list[list[Any]] = []
    for backend in ("cpu", "cuda"):
        if topology is None:
            decoder = on(backend, graph, lms, difference="always" if seed == 1 else "never", **options)
        else:
            decoder = make(graph, vocab_size=11, blank_id=11, topology=topology, backend=backend, **options)
        streams = decoder.open(3)
        seen.append([])
        for begin in (0, 4):
            decoder.push(streams, log_probs[:, begin : begin + 4], [4, begin, 1])
            for rows in ([2, 0], [0, 1, 2]):
                partial = decoder.partial(streams, rows=rows)
                seen[-1] += [all_facts(partial), [(nbest.relative_cost, nbest.committed) for nbest in partial]]
        seen[-1].append(all_facts(decoder.close(streams)))
    assert seen[0] == seen[1]


@checked
def test_static_shared_memory_is_left_free(tmp_path):
    """Rows in shared memory leave the kernel what it takes for itself."""
    source = tmp_path / "sizes.cu"
    source.write_text(
        '#define COMPOSE 1\n#include "search/word_graph/large_lm/workspace.cuh"\n'
        f'static_assert(sizeof(LmShared) + 8 <= {kernel_abi.STATIC_SHARED_BYTES}, "");\n'
        f'static_assert(sizeof(Counters) == {kernel_abi.COUNTERS.itemsize}, "");\n'
    )
    EmulatedRuntime(cache=tmp_path).load(str(source), torch.device("cpu"))
    columns, most = 11_000, 90_000  # two rows fit just so without what the kernel takes for itself
    assert kernel_abi.shared_bytes(columns, 4, most)[1] == 2
    assert kernel_abi.shared_bytes(columns, 4, most - cuda_engine.LargeLMKernels.static_shared_bytes)[1] == 1
