"""The primitives of common.cuh, on the GPU: the tests are those that the emulator passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_gpu_decoding.cuda.launch import Signature, Tensor, runtime
from tests.cuda import test_common_cuh as emulated
from tests.cuda.test_common_cuh import (  # noqa: F401  (collected here)
    test_appending_keeps_what_passes_and_counts_all,
    test_every_half_and_bfloat16_becomes_the_float_it_stands_for,
    test_floats_are_rounded_as_torch_rounds_them,
    test_keys_of_floats_sort_as_the_floats,
    test_ordering_records_by_a_comparator,
    test_reductions_and_scans,
    test_rows_fetched_ahead_arrive_whole,
    test_sorting_in_place,
)


class HostTensors:
    """A runtime that takes tensors of the host: they go to the GPU, and come back with what is new."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def load(self, source: str, device: torch.device, defines: Any = None) -> HostTensors:
        self._module = runtime().load(source, self._device, defines)
        return self

    def launch(self, signature: Signature, /, **options: Any) -> None:
        hosts = {name: options[name] for name, kind in signature.parameters.items() if isinstance(kind, Tensor)}
        copies = {name: self._there(tensor) for name, tensor in hosts.items()}
        self._module.launch(signature, **(options | copies))
        for name, tensor in hosts.items():
            tensor.copy_(copies[name])

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that lies as far behind an aligned address as the tensor itself."""
        skip = tensor.storage_offset()
        memory = torch.empty(skip + tensor.numel(), dtype=tensor.dtype, device=self._device)
        return memory[skip:].view(tensor.shape).copy_(tensor)


@pytest.fixture
def emulated_runtime(request, device):
    if getattr(request, "param", {}).get("check"):
        pytest.skip("the emulator's checker is not here; see test_sanitizer.py")
    return HostTensors(device)


def test_gpu_tests_of_primitives_are_complete():
    assert {name for name in vars(emulated) if name.startswith("test_") and "nvrtc" not in name} <= set(globals())
