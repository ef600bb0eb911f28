"""Which runtime is in use."""

from __future__ import annotations

import threading

import pytest

from nemo_gpu_decoding.cuda.driver import CudaRuntime
from nemo_gpu_decoding.cuda.launch import runtime, use_runtime


def test_the_runtime_is_cudas_and_one_for_all():
    assert isinstance(runtime(), CudaRuntime)
    assert runtime() is runtime()


def seen_by_another_thread():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(runtime()))
    thread.start()
    thread.join()
    return seen[0]


def test_a_replacement_serves_all_threads_until_its_block_ends():
    outer, inner, before = CudaRuntime(), CudaRuntime(), runtime()
    with use_runtime(outer):
        with use_runtime(inner):
            assert runtime() is inner
            assert seen_by_another_thread() is inner
        assert seen_by_another_thread() is outer
    assert runtime() is before


def test_an_exception_ends_the_block_too():
    before = runtime()
    with pytest.raises(KeyError), use_runtime(CudaRuntime()):
        raise KeyError
    assert runtime() is before
