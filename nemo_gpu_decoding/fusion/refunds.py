"""Refunds of a context graph: back-off arcs with a weight that depends on the label.

A back-off arc has one weight for all labels. If some labels must also pay a refund r, the arc leads to a
copy of the back-off state. In the copy, the weights of these labels are lower by r. It backs off to a copy
of the next back-off state with the sum of the refunds so far. The last copy is one of the root: it lists the
refunding labels and backs off to the root for the others:

    t --back-off, refund 2--> f --back-off, refund 1--> root

    t --> copy of f, less 2 --> copy of root, less 3 --> root
    f --> copy of root, less 1 --> root

Copies of the root are large but shared: there is one per distinct sum of refunds. It lists the refunding
labels or the others, whichever are fewer. Copies of other states have as many arcs as the originals.
"""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.fusion.automaton import Columns


def with_refunds(columns: Columns, root: int, refunds: np.ndarray, is_refunding: np.ndarray) -> Columns:
    """Subtract the refund of each state from refunding labels that leave it by back-off.

    Args:
        columns: an automaton with a single root; its states keep their numbers, copies come after them.
        refunds: [S] natural log, 0 for none; the root's is ignored.
        is_refunding: [V] bool, whether a label pays refunds.
    """
    refunding_states = np.flatnonzero(refunds * (np.arange(len(refunds)) != root))
    if not len(refunding_states) or not is_refunding.any():
        return columns
    copied, refund, first, onward = _copies(columns.backoff_to, root, refunds, refunding_states)
    of_root = copied == root
    backoff_to, copies_backoff_to = columns.backoff_to.copy(), np.full(len(copied), root)
    backoff_to[refunding_states] = len(backoff_to) + first
    copies_backoff_to[~of_root] = len(backoff_to) + onward
    lists_refunding = 2 * is_refunding.sum() <= len(is_refunding)
    listed = np.flatnonzero(is_refunding == lists_refunding)
    root_backoffs = 0.0 if lists_refunding else -refund
    counts, labels, weights, targets = _copied_arcs(columns, root, listed, copied)
    weights -= np.where(is_refunding[labels], np.repeat(refund, counts), 0.0)
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
    backoff_to: np.ndarray, root: int, refunds: np.ndarray, refunding_states: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Number the copies of states.

    Returns:
        the original state of each copy and its refund; the copy that each of `refunding_states` backs
        off to; the copy that each copy of a state other than the root backs off to.
    """
    needed_first = np.stack([backoff_to[refunding_states], refunds[refunding_states]], 1)
    copies = np.unique(needed_first, axis=0)
    while True:  # one round per link of the longest back-off chain
        inner = copies[copies[:, 0] != root]
        states = inner[:, 0].astype(np.int64)
        needed_next = np.stack([backoff_to[states], inner[:, 1] + refunds[states]], 1)
        grown, number = np.unique(np.concatenate([needed_first, needed_next, copies]), axis=0, return_inverse=True)
        if len(grown) == len(copies):
            break
        copies = grown
    first, onward, _ = np.split(number.ravel(), np.cumsum([len(needed_first), len(needed_next)]))
    return copies[:, 0].astype(np.int64), copies[:, 1], first, onward


def _copied_arcs(
    columns: Columns, root: int, listed: np.ndarray, copied: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """How many arcs each copy has; their labels, weights and targets before any refund."""
    weights = np.full(len(listed), columns.backoff_weights[root], np.float64)
    targets = np.full(len(listed), root)
    own = slice(columns.arc_begin[root], columns.arc_end[root])
    _, at, own_at = np.intersect1d(listed, columns.arc_labels[own], assume_unique=True, return_indices=True)
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
