"""CTC decoding by brute force: every alignment of a tiny problem, no beam, no pruning."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import numpy as np

from nemo_gpu_decoding.fusion.fusion import Fusion


def collapse(alignment, blank_id):
    """The text of an alignment: repeats folded, blanks dropped."""
    folded = [label for i, label in enumerate(alignment) if i == 0 or label != alignment[i - 1]]
    return tuple(label for label in folded if label != blank_id)


def acoustic_scores(log_probs, blank_id, *, add):
    """log P of every text: summed over alignments, or of its best alignment. log_probs [T, V + 1]."""
    scores = defaultdict(lambda: -math.inf)
    frames, columns = log_probs.shape
    for alignment in itertools.product(range(columns), repeat=frames):
        score = float(sum(log_probs[t, label] for t, label in enumerate(alignment)))
        text = collapse(alignment, blank_id)
        scores[text] = np.logaddexp(scores[text], score) if add else max(scores[text], score)
    return dict(scores)


def ranking(log_probs, blank_id, *, add, fusion=None, beam_beta=0.0):
    """All texts with their full scores, best first: [(score, text)]."""
    fusion = fusion or Fusion()

    def label_of(column):
        return column - 1 if column > blank_id else column

    scored = []
    for text, score in acoustic_scores(log_probs, blank_id, add=add).items():
        labels = [label_of(column) for column in text]
        score += beam_beta * len(text)
        if fusion.lm is not None and fusion.lm_weight > 0:
            score += fusion.lm_weight * fusion.lm.score(labels)
        if fusion.boosting is not None and fusion.boosting_weight > 0:
            score += fusion.boosting_weight * fusion.boosting.score(labels)
        scored.append((score, text))
    return sorted(scored, key=lambda entry: (-entry[0], entry[1]))
