"""A transducer whose output for a row is the same to the bit in every batch, and decoders on both backends."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from nemo_gpu_decoding.fusion.fusion import Fusion
from nemo_gpu_decoding.search.transducer.aes import AESPlusPlus
from nemo_gpu_decoding.search.transducer.alsd import ALSDPlusPlus
from nemo_gpu_decoding.search.transducer.config import AESConfig, ALSDConfig
from tests.contract.subject import all_facts
from tests.search.flexctc_beam.both import random_fusion

__all__ = ["random_fusion"]
STRATEGIES = {"alsd_pp": (ALSDPlusPlus, ALSDConfig), "aes_pp": (AESPlusPlus, AESConfig)}

WIDTH = 6


class TableNetworks:
    """Looks at the last two tokens; `blank_bias` makes blanks likely, `sharpness` rows peaked."""

    def __init__(self, vocab_size, durations=(), *, seed=0, blank_bias=1.0, sharpness=2.0, max_length=None):
        generator = torch.Generator().manual_seed(seed)

        def weights(*shape):
            return torch.randn(*shape, generator=generator)

        self.vocab_size = vocab_size
        self.durations = tuple(durations)
        self.encoder_size = WIDTH
        self.max_length = -1 if max_length is None else max_length
        self.last = weights(vocab_size + 1, WIDTH)
        self.second_last = weights(vocab_size + 1, WIDTH)
        self.output = sharpness * weights(WIDTH, vocab_size + 1 + len(durations))
        self.bias = torch.zeros(vocab_size + 1 + len(durations))
        self.bias[vocab_size] = blank_bias

    def evaluation(self):
        return nullcontext()

    def project_encoder(self, frames):
        frames = frames.float()
        return torch.cat([frames, torch.zeros(len(frames), 1)], dim=1)

    def start(self):
        return self._predicted(torch.tensor([[self.vocab_size, self.vocab_size, 0]]))

    def predict(self, labels, state):
        (before,) = state
        assert ((labels >= 0) & (labels < self.vocab_size)).all()
        return self._predicted(torch.stack([labels, before[:, 0], before[:, 2] + 1], dim=1))

    def _predicted(self, state):
        full = (state[:, 2:] == self.max_length).float()
        return torch.cat([self.last[state[:, 0]] + 0.5 * self.second_last[state[:, 1]], full], dim=1), (state,)

    def join(self, frames, predictions):
        hidden = torch.tanh(frames[:, :WIDTH] + predictions[:, :WIDTH])
        logits = self.bias.expand(len(frames), -1).clone()
        for i in range(WIDTH):
            logits += hidden[:, i : i + 1] * self.output[i]
        logits[predictions[:, WIDTH] > 0, : self.vocab_size] = -float("inf")
        return logits


def random_frames(batch, frames, *, seed):
    return 1.5 * torch.randn(batch, frames, WIDTH, generator=torch.Generator().manual_seed(seed))


def assert_equal(make: Any, networks, config, frames, lengths, fusion: Fusion | None = None, requests=None) -> None:
    """The kernels, run by the emulator, find the n-best lists of the CPU, to the bit."""
    expected, found = (
        make(networks, replace(config, backend=backend), fusion).decode(frames, lengths, requests)
        for backend in ("cpu", "cuda")
    )
    assert all_facts(found) == all_facts(expected)
    assert [nbest.num_frames for nbest in found] == [nbest.num_frames for nbest in expected]


def assert_same(found, expected, score: float = 1e-4) -> None:
    """The same tokens and frames, and scores that differ by `score` at most."""
    for nbest, wanted in zip(found, expected, strict=True):
        assert [path.tokens.tolist() for path in nbest] == [path.tokens.tolist() for path in wanted]
        for path, other in zip(nbest, wanted, strict=True):
            assert path.frames.tolist() == other.frames.tolist()
            assert path.score == pytest.approx(other.score, abs=score)
