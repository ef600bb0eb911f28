"""flexctc_beam keeps the contract of all CTC decoders on a GPU, whatever the type of the log-probs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam
from tests.contract.ctc_decoder import BATCH, FRAMES, VOCAB, CTCDecoderContract
from tests.gpu.rehearsal import REHEARSAL
from tests.random_models import random_log_probs
from tests.search.flexctc_beam.both import on_cuda


class InType:
    """A decoder that gets all log-probs in one type."""

    def __init__(self, decoder: FlexCTCBeam, dtype: torch.dtype) -> None:
        self._decoder = decoder
        self._dtype = dtype

    def decode(self, log_probs: Any, *others: Any):
        return self._decoder.decode(self._converted(log_probs), *others)

    def push(self, streams: Any, log_probs: Any, lengths: Any) -> None:
        self._decoder.push(streams, self._converted(log_probs), lengths)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def _converted(self, log_probs: Any) -> Any:
        if isinstance(log_probs, torch.Tensor) and log_probs.is_floating_point():
            return log_probs.to(self._dtype)
        return log_probs


class TestFlexCTCBeamInFloat32(CTCDecoderContract):
    device = "cpu" if REHEARSAL else "cuda"
    dtype = torch.float32

    def make(self, vocab_size, blank_id, fusion=None, **options):
        return InType(on_cuda(vocab_size, blank_id, fusion, **options), self.dtype)

    @pytest.fixture
    def inputs(self):
        """Numbers that the type can hold, in float32: the tests compute with them."""
        values = random_log_probs(BATCH, FRAMES, VOCAB + 1, seed=3)
        return values.to(self.dtype).float().to(self.device)


class TestFlexCTCBeamInFloat16(TestFlexCTCBeamInFloat32):
    dtype = torch.float16


class TestFlexCTCBeamInBFloat16(TestFlexCTCBeamInFloat32):
    dtype = torch.bfloat16
