"""Define the beams of transducer searches: hypotheses, their tree of tokens, and the new beam of a step.

RNN-T is treated as a TDT model whose only duration is 0 with probability 1: a token stays in its frame, and a blank of
any duration advances by at least one frame. One search therefore serves RNN-T and TDT. A `choice` is an extension of a
hypothesis: label * D + index of the duration, for D durations; KEEP leaves the hypothesis unchanged.

The tokens of all hypotheses form a tree. The tree has a node per token (with `alignments` also per blank), which
points to the previous node. Example with two hypotheses "4 7" and "4 2", the latter one frame later:

    node      0     1     2     3          node 0 is the root, the empty text
    parent   -1     0     1     1
    label    -1     4     7     2
    frame     -     3     3     4

**The prediction cache.** The same text occurs in many steps: a hypothesis that takes blanks proposes its best token in
every frame. The outputs of the prediction network are therefore cached by the hash and length of the text. A new text
replaces the least recently used entry, and the network runs only for texts that are not in the cache.
"""

from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.fusion.batch import FusionArrays
from nemo_gpu_decoding.jit import linked
from nemo_gpu_decoding.search.numerics import extended_hash, log_add, rebased
from nemo_gpu_decoding.search.transducer import records
from nemo_gpu_decoding.search.transducer.scoring import is_bad


class TransducerBeams(NamedTuple):
    """The state of a search of n utterances, each with P entries in the prediction cache."""

    beam: np.ndarray  # [n, K] HYPOTHESIS
    counters: np.ndarray  # [n] STREAM_COUNTERS
    ends: np.ndarray  # [n] int64, number of frames received so far
    steps: np.ndarray  # [n] int64, number of steps so far
    cache_hashes: np.ndarray  # [n, P] uint64
    cache_lengths: np.ndarray  # [n, P] int32, -1 for a free entry
    cache_used: np.ndarray  # [n, P] int64, step of the last use
    offsets: np.ndarray  # [n] float64, the part of the scores that is not in `beam`, see `rebased`


class PendingPredictions(NamedTuple):
    """Texts that the prediction network must compute after a step, at most K per utterance."""

    counts: np.ndarray  # [n] int32
    labels: np.ndarray  # [n, K] int64
    sources: np.ndarray  # [n, K] int64, entry of the text before the label
    targets: np.ndarray  # [n, K] int64, entry of the text with it


class StepData(NamedTuple):
    """The arrays that a step reads and changes in place."""

    log_probs: np.ndarray  # [rows, V + 1 (+ D)] float32, of the joint; blank in column V, then durations
    row_of: np.ndarray  # [n, K] int32, row of a hypothesis, or -1
    state: TransducerBeams
    nodes: np.ndarray  # [n, N] NODE
    pending: PendingPredictions


def new_beam_state(fusions: FusionArrays, beam_size: int) -> TransducerBeams:
    """Return the state before the first frame of n utterances: the empty text in slot 0, its prediction in entry 0."""
    n = len(fusions.utterances)
    entries = 4 * beam_size  # at least 2 K: those of the old and of the new hypotheses
    beam = np.zeros((n, beam_size), records.HYPOTHESIS)
    first = beam[:, 0]
    first["last_label"] = records.NO_LABEL
    first["open"] = 1
    first["lm_state"] = fusions.utterances["lm_start"]
    first["boosting_state"] = fusions.utterances["boosting_start"]
    counters = np.zeros(n, records.STREAM_COUNTERS)
    counters["size"] = counters["node_count"] = 1
    cache_lengths = np.full((n, entries), -1, np.int32)
    cache_lengths[:, 0] = 0
    return TransducerBeams(
        beam=beam,
        counters=counters,
        ends=np.zeros(n, np.int64),
        steps=np.zeros(n, np.int64),
        cache_hashes=np.zeros((n, entries), np.uint64),
        cache_lengths=cache_lengths,
        cache_used=np.full((n, entries), -1, np.int64),
        offsets=np.zeros(n),
    )


def new_nodes(n: int, capacity: int) -> np.ndarray:
    """Return trees [n, capacity] NODE that consist of their roots."""
    nodes = np.empty((n, max(1, capacity)), records.NODE)
    nodes[:, records.ROOT]["parent"] = -1
    nodes[:, records.ROOT]["label"] = records.NO_LABEL
    return nodes


@linked
def extend(hypothesis, choice, params, durations):
    """Apply a choice to a hypothesis, but leave its score and the fields that depend on other hypotheses."""
    if choice == records.KEEP:
        return
    label = choice // params.num_durations
    duration = durations[choice % params.num_durations]
    if label == params.vocab_size:
        duration = max(1, duration)  # a blank always advances
    else:
        hypothesis.prefix_hash = hypothesis.text_hash
        hypothesis.text_hash = extended_hash(hypothesis.text_hash, label)
        hypothesis.last_label = label
        hypothesis.length += 1
        hypothesis.symbols += 1
    if duration > 0:
        hypothesis.symbols = 0
    hypothesis.frame += duration


