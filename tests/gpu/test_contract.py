"""The contract of all decoders on a GPU; flexctc_beam with each type of log-probs that kernels read."""

from typing import Any

import torch

from tests.contract.checks import *
from tests.contract.subjects import CudaWFSTSubject, DifferenceAutomaton, FlexCTC, PagedBigLMSubject
from tests.gpu import REHEARSAL

DEVICE = "cpu" if REHEARSAL else "cuda"


class InType:
    """A decoder that gets all log-probs in one type."""

    def __init__(self, decoder: Any, dtype: torch.dtype) -> None:
        vars(self).update(_decoder=decoder, _dtype=dtype)

    def decode(self, log_probs: Any, *others: Any, **options: Any):
        return self._decoder.decode(self._converted(log_probs), *others, **options)

    def push(self, streams: Any, log_probs: Any, *others: Any, **options: Any) -> dict[int, ValueError]:
        return self._decoder.push(streams, self._converted(log_probs), *others, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of a copy that has no decoder yet
            raise AttributeError(name)
        return getattr(self._decoder, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._decoder, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._decoder, name)

    def _converted(self, log_probs: Any) -> Any:
        if isinstance(log_probs, torch.Tensor) and log_probs.is_floating_point():
            return log_probs.to(self._dtype)
        return log_probs


class InFloat32(FlexCTC):
    dtype = torch.float32

    def make(self, *args, **options):
        return InType(super().make(*args, **options), self.dtype)

    def inputs(self, *, seed=3):
        """Numbers that the type can hold, in float32: the checks compute with them."""
        return super().inputs(seed=seed).to(self.dtype).float()


class InFloat16(InFloat32):
    dtype = torch.float16


class InBFloat16(InFloat32):
    dtype = torch.bfloat16


def on_gpu(kind: type) -> type:
    return type(kind.__name__, (kind,), {"__init__": lambda self, backend: kind.__init__(self, backend, DEVICE)})


test_decoder_has_all_verbs = None  # `InType` is none
TABLE = [
    ("flexctc_beam float32", on_gpu(InFloat32), ("cuda",)),
    ("flexctc_beam float16", on_gpu(InFloat16), ("cuda",)),
    ("flexctc_beam bfloat16", on_gpu(InBFloat16), ("cuda",)),
    ("cuda_wfst", on_gpu(CudaWFSTSubject), ("cuda",)),
    ("paged_biglm", on_gpu(PagedBigLMSubject), ("cuda",)),
    ("paged_biglm difference", on_gpu(DifferenceAutomaton), ("cuda",)),
]
