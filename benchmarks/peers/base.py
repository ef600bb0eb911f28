"""The interface of all measured decoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks.options import BenchOptions
from benchmarks.packages import first_absent
from benchmarks.tasks import Task
from nemo_gpu_decoding import Fusion

Output = list[int] | str  # token ids of one utterance, or its text from word-level decoders
Batch = tuple[torch.Tensor, torch.Tensor]  # inputs [B, T, ...] and lengths [B]


class Hypothesis(NamedTuple):
    labels: list[int]  # tokens; of word graphs the words
    score: float  # natural log, everything included


class Setting(NamedTuple):
    """The options of a decoder in one measurement."""

    beam_size: int  # K; of word graphs the beam; 0 = greedy
    lm: bool = False  # n-gram LM fusion
    phrases: int = 0  # number of boosted phrases
    threads: int = 1
    group_size: int = 16  # of paged_biglm; 0 = no limit
    placement: str = "auto"  # of its large LM, on a GPU


class Ready(NamedTuple):
    """A decoder with its models loaded."""

    run: Callable[[torch.Tensor, torch.Tensor], Any]  # decodes a batch to the decoder's own result type; timed
    read: Callable[[Any], list[Output]]  # texts or tokens of the result of `run`
    # n-best lists of a batch, best first, if the scores are comparable with those of the strategy
    hypotheses: Callable[[torch.Tensor, torch.Tensor], list[list[Hypothesis]]] | None = None
    note: str = ""  # remark on these hypotheses
    graphs: str | None = None  # on a GPU: the mode in which CUDA graphs are used
    decoder: Any = None  # of our strategies: the `Decoder`, and what it adds to scores
    fusion: Fusion = Fusion()
    beam_beta: float = 0.0


class Peer(NamedTuple):
    """A decoder; `prepare` loads what it needs and may be slow."""

    name: str
    prepare: Callable[[BenchOptions, Task, Setting], Ready]
    needs: tuple[str, ...] = ()  # modules to import, and the pip command that brings them
    install: str = "pip install '.[bench]'"
    multithreaded: bool = False  # does it use Setting.threads? If not, its rows say one thread
    otherwise: str = ""  # additional note if it is not available

    def unavailable(self) -> str | None:
        """None, or the reason why this decoder cannot run here."""
        module = first_absent(self.needs)
        return None if module is None else f"{module} not installed: {self.install}{self.otherwise}"


def device_of(options: BenchOptions, task: Task) -> torch.device:
    """The device of a decoder's networks and LMs: that of the task's inputs, unless the option is the CPU."""
    return torch.device("cpu") if options.device == "cpu" else task.inputs.device


def alone(hypotheses: Callable[..., list[list[Hypothesis]]], batch: Batch) -> list[list[Hypothesis]]:
    """The n-best lists of every utterance by itself and without padding."""
    found = []
    for utterance, length in zip(batch[0], batch[1].tolist(), strict=True):
        given = torch.tensor([length], device=batch[1].device)
        found += hypotheses(utterance[None, :length].contiguous(), given)
    return found


def collapse(labels: list[int], blank_id: int) -> list[int]:
    """CTC: merge repeated labels, then drop blanks."""
    return [v for v, before in zip(labels, [-1, *labels], strict=False) if v not in (before, blank_id)]
