"""Search RNN-T and TDT models by adaptive expansion (`AESPlusPlus`) [ALSD++/AES++].

The search works frame by frame; hypotheses at the present frame are called open. Prefix search comes first: if an open
text is another open text without its last token, the longer text gains the probability of that token in this frame.
Then, up to maes_num_steps times, every open hypothesis is expanded by its best labels, within gamma of the best one.
The new beam holds the K best of these expansions and of the hypotheses that have left the frame. Hypotheses with a new
token in this frame stay open. Hypotheses that are still open after the last expansion take a blank.

An expansion within the frame that leads to a text of the beam is dropped, because prefix search has counted it. RNN-T
searches (like NeMo) drop expansions to any text of the beam; TDT searches drop only those to texts at the same frame.
TDT searches add the probabilities of texts that become equal at the same later frame. Scores are as in `alsd.py`.
"""

from typing import Any, NamedTuple

import numpy as np

from nemo_gpu_decoding.fusion.batch import UtteranceFusion, of_utterance
from nemo_gpu_decoding.jit import compiled, linked
from nemo_gpu_decoding.search.numerics import IMPOSSIBLE, extended_hash, insert, log_add
from nemo_gpu_decoding.search.transducer import cpu_engine, scoring
from nemo_gpu_decoding.search.transducer.beam import add_node, begin_step, extend, find_duplicate, merge
from nemo_gpu_decoding.search.transducer.config import AESConfig
from nemo_gpu_decoding.search.transducer.decoder import TransducerDecoder
from nemo_gpu_decoding.search.transducer.records import CANDIDATE, HYPOTHESIS, KEEP, NO_SCORE
from nemo_gpu_decoding.search.transducer.scoring import count_within_gamma, new_candidates, offer_blanks, offer_tokens


class Pool(NamedTuple):
    """The candidates that may enter the new beam of a step, in the order in which they were added."""

    items: np.ndarray  # CANDIDATE
    keys: np.ndarray  # uint64, equal for equal text and frame


@compiled
def step(rows, data, params, durations, fusions):
    """Take one step of every utterance in `rows`; this changes the `StepData` in place.

    Set a beam's size to BAD_INPUT if the joint returned NaN or +inf, and to 0 if no label is possible.
    """
    capacity = params.beam_size * (params.max_extensions + 1)
    pool = Pool(np.empty(capacity, CANDIDATE), np.empty(capacity, np.uint64))
    own_best = new_candidates(params.max_extensions)
    best = new_candidates(params.beam_size)
    scratch = np.empty(params.beam_size, HYPOTHESIS)
    state = data.state
    for b in rows:
        fusion = of_utterance(fusions, b)
        if not begin_step(b, data, params):
            continue
        if state.counters[b].expansions == params.max_symbols:
            _force_blanks(b, data, params, durations, fusion)
            _next_frame(b, state)
            continue
        if state.counters[b].expansions == 0:
            _prefix_search(b, data, params, fusion)
        n = 0
        for k in range(state.counters[b].size):
            count = _expand(b, k, data, params, fusion, own_best)
            n = _compete(b, own_best, count, state, pool, n, scratch, params, durations)
        count = _best_of(pool, n, best)
        merge(b, best, count, data, scratch, params, durations)
        state.counters[b].expansions += 1
        if not state.beam[b, : state.counters[b].size]["open"].any():
            _next_frame(b, state)


@compiled
def run(rows, arrays, networks, options, params, durations, fusions):
    """Take all steps of the utterances `rows`, with their networks, until all wait for frames; see `cpu_engine.py`."""
    cpu_engine.take_steps(step, rows.copy(), arrays, networks, options, params, durations, fusions)


@linked
def _next_frame(b, state):
    """Advance to the earliest frame that a hypothesis is at, and open the hypotheses at that frame."""
    frame = np.iinfo(np.int32).max
    for k in range(state.counters[b].size):
        frame = min(frame, state.beam[b, k].frame)
    for k in range(state.counters[b].size):
        state.beam[b, k].open = state.beam[b, k].frame == frame
    state.counters[b].expansions = 0


@compiled
def _prefix_search(b, data, params, fusion):
    """Add to every open text the probability that the open text without its last token emits that token."""
    beam, size = data.state.beam[b], data.state.counters[b].size
    if params.zero_duration < 0:
        return
    gains = np.full(size, IMPOSSIBLE, np.float32)
    for i in range(size):
        if not beam[i].open or beam[i].length == 0:
            continue
        for j in range(size):
            if beam[j].open and beam[j].text_hash == beam[i].prefix_hash:
                row = data.log_probs[data.row_of[b, j]]
                offset = scoring.token_offset(row, params, fusion)
                score, _, _ = scoring.fused_label(row, beam[i].last_label, offset, beam[j], params, fusion)
                duration = scoring.duration_log_prob(row, params, params.zero_duration)
                gains[i] = log_add(gains[i], beam[j].score + (score + duration))
    for i in range(size):  # after all sums: a gain of a prefix does not count for its longer text
        beam[i].score = log_add(beam[i].score, gains[i])


