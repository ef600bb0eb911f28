"""The K best continuations of a frame, and the lowest score that can enter them.

`Candidates` is sorted by a total order: descending score, then ascending parent, then ascending label. All runs and
backends therefore keep the same K candidates, even among equal scores.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.jit import linked
from nemo_gpu_decoding.search.log_space import IMPOSSIBLE, MOST_LOG_PROB

# One continuation of a hypothesis by the label of a frame.
CANDIDATE = np.dtype(
    [
        ("score", np.float32),
        ("parent", np.int32),  # slot in the beam
        ("label", np.int32),  # ~label for a new token, as in `BackPointers`
        ("lm_state", np.int32),
        ("boosting_state", np.int32),
        ("blank_score", np.float32),  # this field and those below: merge=prefix only
        ("token_score", np.float32),
        ("same_text_as", np.int32),  # slot in the beam whose text this one keeps, or -1
    ],
    align=True,
)


class Candidates(NamedTuple):
    """The best continuations of a frame so far."""

    items: np.ndarray  # [K] CANDIDATE, in no order
    rank: np.ndarray  # [K] int32, the slots of `items`, best first


@linked
def insert(items, rank, count, score, parent, label):
    """Insert a candidate if it is among the K best; returns its slot (or -1) and the new count.

    Order: descending score, then ascending parent, then ascending label; a repeated label precedes the same label as
    a new token. A candidate that is already there is not inserted again.
    """
    if score == IMPOSSIBLE:
        return np.int32(-1), count
    at = count
    while at > 0 and _better(score, parent, label, items[rank[at - 1]]):
        at -= 1
    if at == rank.shape[0]:
        return np.int32(-1), count
    if at > 0 and items[rank[at - 1]].label == label and items[rank[at - 1]].parent == parent:
        return np.int32(-1), count
    slot = np.int32(count)
    if count == rank.shape[0]:
        slot = np.int32(rank[count - 1])
        count -= 1
    for i in range(count, at, -1):
        rank[i] = rank[i - 1]
    rank[at] = slot
    items[slot].score = score
    items[slot].parent = parent
    items[slot].label = label
    return slot, count + 1


@linked
def _better(score, parent, label, other):
    if score != other.score:
        return score > other.score
    if parent != other.parent:
        return parent < other.parent
    if plain(label) != plain(other.label):
        return plain(label) < plain(other.label)
    return label > other.label


@linked
def plain(label):
    return label if label >= 0 else ~label


@linked
def floor_of(candidates, count, params):
    """The score that a candidate must reach: the larger of the K-th best so far and the best minus the threshold."""
    if count == 0:
        return IMPOSSIBLE
    floor = candidates.items[candidates.rank[0]].score - params.threshold
    if count == candidates.rank.shape[0]:
        floor = max(floor, candidates.items[candidates.rank[count - 1]].score)
    return floor


@linked
def least_log_prob(floor, best):
    """Lower bound of the log-probability of labels that can reach the floor, with slack for float32 rounding.

    It is at most MOST_LOG_PROB, so that a scan of the row finds every larger (invalid) value.

    Args:
        best: upper bound of the score of a label with log-probability 0.
    """
    slack = 1e-6 * (abs(np.float64(floor)) + abs(best)) + 1e-5
    return np.float32(min(np.float64(floor) - best - slack, np.float64(MOST_LOG_PROB)))