@linked
def find_duplicate(beam, size, hypothesis):
    """Return the slot below `size` with the same text and frame, or -1. In RNN-T, equal texts are at equal frames."""
    for i in range(size):
        if (
            beam[i].text_hash == hypothesis.text_hash
            and beam[i].frame == hypothesis.frame
            and beam[i].length == hypothesis.length
            and beam[i].last_label == hypothesis.last_label
        ):
            return i
    return -1


# -------------------------------------------------------------------------- the new beam of a step


@linked
def begin_step(b, data, params):
    """Count a step, protect the cache entries of the present hypotheses, and keep the hypotheses' scores small.

    Return False, and set a size of BAD_INPUT, if the joint returned NaN or +inf.
    """
    state = data.state
    state.steps[b] += 1
    data.pending.counts[b] = 0
    shift = rebased(state.beam[b], state.counters[b].size)
    if shift != 0:
        state.offsets[b] += shift
        for k in range(state.counters[b].size):
            state.beam[b, k].score -= shift
    for k in range(state.counters[b].size):
        state.cache_used[b, state.beam[b, k].cache_entry] = state.steps[b]
        if data.row_of[b, k] >= 0 and is_bad(data.log_probs[data.row_of[b, k]], params):
            state.counters[b].size = records.BAD_INPUT
            return False
    return True


@linked
def add_node(b, hypothesis, choice, log_prob, data, params, durations):
    """Append the label of `choice` after a hypothesis to the tree of utterance b; return its node."""
    label = choice // params.num_durations
    duration = durations[choice % params.num_durations]
    if label == params.vocab_size:
        if not params.alignments:
            return hypothesis.node
        duration = max(1, duration)
    node = data.state.counters[b].node_count
    data.state.counters[b].node_count = node + 1
    data.nodes[b, node].parent = hypothesis.node
    data.nodes[b, node].label = label
    data.nodes[b, node].frame = hypothesis.frame
    data.nodes[b, node].duration = duration
    data.nodes[b, node].log_prob = log_prob
    return node


@linked
def find_prediction(b, hypothesis, state, pending):
    """Set the cache entry of a hypothesis with a new token; a text that is not in the cache becomes pending.

    `hypothesis.cache_entry` is the entry of the text without the token.
    """
    hashes, lengths, used = state.cache_hashes[b], state.cache_lengths[b], state.cache_used[b]
    oldest = 0
    for p in range(lengths.shape[0]):
        if hashes[p] == hypothesis.text_hash and lengths[p] == hypothesis.length:
            used[p] = state.steps[b]
            hypothesis.cache_entry = p
            return
        if used[p] < used[oldest]:
            oldest = p
    i = pending.counts[b]
    pending.counts[b] = i + 1
    pending.labels[b, i] = hypothesis.last_label
    pending.sources[b, i] = hypothesis.cache_entry
    pending.targets[b, i] = oldest
    hashes[oldest] = hypothesis.text_hash
    lengths[oldest] = hypothesis.length
    used[oldest] = state.steps[b]
    hypothesis.cache_entry = oldest


@linked
def merge(b, candidates, count, data, scratch, params, durations):
    """Build the new beam from candidates: recombine them, update the tree of tokens and the prediction cache."""
    beam = data.state.beam[b]
    size = 0
    for slot in candidates.rank[:count]:
        candidate = candidates.items[slot]
        parent = beam[candidate.parent]
        scratch[size] = parent
        new = scratch[size]
        extend(new, candidate.choice, params, durations)
        new.score = candidate.score
        new.lm_state = candidate.lm_state
        new.boosting_state = candidate.boosting_state
        duplicate = find_duplicate(scratch, size, new)
        if duplicate >= 0:
            scratch[duplicate].score = log_add(scratch[duplicate].score, new.score)
            continue
        if candidate.choice != records.KEEP:
            label = candidate.choice // params.num_durations
            log_prob = data.log_probs[data.row_of[b, candidate.parent], label]
            new.node = add_node(b, parent, candidate.choice, log_prob, data, params, durations)
            if params.frame_by_frame:  # hypotheses past this frame are closed until all have left it
                new.open = new.frame == parent.frame
            if label < params.vocab_size:
                find_prediction(b, new, data.state, data.pending)
        size += 1
    for k in range(size):
        beam[k] = scratch[k]
    data.state.counters[b].size = size