@linked
def _expand(b, k, data, params, fusion, best):
    """Fill in the best extensions of hypothesis k; return their number. A hypothesis that is not open is unchanged."""
    hypothesis = data.state.beam[b, k]
    if not hypothesis.open:
        lm_state, boosting_state = hypothesis.lm_state, hypothesis.boosting_state
        _, count = insert(best, 0, hypothesis.score, k, KEEP, lm_state, boosting_state)
        return count
    row = data.log_probs[data.row_of[b, k]]
    none = np.float32(0.0)
    ranked_by = fusion if params.late else UtteranceFusion(fusion.lm, fusion.boosting, none, none)
    count = offer_blanks(row, hypothesis, k, params, ranked_by, best, 0)
    count = offer_tokens(row, hypothesis, k, params, ranked_by, best, count)
    count = count_within_gamma(best, count, params)
    if not params.late:
        _score_in_full(row, hypothesis, best, count, params, fusion)
    return count


@linked
def _score_in_full(row, hypothesis, best, count, params, fusion):
    """Add LM and boosting to extensions that were ranked by the joint alone."""
    offset = scoring.token_offset(row, params, fusion)
    for slot in best.rank[:count]:
        candidate = best.items[slot]
        label = candidate.choice // params.num_durations
        score, lm_state, boosting_state = scoring.fused_label(row, label, offset, hypothesis, params, fusion)
        duration = scoring.duration_log_prob(row, params, candidate.choice % params.num_durations)
        candidate.score = hypothesis.score + (score + duration)
        candidate.lm_state = lm_state
        candidate.boosting_state = boosting_state


@linked
def _compete(b, candidates, count, state, pool, n, scratch, params, durations):
    """Add the candidates that prefix search has not counted to the pool of n; return the pool's new size."""
    for slot in candidates.rank[:count]:
        candidate = candidates.items[slot]
        scratch[0] = state.beam[b, candidate.parent]
        extend(scratch[0], candidate.choice, params, durations)
        if candidate.score > IMPOSSIBLE and not _is_counted(b, candidate.parent, scratch[0], state, params):
            pool.items[n] = candidate
            pool.keys[n] = extended_hash(scratch[0].text_hash, scratch[0].frame)
            n += 1
    return n


@linked
def _is_counted(b, k, new, state, params):
    """Return whether an expansion of hypothesis k that stays in the frame leads to a text of the beam."""
    if new.length == state.beam[b, k].length or new.frame > state.beam[b, k].frame:
        return False
    for i in range(state.counters[b].size):
        other = state.beam[b, i]
        if other.text_hash == new.text_hash and (not params.timed or other.frame == new.frame):
            return True
    return False


@compiled
def _best_of(pool, n, best):
    """Add the probabilities of candidates of equal text and frame, and insert the pool's K best into `best`."""
    keys = pool.keys[:n]
    order = np.argsort(keys, kind="mergesort")
    count = 0
    begin = 0
    while begin < n:
        end = begin + 1
        leader = order[begin]
        while end < n and keys[order[end]] == keys[leader]:
            if pool.items[order[end]].score > pool.items[leader].score:
                leader = order[end]
            end += 1
        score = pool.items[leader].score
        for i in order[begin:end]:
            if i != leader:
                score = log_add(score, pool.items[i].score)
        item = pool.items[leader]
        _, count = insert(best, count, score, item.parent, item.choice, item.lm_state, item.boosting_state)
        begin = end
    return count


@linked
def _force_blanks(b, data, params, durations, fusion):
    """Extend every open hypothesis by a blank (with the joint's plain score, as in NeMo) and recombine."""
    beam = data.state.beam[b]
    size = 0
    for k in range(data.state.counters[b].size):
        hypothesis = beam[k]
        if hypothesis.open:
            row = data.log_probs[data.row_of[b, k]]
            score, choice = scoring.forced_blank(row, hypothesis, NO_SCORE, params, fusion)
            hypothesis.score = score
            hypothesis.node = add_node(b, hypothesis, choice, row[params.vocab_size], data, params, durations)
            extend(hypothesis, choice, params, durations)
        if not hypothesis.score > IMPOSSIBLE:
            continue
        duplicate = find_duplicate(beam, size, hypothesis)
        if duplicate < 0:
            beam[size] = hypothesis
            size += 1
            continue
        total = log_add(beam[duplicate].score, hypothesis.score)
        if hypothesis.score > beam[duplicate].score:
            beam[duplicate] = hypothesis
        beam[duplicate].score = total
    data.state.counters[b].size = size


class AESPlusPlus(TransducerDecoder[AESConfig]):
    """A batched beam search for RNN-T and TDT models with adaptive expansion [ALSD++/AES++].

    AES++ tries fewer labels per frame than `ALSDPlusPlus`. With an LM it mostly has more errors. Arguments,
    errors and an example: see `ALSDPlusPlus`; the options are an `AESConfig`.
    """

    strategy = "aes_pp"
    config_type = AESConfig
    step = staticmethod(step)
    run = staticmethod(run)
    kernels = "search/transducer/aes.cu"

    def _own_params(self) -> dict[str, Any]:
        choices = (self.networks.vocab_size + 1) * max(1, len(self.networks.durations))
        return {
            "frame_by_frame": True,
            "blank_ceiling": scoring.AES_CEILING,
            "max_symbols": self.config.maes_num_steps,
            "max_extensions": min(self.config.beam_size + self.config.maes_expansion_beta, choices),
            "gamma": np.float32(self.config.maes_expansion_gamma),
        }
