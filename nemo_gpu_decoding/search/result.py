"""What every decoder returns: plain numbers, no NeMo, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class ScoreParts:
    """Where a score comes from; the parts add up to `Path.score`. Natural log."""

    acoustic: float
    lm: float = 0.0  # lm_weight * log P_LM, final weight included
    boosting: float = 0.0  # boosting_weight * bonus
    insertion: float = 0.0  # beam_beta * number of tokens


@dataclass(frozen=True)
class Path:
    """One hypothesis of one utterance. n tokens, T frames decoded."""

    tokens: np.ndarray  # [n] int32 token ids, no blanks
    frames: np.ndarray  # [n] int32, frame at which each token starts (0 = first frame of the stream)
    repeats: np.ndarray  # [n] int32, number of consecutive frames that emit the token, >= 1
    token_confidence: np.ndarray  # [n] float32 in [0, 1]: mean posterior of the token over these frames
    score: float
    parts: ScoreParts
    alignment: np.ndarray | None = None  # [T] int32 label per frame, blanks included; if asked for
    alignment_log_probs: np.ndarray | None = None  # [T] float32 log-posterior of these labels

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class NBest(Sequence[Path]):
    """The hypotheses of one utterance, best first, no two with the same tokens; never empty."""

    paths: tuple[Path, ...]
    num_frames: int = 0
    notes: tuple[str, ...] = field(default=())  # what a user should know, e.g. overflow of a limit

    @property
    def best(self) -> Path:
        return self.paths[0]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index):
        return self.paths[index]

    def __iter__(self) -> Iterator[Path]:
        return iter(self.paths)
