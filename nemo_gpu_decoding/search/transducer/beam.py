"""What a transducer search remembers of its hypotheses, and the small steps that all searches share.

RNN-T is treated as a TDT model whose only duration is 0 with probability 1: a token stays in its
frame, and a blank, whatever its duration, moves on by at least one frame. So there is one search for
both. A `choice` is what a hypothesis is extended by: label * D + index of the duration, D durations;
STAY leaves the hypothesis as it is.

The tokens of all hypotheses form a tree: a node per token (with `alignments` also per blank) that
points to the node before it. Example with two hypotheses "4 7" and "4 2", the latter a frame later:

    node      0     1     2          node 0 is the root, the empty text
    parent   -1     0     1 ...
    label    -1     4     7

**The memory of predictions.** A search meets the same text again and again: a hypothesis that waits
with a blank proposes its best token anew in every frame. So the prediction network's output is kept
per text: an entry is found by the text's hash and length, the one that was not used for longest gives
way to a new one, and the network runs only for texts that are not there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.fusion.lookup import ANY_WEIGHT, lookup
from nemo_gpu_decoding.jit import compiled, inlined
from nemo_gpu_decoding.search.text_hash import extended_hash

NO_LABEL = -1
STAY = -1  # the choice to leave a hypothesis as it is
BAD_INPUT = -1  # instead of a beam's size: the joint gave NaN or +inf
ROOT = 0

# One hypothesis; a batch is an array [B, K] of them. Scores are natural log.
HYPOTHESIS = np.dtype(
    [
        ("score", np.float32),
        ("last_label", np.int32),  # last token, or NO_LABEL
        ("text_hash", np.uint64),
        ("prefix_hash", np.uint64),  # of the text without its last token
        ("length", np.int32),  # tokens so far
        ("frame", np.int32),  # the frame to read next
        ("symbols", np.int32),  # tokens emitted since the last move to a later frame
        ("open", np.int32),  # 1: wants the joint at `frame`, 0: waits for others
        ("node", np.int32),  # of its last token (or blank) in the tree
        ("memo", np.int32),  # entry of its text in the memory of predictions
        ("lm_state", np.int32),
        ("boosting_state", np.int32),
    ],
    align=True,
)

NODE = np.dtype(
    [
        ("parent", np.int32),
        ("label", np.int32),
        ("frame", np.int32),  # in which it was emitted
        ("duration", np.int32),  # frames moved on with it
        ("log_prob", np.float32),  # of the label, by the joint
    ]
)


class Batch(NamedTuple):
    """n utterances being searched. P entries in the memory of predictions, N nodes."""

    beam: np.ndarray  # [n, K] HYPOTHESIS
    sizes: np.ndarray  # [n] int32, live hypotheses; BAD_INPUT, or 0 where no label was possible
    ends: np.ndarray  # [n] int64, frames known so far
    steps: np.ndarray  # [n] int64, times that the utterance was worked on
    expansions: np.ndarray  # [n] int32, aes_pp: tokens emitted at most in the present frame
    memo_hash: np.ndarray  # [n, P] uint64
    memo_length: np.ndarray  # [n, P] int32, -1 for an entry that is free
    memo_used: np.ndarray  # [n, P] int64, step of the last use
    node_counts: np.ndarray  # [n] int32
    lm_weights: np.ndarray  # [n] float32
    boosting_weights: np.ndarray  # [n] float32


class Joint(NamedTuple):
    """Output of the joint for the hypotheses that asked for it."""

    log_probs: np.ndarray  # [rows, V + 1 (+ D)] float32; blank in column V, then durations
    row_of: np.ndarray  # [n, K] int32, row of a hypothesis, or -1


class Wishes(NamedTuple):
    """What the prediction network has to compute after a step, at most K per utterance."""

    counts: np.ndarray  # [n] int32
    labels: np.ndarray  # [n, K] int64
    sources: np.ndarray  # [n, K] int64, entry of the text before the label
    targets: np.ndarray  # [n, K] int64, entry of the text with it


class Search(NamedTuple):
    """What stays the same for a whole utterance."""

    vocab_size: int  # V; also the label of the blank
    num_durations: int  # D
    timed: bool  # TDT: columns V + 1 .. V + D hold durations
    weighted_blank: bool  # blank_lm_score_mode
    late: bool  # pruning_mode
    alignments: bool
    lm_weight: np.float32
    boosting_weight: np.float32


def new_batch(
    n: int,
    beam_size: int,
    lm_starts: np.ndarray,
    boosting_starts: np.ndarray,
    lm_weights: np.ndarray,
    boosting_weights: np.ndarray,
) -> Batch:
    """n utterances with nothing read: the empty text in slot 0, its prediction in entry 0."""
    entries = 4 * beam_size  # at least 2 K: those of the old and of the new hypotheses
    beam = np.zeros((n, beam_size), HYPOTHESIS)
    first = beam[:, 0]
    first["last_label"] = NO_LABEL
    first["open"] = 1
    first["lm_state"] = lm_starts
    first["boosting_state"] = boosting_starts
    memo_length = np.full((n, entries), -1, np.int32)
    memo_length[:, 0] = 0
    return Batch(
        beam=beam,
        sizes=np.ones(n, np.int32),
        ends=np.zeros(n, np.int64),
        steps=np.zeros(n, np.int64),
        expansions=np.zeros(n, np.int32),
        memo_hash=np.zeros((n, entries), np.uint64),
        memo_length=memo_length,
        memo_used=np.full((n, entries), -1, np.int64),
        node_counts=np.ones(n, np.int32),
        lm_weights=lm_weights.astype(np.float32),
        boosting_weights=boosting_weights.astype(np.float32),
    )


def new_nodes(n: int, capacity: int) -> np.ndarray:
    """Trees [n, capacity] NODE that hold their roots."""
    nodes = np.empty((n, max(1, capacity)), NODE)
    nodes[:, ROOT]["parent"] = -1
    nodes[:, ROOT]["label"] = NO_LABEL
    return nodes


def grown_nodes(nodes: np.ndarray, needed: int) -> np.ndarray:
    """Trees with room for `needed` nodes, at least doubled, holding what the old ones held."""
    n, capacity = nodes.shape
    if needed <= capacity:
        return nodes
    larger = np.empty((n, max(needed, 2 * capacity)), NODE)
    larger[:, :capacity] = nodes
    return larger


def new_wishes(n: int, beam_size: int) -> Wishes:
    shape = (n, beam_size)
    return Wishes(
        np.zeros(n, np.int32),
        np.empty(shape, np.int64),
        np.empty(shape, np.int64),
        np.empty(shape, np.int64),
    )


@compiled
def for_utterance(search, lm_weight, boosting_weight):
    return Search(
        search.vocab_size, search.num_durations, search.timed, search.weighted_blank, search.late,
        search.alignments, lm_weight, boosting_weight,
    )  # fmt: skip


@inlined
def duration_log_prob(row, search, d):
    """Log-probability of the d-th duration."""
    return row[search.vocab_size + 1 + d] if search.timed else np.float32(0.0)


@compiled
def longest_duration(row, search):
    """Index of the most probable duration."""
    best = 0
    for d in range(1, search.num_durations):
        if duration_log_prob(row, search, d) > duration_log_prob(row, search, best):
            best = d
    return best


@compiled
def is_bad(row, search):
    """A NaN or +inf among the logits makes all log-probs of a softmax NaN: two columns tell."""
    blank = row[search.vocab_size]
    duration = duration_log_prob(row, search, 0)
    return not (blank == blank and duration == duration)


@inlined
def fusion_bound(hypothesis, search, lm, boosting):
    """What LM and boosting can add to the next token of a hypothesis at most, weighted."""
    bound = np.float32(0.0)
    if search.lm_weight > 0:
        bound += search.lm_weight * lm.states[hypothesis.lm_state].upper_bound
    if search.boosting_weight > 0:
        bound += search.boosting_weight * boosting.states[hypothesis.boosting_state].upper_bound
    return bound


@compiled
def fusion_score(lm_state, boosting_state, label, least, search, lm, boosting):
    """What LM and boosting add to a token, weighted, and their states after it.

    The score is IMPOSSIBLE if it is found to be below `least` on the way. Boosting trees are small and
    LMs are large: the cheap look-up comes first and may save the other.
    """
    weight, bonus = np.float32(0.0), np.float32(0.0)
    if search.boosting_weight > 0:
        bonus, boosting_state = lookup(boosting, search.vocab_size, boosting_state, label, ANY_WEIGHT)
        bonus *= search.boosting_weight
    if search.lm_weight > 0:
        slack = 1e-6 * abs(np.float64(least)) + 1e-5  # for rounding in float32
        least_weight = (np.float64(least) - bonus - slack) / search.lm_weight
        weight, lm_state = lookup(lm, search.vocab_size, lm_state, label, least_weight)
        weight *= search.lm_weight
    return weight + bonus, lm_state, boosting_state


@inlined
def least_log_prob(floor, score, offset, bound, longest):
    """No label with a smaller log-probability can reach the floor; with slack for float32 rounding."""
    room = np.float64(score) + offset + bound + longest
    return np.float32(floor - room - 1e-6 * (abs(np.float64(floor)) + abs(room)) - 1e-5)


@inlined
def extend(hypothesis, choice, search, durations):
    """Apply a choice to a hypothesis, all but its score and what depends on other hypotheses."""
    if choice == STAY:
        return
    label = choice // search.num_durations
    duration = durations[choice % search.num_durations]
    if label == search.vocab_size:
        duration = max(1, duration)  # a blank always moves on
    else:
        hypothesis.prefix_hash = hypothesis.text_hash
        hypothesis.text_hash = extended_hash(hypothesis.text_hash, label)
        hypothesis.last_label = label
        hypothesis.length += 1
        hypothesis.symbols += 1
    if duration > 0:
        hypothesis.symbols = 0
    hypothesis.frame += duration


@inlined
def find_twin(beam, size, hypothesis):
    """The slot below `size` with the same text and frame, or -1.

    In RNN-T two hypotheses of a text are always at the same frame where this is asked.
    """
    for i in range(size):
        if (
            beam[i].text_hash == hypothesis.text_hash
            and beam[i].frame == hypothesis.frame
            and beam[i].length == hypothesis.length
            and beam[i].last_label == hypothesis.last_label
        ):
            return i
    return -1


@compiled
def add_node(nodes, counts, b, parent, choice, frame, log_prob, search, durations):
    """Append what `choice` emits to the tree of utterance b; returns its node."""
    if choice == STAY:
        return parent
    label = choice // search.num_durations
    duration = durations[choice % search.num_durations]
    if label == search.vocab_size:
        if not search.alignments:
            return parent
        duration = max(1, duration)
    node = counts[b]
    counts[b] = node + 1
    nodes[b, node].parent = parent
    nodes[b, node].label = label
    nodes[b, node].frame = frame
    nodes[b, node].duration = duration
    nodes[b, node].log_prob = log_prob
    return node


@compiled
def begin_step(batch, b, wishes):
    """Count the step and protect the memory entries of the present hypotheses."""
    batch.steps[b] += 1
    wishes.counts[b] = 0
    for k in range(batch.sizes[b]):
        batch.memo_used[b, batch.beam[b, k].memo] = batch.steps[b]


@compiled
def remember(batch, b, hypothesis, wishes):
    """Point a hypothesis with a new token to the entry of its text; wish for it if it is new.

    `hypothesis.memo` is the entry of the text without the token.
    """
    hashes, lengths, used = batch.memo_hash[b], batch.memo_length[b], batch.memo_used[b]
    oldest = 0
    for p in range(lengths.shape[0]):
        if hashes[p] == hypothesis.text_hash and lengths[p] == hypothesis.length:
            used[p] = batch.steps[b]
            hypothesis.memo = p
            return
        if used[p] < used[oldest]:
            oldest = p
    i = wishes.counts[b]
    wishes.counts[b] = i + 1
    wishes.labels[b, i] = hypothesis.last_label
    wishes.sources[b, i] = hypothesis.memo
    wishes.targets[b, i] = oldest
    hashes[oldest] = hypothesis.text_hash
    lengths[oldest] = hypothesis.length
    used[oldest] = batch.steps[b]
    hypothesis.memo = oldest


@compiled
def readable(batch, rows, ended, row_of, utterances, hypotheses):
    """Number the hypotheses that can be given the joint now; returns how many.

    An utterance waits while one of its open hypotheses needs a frame that has not come yet (the order
    of steps must not depend on how the frames come). If it has `ended`, such a hypothesis is finished.
    Fills row_of [n, K], and utterances and hypotheses [rows] with their numbers.
    """
    count = 0
    for b in rows:
        row_of[b] = -1
        blocked = False
        for k in range(batch.sizes[b]):
            hypothesis = batch.beam[b, k]
            if hypothesis.open and hypothesis.frame >= batch.ends[b] and not ended:
                blocked = True
        if blocked:
            continue
        for k in range(batch.sizes[b]):
            hypothesis = batch.beam[b, k]
            if hypothesis.open and hypothesis.frame < batch.ends[b]:
                row_of[b, k] = count
                utterances[count] = b
                hypotheses[count] = k
                count += 1
    return count


@compiled
def packed_wishes(wishes, rows, memo, labels, sources, targets):
    """Collect the wishes of all `rows` into flat arrays; returns how many."""
    count = 0
    for b in rows:
        for i in range(wishes.counts[b]):
            labels[count] = wishes.labels[b, i]
            sources[count] = b * memo + wishes.sources[b, i]
            targets[count] = b * memo + wishes.targets[b, i]
            count += 1
    return count
