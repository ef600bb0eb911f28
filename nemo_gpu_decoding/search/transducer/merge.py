"""Construction of the new beam from the best candidates: recombination, tree of tokens, prediction cache.

**The prediction cache.** The same text occurs in many steps: a hypothesis that takes blanks proposes its best token in
every frame. The outputs of the prediction network are therefore cached by the hash and length of the text. A new text
replaces the least recently used entry, and the network runs only for texts that are not in the cache.
"""

from __future__ import annotations

from nemo_gpu_decoding.jit import linked
from nemo_gpu_decoding.search.numerics import log_add
from nemo_gpu_decoding.search.transducer.beam import extend, find_duplicate
from nemo_gpu_decoding.search.transducer.records import BAD_INPUT, KEEP
from nemo_gpu_decoding.search.transducer.scoring import is_bad


@linked
def begin_step(b, data, params):
    """Count the step and protect the cache entries of the present hypotheses.

    Returns False, and sets a size of BAD_INPUT, if the joint returned NaN or +inf.
    """
    state = data.state
    state.steps[b] += 1
    data.pending.counts[b] = 0
    for k in range(state.counters[b].size):
        state.cache_used[b, state.beam[b, k].cache_entry] = state.steps[b]
        if data.row_of[b, k] >= 0 and is_bad(data.log_probs[data.row_of[b, k]], params):
            state.counters[b].size = BAD_INPUT
            return False
    return True


@linked
def add_node(b, hypothesis, choice, log_prob, data, params, durations):
    """Append the label of `choice` after a hypothesis to the tree of utterance b; returns its node."""
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
    """Build the new beam from the candidates: recombination, tree of tokens, prediction cache."""
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
        if candidate.choice != KEEP:
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
