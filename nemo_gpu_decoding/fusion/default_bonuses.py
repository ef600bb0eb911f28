"""Choose the bonuses of phrases for which the user gives no weight.

With an LM over tokens, the phrase list is a class of the LM: a word is from the list with probability `phrase_share`,
and all phrases are equally likely. The bonus of the first n tokens of a phrase replaces their LM score, which has no
context:

    bonus(n) = max(0, CLASS_WEIGHT * (log(phrase_share / phrases) - log P_LM(tokens 1 .. n)) + PER_TOKEN * n)

A rare word gets a large bonus, and a phrase that the LM expects gets almost none. The longer the list, the smaller are
the bonuses. The prior of a phrase is subtracted from the bonus of its first tokens, so that the beginnings of many
phrases do not fill the beam. `CLASS_WEIGHT` is no LM weight, because the network has learnt a language too.

Without an LM over tokens, one weight multiplies the bonuses of all phrases. It depends on the length of the list.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from nemo_gpu_decoding.fusion.automaton import ANY_WEIGHT, BackoffAutomaton, lookup
from nemo_gpu_decoding.fusion.context_graph import ScoredSequence
from nemo_gpu_decoding.jit import compiled

CLASS_WEIGHT, PER_TOKEN = 0.7, 0.5  # chosen on dev, see docs/experiments/phrase_lists.md
MOST_COST = 15.0  # of a token, natural log: LMs give much less than any prior to tokens that they do not have
LEAST_BONUS = 1e-3  # results list only phrases that have a bonus


def weight_of_list(weight: float | None, num_phrases: int) -> float:
    """Return the boosting weight of a phrase list; the default is smaller for a longer list of less likely phrases.

    The default multiplies the bonuses of tokens in all searches: 1 for one phrase, 0.64 for 100, 0.41 for 1,000.
    """
    return min(max(1.1 - 0.1 * math.log(max(num_phrases, 1)), 0.25), 1.0) if weight is None else weight


def class_bonuses(
    sequences: Sequence[ScoredSequence], lm: BackoffAutomaton, share: float, num_phrases: int
) -> list[ScoredSequence]:
    """Return the sequences of a phrase list with the bonuses of a class of the LM, for a boosting weight of 1.

    The weight of a phrase multiplies its bonus. Penalties are those of the default weight of the list.

    Args:
        share: probability that a word is from the list, in (0, 1].
    """
    begins = np.cumsum([0, *(len(sequence.tokens) for sequence in sequences)])
    tokens = np.concatenate([np.asarray(sequence.tokens, np.int64) for sequence in sequences])
    costs = np.clip(-_weights(lm.arrays, lm.vocab_size, lm.start_state, tokens, begins), 0.0, MOST_COST)
    prior = CLASS_WEIGHT * math.log(share / num_phrases)
    scored = []
    for sequence, begin, end in zip(sequences, begins[:-1], begins[1:], strict=True):
        if sequence.context_score < 0:
            scores = sequence.scores * weight_of_list(None, num_phrases)
        else:
            bonuses = np.maximum(0.0, np.cumsum(CLASS_WEIGHT * costs[begin:end] + PER_TOKEN) + prior)
            bonuses[-1] = max(bonuses[-1], LEAST_BONUS)
            scores = sequence.context_score * np.diff(bonuses, prepend=0.0)
        scored.append(replace(sequence, scores=scores))
    return scored


@compiled
def _weights(arrays, vocab_size, root, tokens, begins):
    """Return the weight of each token after the tokens before it in its sequence, without <s>, [tokens] float64."""
    weights = np.empty(len(tokens))
    while arrays.states[root].backoff_to != root:
        root = arrays.states[root].backoff_to
    for n in range(len(begins) - 1):
        state = root
        for i in range(begins[n], begins[n + 1]):
            weights[i], state = lookup(arrays, vocab_size, state, tokens[i], ANY_WEIGHT)
    return weights
