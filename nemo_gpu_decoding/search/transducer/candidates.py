"""The best choices of a step, kept in a total order: score down, then parent up, then choice up.

So two runs, and two backends, keep the same ones even among equal scores.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.jit import compiled, inlined
from nemo_gpu_decoding.search.log_space import IMPOSSIBLE
from nemo_gpu_decoding.search.row_scan import next_label

CANDIDATE = np.dtype(
    [
        ("score", np.float32),
        ("parent", np.int32),  # slot in the beam
        ("choice", np.int32),  # see `transducer.beam`
        ("lm_state", np.int32),
        ("boosting_state", np.int32),
    ],
    align=True,
)


class Candidates(NamedTuple):
    """At most N candidates."""

    items: np.ndarray  # [N] CANDIDATE, in no order
    rank: np.ndarray  # [N] int32, the slots of `items`, best first


@compiled
def new_candidates(capacity):
    return Candidates(np.empty(capacity, CANDIDATE), np.empty(capacity, np.int32))


@compiled
def insert(candidates, count, score, parent, choice, lm_state, boosting_state):
    """Insert a candidate if it is possible and among the N best; returns the new count."""
    items, rank = candidates.items, candidates.rank
    if not score > IMPOSSIBLE:
        return count
    place = count
    while place > 0 and _better(score, parent, choice, items[rank[place - 1]]):
        place -= 1
    if place == rank.shape[0]:
        return count
    slot = np.int32(count)
    if count == rank.shape[0]:
        slot = rank[count - 1]
        count -= 1
    for i in range(count, place, -1):
        rank[i] = rank[i - 1]
    rank[place] = slot
    items[slot].score = score
    items[slot].parent = parent
    items[slot].choice = choice
    items[slot].lm_state = lm_state
    items[slot].boosting_state = boosting_state
    return count + 1


@inlined
def _better(score, parent, choice, other):
    if score != other.score:
        return score > other.score
    if parent != other.parent:
        return parent < other.parent
    return choice < other.choice


@inlined
def worst_score(candidates, count):
    """What a candidate must reach: the score of the N-th best so far, if there are N."""
    if count < candidates.rank.shape[0]:
        return IMPOSSIBLE
    return candidates.items[candidates.rank[count - 1]].score


@compiled
def best_labels(row, labels):
    """Fill `labels` with the columns of the largest values of a row, largest first; returns how many.

    Of equal values the first column comes first.
    """
    count = 0
    v = 0
    while v < row.shape[0]:
        place = count
        while place > 0 and row[v] > row[labels[place - 1]]:
            place -= 1
        if place < labels.shape[0] and row[v] > IMPOSSIBLE:
            count = min(count + 1, labels.shape[0])
            for i in range(count - 1, place, -1):
                labels[i] = labels[i - 1]
            labels[place] = v
        least = row[labels[count - 1]] if count == labels.shape[0] else IMPOSSIBLE
        v = next_label(row, v + 1, least)
    return count
