"""Look-ups in a `DeviceLM`, by a kernel around paged.cuh."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from nemo_gpu_decoding.cuda.launch import Runtime, Scalar, Signature, Tensor
from nemo_gpu_decoding.lm.on_device import DeviceLM, lm_parameters
from nemo_gpu_decoding.lm.packed import PackedLM

SOURCE = Path(__file__).with_name("paged_lookups.cu")
LOOKUPS = Signature(
    "paged_lookups",
    {
        **lm_parameters("lm"),
        "asked_states": Tensor(torch.int64, ("N",)),
        "asked_labels": Tensor(torch.int64, ("N",)),
        "costs": Tensor(torch.float32, ("N",)),
        "targets": Tensor(torch.int64, ("N",)),
        "counts": Tensor(torch.int64, ("grid", 3)),
        "count": Scalar(np.int32),
    },
)

Answers = list[tuple[float, int]]  # costs, targets


class Counts(NamedTuple):
    """`LookupCounters` of all threads."""

    hits: int = 0
    misses: int = 0
    sectors: int = 0


def questions(lm: PackedLM, seed: int = 0) -> torch.Tensor:
    """Every state and label, twice, in random order. [N, 2] int64"""
    asked = [(state, label) for state in range(lm.num_states) for label in range(lm.vocab_size)]
    return torch.tensor(asked)[torch.from_numpy(np.random.default_rng(seed).permutation(2 * len(asked)) % len(asked))]


def answers(lm: PackedLM, asked: torch.Tensor) -> Answers:
    return [lm.advance(*question) for question in asked.tolist()]


def look_up(
    runtime: Runtime, table: DeviceLM, asked: torch.Tensor, *, source: Path = SOURCE, grid=4, block=32
) -> tuple[Answers, Counts]:
    """Those of the kernel, and what it had to do for them."""
    device, count = table.device, len(asked)
    states, labels = asked.T.contiguous().to(device)
    costs = torch.zeros(count, device=device)
    targets = torch.zeros(count, dtype=torch.int64, device=device)
    counts = torch.zeros((grid, 3), dtype=torch.int64, device=device)
    runtime.load(str(source), device).launch(
        LOOKUPS,
        grid=grid,
        block=block,
        **table.arguments("lm"),
        asked_states=states,
        asked_labels=labels,
        costs=costs,
        targets=targets,
        counts=counts,
        count=count,
    )
    return list(zip(costs.tolist(), targets.tolist(), strict=True)), Counts(*counts.sum(0).tolist())
