"""Checks before any timing on a GPU: our kernels against our CPU search, and ours against the peer's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields

import numpy as np

from nemo_gpu_decoding.bench.cases import Case, Check
from nemo_gpu_decoding.bench.peers.base import Peer, Setting
from nemo_gpu_decoding.bench.strategies import Strategy
from nemo_gpu_decoding.bench.task import Task
from nemo_gpu_decoding.bench.verify import Errors, Verdict, verify
from nemo_gpu_decoding.search.result import Path


class Verifier:
    """Keeps what a check needs, since the rows of a run share their utterances and settings.

    Args:
        task: all utterances, on the GPU.
        few: how many of them are compared with a peer, which decodes each alone.
        on_cpu: makes the strategy with the CPU backend, prepared for a setting.
        alone: makes the peer of a case, prepared, for utterances alone.
    """

    def __init__(
        self,
        task: Task,
        few: int,
        on_cpu: Callable[[Setting], Strategy],
        alone: Callable[[Case], Peer],
    ) -> None:
        self._task = task
        self._few = task.first(few)
        self._on_cpu = on_cpu
        self._alone = alone
        self._expected: dict[Setting, list[Path]] = {}
        self._verdicts: dict[tuple[str, Setting, Setting], Verdict] = {}

    def verify(
        self, case: Case, ours: Strategy, paths: Sequence[Path], errors: tuple[Errors, Errors]
    ) -> Verdict:
        """Do the results of a batch hold?

        Args:
            ours: prepared for the case.
            paths: what ours found for the batch, the first utterances of the task.
            errors: of the peer's and of our outputs on the batch.
        """
        same = sum(map(identical, paths, self._paths_on_cpu(case.ours)))
        verdict = self._against_peer(case, ours, errors)
        how = f"{verdict.how}; GPU = CPU to the bit: {same} of {len(paths)}"
        return Verdict(verdict.verified and same == len(paths), how)

    def _paths_on_cpu(self, setting: Setting) -> list[Path]:
        if setting not in self._expected:
            task = self._task.on("cpu")
            self._expected[setting] = self._on_cpu(setting).paths(task.log_probs, task.lengths)
        return self._expected[setting]

    def _against_peer(self, case: Case, ours: Strategy, errors: tuple[Errors, Errors]) -> Verdict:
        assert case.peer is not None
        if case.check in (Check.WER, Check.SAME_WER):  # of the whole batch, so it is not kept
            return verify(case.check, self._few, self._alone(case), ours, errors)
        key = (case.peer.name, case.theirs, case.ours)
        if key not in self._verdicts:
            self._verdicts[key] = verify(case.check, self._few, self._alone(case), ours, errors)
        return self._verdicts[key]


def identical(path: Path, other: Path) -> bool:
    """All numbers of both are equal, to the bit."""
    for field in fields(path):
        mine, theirs = getattr(path, field.name), getattr(other, field.name)
        if isinstance(mine, np.ndarray) or isinstance(theirs, np.ndarray):
            if not (type(mine) is type(theirs) and np.array_equal(mine, theirs)):
                return False
        elif mine != theirs:
            return False
    return True
