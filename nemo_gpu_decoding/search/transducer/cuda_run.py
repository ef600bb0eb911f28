"""What a run on the GPU gets from the host, and what the host takes from it, in compiled code."""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.search.transducer.records import ACTIVE, FULL, REFUSED, WAITING


@compiled
def plan(beams, counters, ends, first_frames, lengths, new_rows, columns, ended, utterances, given):
    """Fill the arrays that a run gives to the device.

    Args:
        beams: [n, K] HYPOTHESIS.
        counters: [n] STREAM_COUNTERS.
        ends: [n] number of frames received before the run.
        first_frames: [n] number of the frame in column 0 of the buffer of frames.
        lengths: [n] number of new frames.
        new_rows: [n] row of the first one.
        columns: frames that an utterance has room for in the buffer.
        ended: whether no more frames follow.
        utterances: [n] UTTERANCE, the weights.
        given: STREAM_PARAMS, STREAM_COUNTERS and HYPOTHESIS of at least n utterances.

    Returns:
        Whether an utterance has a step; and the columns that are needed. If these are more than `columns`, the caller
        must make room and plan again.
    """
    streams, given_counters, given_beams = given
    has_step, most = False, 0
    for b in range(len(counters)):
        end = ends[b] + lengths[b]
        needed, reads, blocked = ends[b], False, False
        for k in range(counters[b].size):
            frame = np.int64(beams[b, k].frame)
            needed = min(needed, frame)
            if beams[b, k].open:
                reads |= frame < end
                blocked |= frame >= end and not ended
        has_step |= reads and not blocked
        most = max(most, ends[b] - needed + lengths[b])
        for k in range(beams.shape[1]):
            given_beams[b, k] = beams[b, k]
        given_counters[b] = counters[b]
        given_counters[b].node_base = counters[b].node_count
        own, weights = streams[b], utterances[b]
        own.lm_weight = weights.lm_weight
        own.boosting_weight = weights.boosting_weight
        own.inverse_lm_weight = 1.0 / np.float64(weights.lm_weight) if weights.lm_weight > 0 else 0.0
        own.first_row = b * columns - needed
        own.new_row = new_rows[b]
        own.new_count = lengths[b]
        own.kept = ends[b] - needed
        own.kept_from = needed - first_frames[b]
        own.end = end
        own.ended = ended
    return has_step, most


@compiled
def outcome(counters):
    """Whether a run was refused and whether the host must fetch nodes for it to go on; largest numbers of new nodes
    and of all nodes."""
    refused, full, failed, most_new, most = False, False, False, 0, 0
    for b in range(len(counters)):
        refused |= counters[b].activity == REFUSED
        full |= counters[b].activity == FULL
        failed |= counters[b].size <= 0
        most_new = max(most_new, counters[b].node_count - counters[b].node_base)
        most = max(most, counters[b].node_count)
    return refused, full and not failed, most_new, most


@compiled
def goes_on(counters):
    """Whether an utterance has a next step."""
    found = False
    for b in range(len(counters)):
        found |= counters[b].activity == ACTIVE or counters[b].activity == WAITING
    return found


@compiled
def go_on_with_nodes(streams, counters):
    """Prepare the rest of a run whose nodes have been fetched; its frames are where they belong."""
    for b in range(len(counters)):
        counters[b].node_base = counters[b].node_count
        streams[b].kept_from = 0
        streams[b].new_count = 0


@compiled
def settle(beams, counters, ends, first_frames, lengths, columns, found):
    """Take the state of the utterances after a run from the arrays of `plan`, which the device has changed."""
    streams, found_counters, found_beams = found
    for b in range(len(counters)):
        counters[b] = found_counters[b]
        for k in range(beams.shape[1]):
            beams[b, k] = found_beams[b, k]
        ends[b] += lengths[b]
        first_frames[b] = b * columns - streams[b].first_row


@compiled
def append_nodes(nodes, added, counters):
    """Append the nodes that the device has added, [n, ...] NODE, to the trees."""
    for b in range(len(counters)):
        base = counters[b].node_base
        for i in range(counters[b].node_count - base):
            nodes[b, base + i] = added[b, i]
