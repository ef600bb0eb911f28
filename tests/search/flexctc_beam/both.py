"""A decoder on both backends: the kernels, run by the emulator, must find what the CPU finds."""

from typing import Any

import torch

from nemo_gpu_decoding.fusion.fusion import Fusion
from nemo_gpu_decoding.search.flexctc_beam.config import FlexCTCConfig
from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam
from tests.contract.subject import all_facts
from tests.random_models import random_boosting, random_lm


def on_cpu(vocab_size: int, blank_id: int, fusion: Fusion | None = None, **options: Any) -> FlexCTCBeam:
    return FlexCTCBeam(vocab_size, blank_id, FlexCTCConfig(backend="cpu", **options), fusion)


def on_cuda(vocab_size: int, blank_id: int, fusion: Fusion | None = None, **options: Any) -> FlexCTCBeam:
    return FlexCTCBeam(vocab_size, blank_id, FlexCTCConfig(backend="cuda", **options), fusion)


def random_fusion(vocab_size: int, kind: str = "both", seed: int = 0) -> Fusion:
    lm = random_lm(vocab_size, seed=seed) if kind in ("lm", "both") else None
    return Fusion(lm, 0.4, random_boosting(vocab_size, seed=seed + 1) if kind in ("boosting", "both") else None, 0.5)


def assert_equal(
    log_probs: torch.Tensor,
    lengths,
    blank_id: int | None = None,
    fusion: Fusion | None = None,
    requests=None,
    **options: Any,
) -> None:
    """Both backends return the same n-best lists: tokens, times, confidence and scores, to the bit."""
    vocab_size = log_probs.shape[2] - 1
    blank_id = vocab_size if blank_id is None else blank_id
    expected, found = (
        make(vocab_size, blank_id, fusion, **options).decode(log_probs, lengths, requests)
        for make in (on_cpu, on_cuda)
    )
    assert all_facts(found) == all_facts(expected)
