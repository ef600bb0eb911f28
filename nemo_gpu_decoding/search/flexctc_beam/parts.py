"""Splitting scores by source: what LM and boosting gave to every hypothesis that is returned."""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.search.flexctc_beam.cpu import fusion_parts, with_weights
from nemo_gpu_decoding.search.flexctc_beam.engine import Found, Setup


def added_scores(found: Found, setup: Setup, final: bool) -> tuple[np.ndarray, np.ndarray]:
    """Weighted LM and boosting scores of all hypotheses, two arrays [n, N] float64.

    Args:
        found: the hypotheses.
        setup: what they were decoded with.
        final: whether final weights are in their scores, where `found` doesn't say otherwise.
    """
    lm, boosting = np.zeros(found.order.shape), np.zeros(found.order.shape)
    fusion = setup.fusion
    if fusion.lm_weights.any() or fusion.boosting_weights.any():
        _add_scores(
            found.order, found.traces.lengths, found.traces.tokens, setup.search,
            fusion.lm_weights, fusion.boosting_weights, fusion.lm.arrays, fusion.boosting,
            fusion.lm_starts, fusion.boosting_starts, final & ~found.without_final, lm, boosting,
        )  # fmt: skip
    return lm, boosting


@compiled
def _add_scores(
    order, lengths, tokens, search, lm_weights, boosting_weights, lm, boosting,
    lm_starts, boosting_starts, final, lm_scores, boosting_scores,
):  # fmt: skip
    for b in range(order.shape[0]):
        own = with_weights(search, lm_weights[b], boosting_weights[b])
        for n in range(order.shape[1]):
            if order[b, n] >= 0:
                lm_scores[b, n], boosting_scores[b, n] = fusion_parts(
                    tokens[b, n, : lengths[b, n]], own, lm, boosting,
                    lm_starts[b], boosting_starts[b], final[b],
                )  # fmt: skip
