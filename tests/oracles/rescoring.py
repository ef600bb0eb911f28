"""The best text of a word graph whose LM costs are replaced by another LM's, from the definition."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tests.oracles.ngram import Table, log10_prob


def sentence_cost(table: Table, words: Sequence[str]) -> float:
    """-log p(words </s>), natural; unlisted words are <unk>, an LM without </s> ends for nothing."""
    order = max(map(len, table))
    listed = [word if (word,) in table else "<unk>" for word in words]
    ends = ["</s>"] if ("</s>",) in table else []
    sentence = ["<s>", *listed, *ends]
    total = sum(log10_prob(table, sentence[:i], sentence[i], order) for i in range(1, len(sentence)))
    return -total * math.log(10)


def rescored(
    texts: Mapping[tuple[str, ...], float], small: Table, large: Table, weight: float
) -> dict[tuple[str, ...], float]:
    """{text: cost}, cheapest first, from the costs in the small LM's graph (`viterbi.all_texts`)."""
    costs = {
        text: cost + weight * (sentence_cost(large, text) - sentence_cost(small, text))
        for text, cost in texts.items()
        if cost < math.inf
    }
    return dict(sorted(costs.items(), key=lambda item: item[1]))
