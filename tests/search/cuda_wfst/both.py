"""A decoder on both backends: the kernels, run by the emulator, must find what the CPU finds."""

from __future__ import annotations

from typing import Any

from nemo_gpu_decoding.search.word_graph import cpu_engine, kernel_abi
from nemo_gpu_decoding.search.word_graph.decoder import CudaWFST
from nemo_gpu_decoding.search.word_graph.lattice import Lattice
from tests.contract.facts import all_facts
from tests.search.cuda_wfst.models import make


def on_cpu(graph, **options: Any) -> CudaWFST:
    return make(graph, backend="cpu", **options)


def on_cuda(graph, **options: Any) -> CudaWFST:
    return make(graph, backend="cuda", **options)


def assert_equal(graph, log_probs, lengths, requests=None, **options: Any):
    """Both backends return the same results: tokens, times, words, scores and notes, to the bit."""
    options = {"max_active": 200, **options}
    expected, found = (
        build(graph, **options).decode(log_probs, lengths, requests) for build in (on_cpu, on_cuda)
    )
    assert all_facts(found) == all_facts(expected)
    assert [nbest.num_frames for nbest in found] == [nbest.num_frames for nbest in expected]
    return found


def assert_equal_lattices(graph, log_probs, lengths, requests=None, **options: Any):
    """Both backends keep the same lattices, and return the same n best of each, to the bit."""
    found = assert_equal(graph, log_probs, lengths, requests, lattice=True, **options)
    expected = on_cpu(graph, lattice=True, **{"max_active": 200, **options}).decode(
        log_probs, lengths, requests
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert_same_lattice(ours.lattice, theirs.lattice)
    return found


def assert_same_lattice(lattice: Lattice, other: Lattice) -> None:
    """The same nodes, links and ends, in the same order, to the bit."""
    for name in ("node_frames", "links", "ends"):
        own, others = getattr(lattice, name), getattr(other, name)
        for field in own.dtype.names or (...,):  # what lies between fields means nothing
            assert own[field].tolist() == others[field].tolist(), (name, field)
    assert lattice.reaches_end == other.reaches_end


def limit_tokens(monkeypatch, capacity: int) -> None:
    """Room for so few tokens of a frame, on both backends."""

    new_workspace = cpu_engine.new_workspace

    def small_workspace(*sizes: int, **options: Any):
        work = new_workspace(*sizes, **options)
        return work._replace(next_tokens=work.next_tokens[:capacity])

    monkeypatch.setattr(cpu_engine, "new_workspace", small_workspace)
    monkeypatch.setattr(kernel_abi, "token_capacity", lambda max_active: capacity)
