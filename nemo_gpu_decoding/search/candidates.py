"""The best candidates of a step, in a sorted list, and the score that a candidate must reach to enter it.

A candidate is a hypothesis, `parent`, extended by a `choice`. A choice is one number per extension:

    flexctc_beam   2 * column of the log-probs + 1 for a new token; 2 * column for a blank or a repeated label
    transducers    label * D + index of the duration, for D durations; KEEP leaves the hypothesis unchanged

Candidates are in a total order: descending score, then ascending parent, then ascending choice. All runs and backends
therefore keep the same ones, even among equal scores.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.jit import linked
from nemo_gpu_decoding.search.numerics import IMPOSSIBLE


class Candidates(NamedTuple):
    """The N best candidates so far."""

    # [N] records with the arguments of `insert` as fields, and others that a search adds; in no order
    items: np.ndarray
    rank: np.ndarray  # [N] int32, the slots of `items`, best first


@linked
def insert(candidates, count, score, parent, choice, lm_state, boosting_state):
    """Insert a candidate if it is possible and among the N best; returns its slot, or -1, and the new count.

    A candidate that is already in the list is not inserted again.
    """
    items, rank = candidates.items, candidates.rank
    if not score > IMPOSSIBLE:
        return np.int32(-1), count
    at = count
    while at > 0 and _is_better(score, parent, choice, items[rank[at - 1]]):
        at -= 1
    if at == rank.shape[0]:
        return np.int32(-1), count
    if at > 0 and items[rank[at - 1]].choice == choice and items[rank[at - 1]].parent == parent:
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
    items[slot].choice = choice
    items[slot].lm_state = lm_state
    items[slot].boosting_state = boosting_state
    return slot, count + 1


@linked
def _is_better(score, parent, choice, other):
    if score != other.score:
        return score > other.score
    if parent != other.parent:
        return parent < other.parent
    return choice < other.choice


@linked
def floor_of(candidates, count, margin):
    """The score that a candidate must reach: the larger of the N-th best so far and the best minus `margin`."""
    if count == 0:
        return IMPOSSIBLE
    floor = candidates.items[candidates.rank[0]].score - margin
    if count < candidates.rank.shape[0]:
        return floor
    return max(floor, candidates.items[candidates.rank[count - 1]].score)
