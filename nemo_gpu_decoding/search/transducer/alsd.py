"""Search RNN-T and TDT models synchronously by alignment length (`ALSDPlusPlus`) [ALSD++/AES++].

In every step each hypothesis reads its present frame. The extensions of a hypothesis are the blank and all tokens, in
TDT each with a duration. The number of an extension is its `choice`, label * D + index of the duration (`beam.py`).
The K best extensions of all hypotheses form the new beam; hypotheses with equal text and frame are recombined by
adding probabilities. The score of a hypothesis is
    log P_transducer + alpha_LM log P_LM(text) + alpha_PB boost(text)
with blanks scored as in `scoring.py`. The blanks of all hypotheses are offered first: they need no LM, and give the
least score (floor) that a token must be able to reach before the LM is queried.
"""

from typing import Any

import numpy as np

from nemo_gpu_decoding.fusion.batch import of_utterance
from nemo_gpu_decoding.jit import compiled, linked
from nemo_gpu_decoding.search.numerics import insert
from nemo_gpu_decoding.search.transducer import cpu_engine, scoring
from nemo_gpu_decoding.search.transducer.beam import begin_step, merge
from nemo_gpu_decoding.search.transducer.config import ALSDConfig
from nemo_gpu_decoding.search.transducer.decoder import TransducerDecoder
from nemo_gpu_decoding.search.transducer.records import HYPOTHESIS, KEEP, NO_SCORE
from nemo_gpu_decoding.search.transducer.scoring import best_labels, new_candidates, offer_blanks, offer_tokens


@compiled
def step(rows, data, params, durations, fusions):
    """Take one step of every utterance in `rows`; `data` changes in place.

    Set a beam's size to BAD_INPUT if the joint returned NaN or +inf, and to 0 if no label is possible.
    """
    candidates = new_candidates(params.beam_size)
    labels = np.empty(min(params.beam_size, params.vocab_size + 1), np.int32)
    scratch = np.empty(params.beam_size, HYPOTHESIS)
    state = data.state
    for b in rows:
        fusion = of_utterance(fusions, b)
        if not begin_step(b, data, params):
            continue
        count = _offer_without_look_ups(b, data, params, fusion, candidates)
        for k in range(state.counters[b].size):
            if data.row_of[b, k] >= 0 and state.beam[b, k].symbols < params.max_symbols:  # it may take any label
                row = data.log_probs[data.row_of[b, k]]
                hypothesis = state.beam[b, k]
                if params.late:
                    count = offer_tokens(row, hypothesis, k, params, fusion, candidates, count)
                else:
                    best = labels[: best_labels(row[: params.vocab_size + 1], labels)]
                    count = _offer_labels(best, row, hypothesis, k, params, fusion, candidates, count)
        merge(b, candidates, count, data, scratch, params, durations)


@compiled
def run(rows, arrays, networks, options, params, durations, fusions):
    """Take all steps of the utterances `rows`, with their networks, until all wait for frames; see `cpu_engine.py`."""
    cpu_engine.take_steps(step, rows.copy(), arrays, networks, options, params, durations, fusions)


@linked
def _offer_without_look_ups(b, data, params, fusion, candidates):
    """Offer finished hypotheses, forced blanks and (late pruning) all blanks; return the number of candidates."""
    count = 0
    for k in range(data.state.counters[b].size):
        hypothesis = data.state.beam[b, k]
        lm_state, boosting_state = hypothesis.lm_state, hypothesis.boosting_state
        if data.row_of[b, k] < 0:
            _, count = insert(candidates, count, hypothesis.score, k, KEEP, lm_state, boosting_state)
            continue
        row = data.log_probs[data.row_of[b, k]]
        if hypothesis.symbols >= params.max_symbols:
            # with early pruning a forced blank keeps its plain score, as in NeMo
            blank_mode = params.blank_mode if params.late else NO_SCORE
            score, choice = scoring.forced_blank(row, hypothesis, blank_mode, params, fusion)
            _, count = insert(candidates, count, score, k, choice, lm_state, boosting_state)
        elif params.late:
            count = offer_blanks(row, hypothesis, k, params, fusion, candidates, count)
    return count


@linked
def _offer_labels(labels, row, hypothesis, k, params, fusion, candidates, count):
    """Offer the labels with the best scores of the joint, with LM and boosting scores added."""
    offset = scoring.token_offset(row, params, fusion)
    for label in labels:
        base, lm_state, boosting_state = scoring.fused_label(row, label, offset, hypothesis, params, fusion)
        for d in range(params.num_durations):
            score = hypothesis.score + (base + scoring.duration_log_prob(row, params, d))
            choice = label * params.num_durations + d
            _, count = insert(candidates, count, score, k, choice, lm_state, boosting_state)
    return count


class ALSDPlusPlus(TransducerDecoder[ALSDConfig]):
    """A batched beam search for RNN-T and TDT models, synchronous by alignment length [ALSD++/AES++].

    Args:
        networks: prediction network and joint, see `TransducerNetworks`.
        config: see `ALSDConfig`.
        fusion: LM and boosting tree over the V tokens of the networks.

    Example:
        >>> embedding, lstm = torch.nn.Embedding(11, 16), torch.nn.LSTM(16, 16)
        >>> linear = torch.nn.Linear
        >>> joint = torch.nn.Sequential(torch.nn.ReLU(), linear(16, 11))
        >>> networks = LSTMNetworks(embedding, lstm, linear(8, 16), linear(16, 16), joint)
        >>> decoder = ALSDPlusPlus(networks, ALSDConfig(beam_size=4))
        >>> tokens = decoder.decode(torch.randn(1, 50, 8), [50])[0].best.tokens

    Raises:
        ValueError: an argument is out of range or does not fit the other arguments.
    """

    strategy = "alsd_pp"
    config_type = ALSDConfig
    step = staticmethod(step)
    run = staticmethod(run)
    kernels = "search/transducer/alsd.cu"

    def _own_params(self) -> dict[str, Any]:
        return {
            "frame_by_frame": False,
            "blank_ceiling": scoring.ALSD_CEILING,
            "max_symbols": self.config.max_symbols,
            "max_extensions": self.config.beam_size,
            "gamma": np.float32(np.inf),
        }
