"""The shape of a decoder under measurement, ours included."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from nemo_gpu_decoding.bench.options import BenchOptions

Output = list[int] | str  # token ids of one utterance, or its text from decoders that know words


class Hypothesis(NamedTuple):
    tokens: list[int]
    score: float  # natural log, everything included


@dataclass(frozen=True)
class Setting:
    """What one measurement asks of a decoder; goes into the row as `params`."""

    beam_size: int  # K; 0 = greedy
    lm: bool = False  # n-gram LM fusion
    phrases: int = 0  # number of boosted phrases
    threads: int = 1

    def as_params(self) -> dict[str, Any]:
        return {
            "beam_size": self.beam_size,
            "lm": self.lm,
            "boosting": self.phrases > 0,
            "phrases": self.phrases,
            "threads": self.threads,
        }


class Peer(ABC):
    """A decoder. `prepare` loads and may be slow; `decode` is what gets timed."""

    name: str
    # Modules to import, and the pip command that brings them.
    needs: tuple[str, ...] = ()
    install: str = "pip install 'nemo-gpu-decoding[bench]'"
    # Does it use Setting.threads? If not, it runs on one thread and its rows say so.
    multithreaded = False
    # On a GPU: the mode in which CUDA graphs are used, for the record.
    graphs: str | None = None

    def __init__(self, options: BenchOptions) -> None:
        self.options = options

    def available(self) -> str | None:
        """None, or the reason why this decoder cannot run here."""
        missing = [module for module in self.needs if importlib.util.find_spec(module) is None]
        return f"{', '.join(missing)} not installed: {self.install}" if missing else None

    @abstractmethod
    def prepare(self, task: Any, setting: Setting) -> None:
        """Load models and build what `decode` needs.

        Args:
            task: a `Task`, or a `TransducerTask`, with the files that the setting needs.
        """

    @abstractmethod
    def decode(self, log_probs: torch.Tensor, lengths: torch.Tensor) -> list[Output]:
        """Best hypotheses of a batch: log_probs [B, T, V + 1] natural log, lengths [B]."""

    def results(self, log_probs: torch.Tensor, lengths: torch.Tensor) -> object:
        """What a user of the decoder gets, in its own form; this is what gets timed on a GPU."""
        return self.decode(log_probs, lengths)


class ScoringPeer(Peer):
    """A decoder over tokens whose hypotheses come with comparable scores."""

    @abstractmethod
    def hypotheses(self, log_probs: torch.Tensor, lengths: torch.Tensor) -> list[Hypothesis]:
        """As `decode`, with scores."""

    def decode(self, log_probs: torch.Tensor, lengths: torch.Tensor) -> list[Output]:
        return [hypothesis.tokens for hypothesis in self.hypotheses(log_probs, lengths)]

    def hypotheses_alone(self, log_probs: torch.Tensor, lengths: torch.Tensor) -> list[Hypothesis]:
        """The same, every utterance by itself and without padding."""
        hypotheses = []
        for utterance, length in zip(log_probs, lengths.tolist(), strict=True):
            alone = utterance[None, :length].contiguous()
            hypotheses += self.hypotheses(alone, torch.tensor([length], device=lengths.device))
        return hypotheses


def collapse(labels: list[int], blank_id: int) -> list[int]:
    """CTC: merge repeated labels, then drop blanks."""
    return [v for v, before in zip(labels, [-1, *labels], strict=False) if v not in (before, blank_id)]
