"""CUDA graphs, played by the host: what is captured is written down, and replayed from there.

    monkeypatch.setattr(module, "capture_while", captured_while)

Takes the place of `capture_while` on CPU tensors. As on a GPU, a replay runs no
Python of the body: the same kernels and torch operators work on the same memory once more. So a body
that reads a tensor on the host, or a replay after a buffer was replaced, shows here too. Kernels
don't run while they are captured; torch operators do, which must do no harm.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nemo_gpu_decoding.cuda.launch import runtime
from tests.cuda_emulator.emulator import EmulatedRuntime

Recording = list[Callable[[], None]]
_handles = itertools.count(1)


class CapturedWhile:
    """A graph with a WHILE node, whose condition the emulator notes."""

    def __init__(self, handle: int, body: Recording) -> None:
        self._handle, self._body = handle, body
        self.replays = self.rounds = 0

    def replay(self) -> None:
        self.replays += 1
        _emulator().conditions[self._handle] = 1  # its default
        while _emulator().conditions[self._handle]:
            self.rounds += 1
            for act in self._body:
                act()


def captured_while(device: torch.device, body: Callable[[int], None]) -> CapturedWhile:
    handle = next(_handles)
    with _recording_of() as recording:
        body(handle)
    return CapturedWhile(handle, recording)


def _emulator() -> EmulatedRuntime:
    emulator = runtime()
    assert isinstance(emulator, EmulatedRuntime)
    return emulator


@contextmanager
def _recording_of() -> Iterator[Recording]:
    """Write launches and operators down, in their order."""
    recording: Recording = []
    emulator = _emulator()
    emulator.recording = recording
    try:
        with _Operators(recording):
            yield recording
    finally:
        emulator.recording = None


class _Operators(TorchDispatchMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not all(isinstance(part, Tensor) for part in tree_leaves(result)):
            raise RuntimeError(f"{func} gives the host a value, which a captured graph can't do")
        self._recording.append(partial(_repeat, func, args, kwargs or {}, result))
        return result


def _repeat(func: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
    """Run an operator again; what it computes anew goes where it went the first time."""
    tensors = [part for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor)]
    given = {_storage(part) for part in tensors if part.layout is torch.strided}
    for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
        if _storage(new) not in given:  # neither a view nor in place
            old.copy_(new)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
