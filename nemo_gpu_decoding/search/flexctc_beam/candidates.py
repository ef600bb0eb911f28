"""The K best continuations of a frame, and the floor under which nothing can enter.

`Candidates` is filled in any order and stays sorted by a total order: score down, then parent up, then
label up. So two runs, and two backends, keep the same K even among equal scores.
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
        ("blank_score", np.float32),  # this and what follows: merge=prefix only
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

    The order is total: score down, then parent up, then label up, a label that goes on before the same
    as a new token. What is there already is not inserted again.
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
    """The score that a candidate must reach: the K-th best so far, and the best less the threshold."""
    if count == 0:
        return IMPOSSIBLE
    floor = candidates.items[candidates.rank[0]].score - params.threshold
    if count == candidates.rank.shape[0]:
        floor = max(floor, candidates.items[candidates.rank[count - 1]].score)
    return floor


@linked
def least_log_prob(floor, best):
    """No label below this log-probability can reach the floor, with slack for float32 rounding.

    It is at most MOST_LOG_PROB, so that a scan of the row meets every larger value.

    Args:
        best: the score that a label of log-probability 0 could get at best.
    """
    slack = 1e-6 * (abs(np.float64(floor)) + abs(best)) + 1e-5
    return np.float32(min(np.float64(floor) - best - slack, np.float64(MOST_LOG_PROB)))
