"""What a token sequence earns from boosted phrases, counted occurrence by occurrence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def phrase_bonus(length: int, context_score: float = 1.0, depth_scaling: float = 2.0) -> float:
    """Bonus of a phrase of so many tokens, from NeMo's formula."""
    return context_score + sum(
        context_score * depth_scaling + math.log(position) for position in range(2, length + 1)
    )


def earned(tokens: Sequence[int], bonuses: Mapping[tuple[int, ...], float]) -> float:
    """For every position the best of the phrases that occur there, added up."""
    total = 0.0
    for begin in range(len(tokens)):
        here = [
            bonus
            for phrase, bonus in bonuses.items()
            if tuple(tokens[begin : begin + len(phrase)]) == phrase
        ]
        total += max(here, default=0.0)
    return total
