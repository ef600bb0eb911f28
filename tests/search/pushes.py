"""Counts what a push does outside of its kernels."""

from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

VIEWS = {"alias", "detach", "expand", "select", "slice", "unsqueeze", "view"}


class Operators(TorchDispatchMode):
    """Notes the names of torch's operators, and of the calls that copy tensors between devices."""

    def __init__(self):
        super().__init__()
        self.names = []
        self.moves = []  # on the CPU, where the emulator runs, these calls reach no operator

    @property
    def work(self):
        """The operators that allocate or change memory."""
        return [name for name in self.names if name not in VIEWS]

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@contextmanager
def operators():
    found = Operators()
    with pytest.MonkeyPatch.context() as patch, found:
        for name in ("cpu", "to"):
            call = getattr(torch.Tensor, name)
            patch.setattr(
                torch.Tensor, name, lambda *given, _n=name, _c=call, **o: found.moves.append(_n) or _c(*given, **o)
            )
        yield found
