"""What a token sequence earns from boosted phrases, counted occurrence by occurrence."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence


def phrase_bonus(length: int, context_score: float = 1.0, depth_scaling: float = 2.0) -> float:
    """Bonus of a phrase of so many tokens, from NeMo's formula."""
    return context_score + sum(
        context_score * depth_scaling + math.log(position) for position in range(2, length + 1)
    )


def earned(
    tokens: Sequence[int],
    bonuses: Mapping[tuple[int, ...], float],
    carries_on: Container[int] = (),
    outside_words: Container[tuple[int, ...]] = (),
) -> float:
    """For every position the best of the phrases that occur there and count, added up.

    An occurrence does not count if one of the labels `carries_on` follows, unless its phrase is one of
    `outside_words`.
    """
    total = 0.0
    for begin in range(len(tokens)):
        here = [
            bonus
            for phrase, bonus in bonuses.items()
            if tuple(tokens[begin : begin + len(phrase)]) == phrase
            and (phrase in outside_words or not goes_on(tokens, begin + len(phrase), carries_on))
        ]
        total += max(here, default=0.0)
    return total


def goes_on(tokens: Sequence[int], position: int, carries_on: Container[int]) -> bool:
    return position < len(tokens) and tokens[position] in carries_on
