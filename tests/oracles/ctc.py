"""CTC decoding by brute force: every alignment of a tiny problem, no beam, no pruning."""

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np

from nemo_gpu_decoding.fusion.fusion import Fusion
from nemo_gpu_decoding.search.numerics import MOST_SCORE


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
        if fusion.source_lm is not None:
            score -= fusion.source_lm_weight * fusion.source_lm.score(labels)
        if fusion.boosting is not None and fusion.boosting_weight > 0:
            score += fusion.boosting_weight * fusion.boosting.score(labels)
        if fusion.allowed is not None:
            score -= sum(fusion.allowed.price for label in labels if not fusion.allowed.is_allowed[label])
        if score > -math.inf:
            scored.append((score, text))
    return sorted(scored, key=lambda entry: (-entry[0], entry[1]))


# ------------- Late-pruned CTC beam search by the book: all K x V continuations of a frame are scored
# No bounds, no pruning before the K best are known, one plain Python loop per step, float32 in the order
# of the definition. What a search leaves out to be fast must not show in its results.


@dataclass(frozen=True)
class Hypothesis:
    score: np.float32
    tokens: tuple[int, ...]
    last_label: int
    lm_state: int
    boosting_state: int


def beam_search(
    log_probs: np.ndarray, blank_id: int, beam_size: int, *, fusion: Fusion, beam_beta: float,
    threshold: float = np.inf,
) -> list[tuple[float, tuple[int, ...]]]:  # fmt: skip
    """The hypotheses after all frames of log_probs [T, V + 1] with merge=max, best first; no final weights."""
    lm, tree, offset = fusion.token_lm, fusion.boosting, 0.0
    beam = [Hypothesis(np.float32(0), (), -1, lm.start_state if lm else 0, tree.start_state if tree else 0)]
    for row in log_probs:
        candidates = [
            candidate
            for parent, hypothesis in enumerate(beam)
            for label in range(len(row))
            for candidate in [_extended(hypothesis, parent, row, label, blank_id, fusion, beam_beta)]
            if candidate[1].score > -np.inf
        ]
        candidates.sort(key=lambda candidate: candidate[0])
        kept: dict[tuple[tuple[int, ...], int], Hypothesis] = {}
        for _, hypothesis in candidates[:beam_size]:
            if hypothesis.score > candidates[0][1].score - np.float32(threshold):
                kept.setdefault((hypothesis.tokens, hypothesis.last_label), hypothesis)
        beam = list(kept.values())
        if beam and abs(shift := beam[0].score) > MOST_SCORE:  # scores stay small, so that float32 tells them apart
            offset += shift
            beam = [replace(hypothesis, score=hypothesis.score - shift) for hypothesis in beam]
    return [(float(hypothesis.score + np.float32(offset)), hypothesis.tokens) for hypothesis in beam]


def _extended(hypothesis, parent, row, label, blank_id, fusion, beam_beta):
    """The hypothesis after one more label, behind its key in the total order of candidates."""
    score, tokens = hypothesis.score + row[label], hypothesis.tokens
    lm_state, boosting_state = hypothesis.lm_state, hypothesis.boosting_state
    if label not in (blank_id, hypothesis.last_label):
        of_automaton = label - 1 if label > blank_id else label
        score = score + np.float32(beam_beta)
        tokens = (*tokens, label)
        weight, bonus = np.float32(0), np.float32(0)
        if fusion.token_lm:
            weight, lm_state = fusion.token_lm.advance(lm_state, of_automaton)
            weight = np.float32(fusion.lm_weight) * np.float32(weight)
        if fusion.boosting:
            bonus, boosting_state = fusion.boosting.advance(boosting_state, of_automaton)
            bonus = np.float32(fusion.boosting_weight) * np.float32(bonus)
        score = score + weight + bonus
    key = (-score, parent, label)
    return key, Hypothesis(score, tokens, label, lm_state, boosting_state)
