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
    is_continuation: Container[int] = (),
    outside_words: Container[tuple[int, ...]] = (),
) -> float:
    """For every position the best of the phrases that occur there and count, added up.

    An occurrence does not count if a label of `is_continuation` follows, unless its phrase is one of
    `outside_words`.
    """
    total = 0.0
    for begin in range(len(tokens)):
        here = [
            bonus
            for phrase, bonus in bonuses.items()
            if tuple(tokens[begin : begin + len(phrase)]) == phrase
            and (
                phrase in outside_words
                or not word_continues(tokens, begin + len(phrase), is_continuation)
            )
        ]
        total += max(here, default=0.0)
    return total


def word_continues(tokens: Sequence[int], position: int, is_continuation: Container[int]) -> bool:
    return position < len(tokens) and tokens[position] in is_continuation
