"""A decoder on both backends: the kernels, run by the emulator, must find what the CPU finds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nemo_gpu_decoding.fusion.fusion import Fusion
from tests.contract.facts import facts
from tests.random_models import random_boosting, random_lm


def random_fusion(vocab_size: int, kind: str = "both", seed: int = 0) -> Fusion:
    """A random LM, random phrases, both or nothing."""
    lm = random_lm(vocab_size, seed=seed) if kind in ("lm", "both") else None
    boosting = random_boosting(vocab_size, seed=seed + 1) if kind in ("boosting", "both") else None
    return Fusion(lm, 0.4, boosting, 0.5)


def assert_equal(
    make: Any, networks, config, frames, lengths, fusion: Fusion | None = None, requests=None
) -> None:
    """Both backends return the same n-best lists, to the bit. `make`: the decoder's class."""
    expected, found = (
        make(networks, replace(config, backend=backend), fusion).decode(frames, lengths, requests)
        for backend in ("cpu", "cuda")
    )
    assert [facts(nbest) for nbest in found] == [facts(nbest) for nbest in expected]
    assert [nbest.num_frames for nbest in found] == [nbest.num_frames for nbest in expected]
