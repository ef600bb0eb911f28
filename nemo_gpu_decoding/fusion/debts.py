"""Back-off arcs that cost more for some labels than for others.

A back-off arc has one weight for all labels. Where some labels are to cost a debt d on top of it, the
arc leads to a copy of the back-off state instead, in which costly labels cost d more. The copy backs off
to a copy of the next back-off state, to which it hands its debt and what that step owes, and so on to a
copy of the root, which lists all costly labels and backs off to the root for the others:

    t --back-off, debt 2--> f --back-off, debt 1--> root

    t --> f owing 2 --> root owing 3 --> root
    f --> root owing 1 --> root

A copy of the root is large, but shared: there is one per different sum of debts. It lists the costly
labels or the others, whichever are fewer. The copies of other states have as many arcs as the states.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Columns(NamedTuple):
    """The arrays from which `BackoffAutomaton.from_arrays` makes an automaton, under its names."""

    arc_begin: np.ndarray
    arc_end: np.ndarray
    backoff_to: np.ndarray
    backoff_weights: np.ndarray
    final_weights: np.ndarray
    arc_labels: np.ndarray
    arc_weights: np.ndarray
    arc_targets: np.ndarray


def with_debts(columns: Columns, root: int, debts: np.ndarray, costly: np.ndarray) -> Columns:
    """Make labels that are costly pay the debt of every state that they leave by its back-off arc.

    Args:
        columns: an automaton with a single root; its states keep their numbers, copies come after them.
        debts: [S], 0 where nothing is owed; that of the root means nothing.
        costly: [V] bool.
    """
    owing = np.flatnonzero(debts * (np.arange(len(debts)) != root))
    if not len(owing) or not costly.any():
        return columns
    copied, owed, first, onward = _copies(columns.backoff_to, root, debts, owing)
    of_root = copied == root
    backoff_to, copies_backoff_to = columns.backoff_to.copy(), np.full(len(copied), root)
    backoff_to[owing] = len(backoff_to) + first
    copies_backoff_to[~of_root] = len(backoff_to) + onward
    lists_costly = 2 * costly.sum() <= len(costly)
    listed = np.flatnonzero(costly == lists_costly)
    root_backoffs = 0.0 if lists_costly else -owed
    counts, labels, weights, targets = _copied_arcs(columns, root, listed, copied)
    weights -= np.where(costly[labels], np.repeat(owed, counts), 0.0)
    ends = len(columns.arc_labels) + np.cumsum(counts)
    return Columns(
        arc_begin=np.append(columns.arc_begin, ends - counts),
        arc_end=np.append(columns.arc_end, ends),
        backoff_to=np.append(backoff_to, copies_backoff_to),
        backoff_weights=np.append(
            columns.backoff_weights, np.where(of_root, root_backoffs, columns.backoff_weights[copied])
        ),
        final_weights=np.append(columns.final_weights, np.zeros(len(copied))),  # no arc leads to a copy
        arc_labels=np.append(columns.arc_labels, labels),
        arc_weights=np.append(columns.arc_weights, weights),
        arc_targets=np.append(columns.arc_targets, targets),
    )


def _copies(
    backoff_to: np.ndarray, root: int, debts: np.ndarray, owing: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Which copies there must be.

    Returns:
        per copy the state that it is a copy of, and its debt; for each of `owing` the number of the copy
        that it backs off to; for each copy of another state than the root likewise.
    """
    wanted_first = np.stack([backoff_to[owing], debts[owing]], 1)
    copies = np.unique(wanted_first, axis=0)
    while True:  # one round per link of the longest back-off chain
        inner = copies[copies[:, 0] != root]
        states = inner[:, 0].astype(np.int64)
        wanted_next = np.stack([backoff_to[states], inner[:, 1] + debts[states]], 1)
        grown, number = np.unique(
            np.concatenate([wanted_first, wanted_next, copies]), axis=0, return_inverse=True
        )
        if len(grown) == len(copies):
            break
        copies = grown
    first, onward, _ = np.split(number.ravel(), np.cumsum([len(wanted_first), len(wanted_next)]))
    return copies[:, 0].astype(np.int64), copies[:, 1], first, onward


def _copied_arcs(
    columns: Columns, root: int, listed: np.ndarray, copied: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """How many arcs each copy has; their labels, weights and targets before any debt."""
    weights = np.full(len(listed), columns.backoff_weights[root], np.float64)
    targets = np.full(len(listed), root)
    own = slice(columns.arc_begin[root], columns.arc_end[root])
    _, at, own_at = np.intersect1d(
        listed, columns.arc_labels[own], assume_unique=True, return_indices=True
    )
    weights[at], targets[at] = columns.arc_weights[own][own_at], columns.arc_targets[own][own_at]
    of_root = copied == root
    begins = np.where(of_root, len(columns.arc_labels), columns.arc_begin[copied])
    counts = np.where(of_root, len(listed), columns.arc_end[copied] - columns.arc_begin[copied])
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    source = np.repeat(begins, counts) + offsets
    return (
        counts,
        np.append(columns.arc_labels, listed)[source],
        np.append(columns.arc_weights, weights)[source],
        np.append(columns.arc_targets, targets)[source],
    )
