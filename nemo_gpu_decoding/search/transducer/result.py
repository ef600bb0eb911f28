"""What a transducer search returns beyond a `Path`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nemo_gpu_decoding.search.result import Path


@dataclass(frozen=True)
class TransducerPath(Path):
    """One hypothesis of one utterance. n tokens, m steps of the alignment.

    `parts.acoustic` is all that the networks contributed, summed over the alignments that were
    recombined; with blank_lm_score_mode=lm_weighted_full that includes what blanks and tokens got
    from the joint's blank probability. `repeats` is the duration, at least 1.
    """

    # [n] int32, frames that the model moved on with each token (TDT); None for RNN-T
    durations: np.ndarray | None = None
    # [m] int32, frame of every label in `alignment`, which lists blanks too (several labels may share
    # a frame); if alignments were asked for
    alignment_frames: np.ndarray | None = None
