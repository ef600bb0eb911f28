"""Add costs of tokens to the boosting automaton: prices of tokens that are not allowed, and a bonus per token.

A token that is not allowed has a price, or is forbidden (language lock of a multilingual model). A look-up in the
automaton ends at exactly one arc with the token's label. The price is subtracted from the weights of these arcs:

    tree                 "a" +1   "b" -2   back-off +0.5        without phrases: one state, 0 for every token
    price 3 for "b"      "a" +1   "b" -5   back-off +0.5        one state, 0 for "a" and -3 for "b"

Without phrases the boosting weight is `PRICE_WEIGHT` = 2^-60. A transducer's blank score contains the boosting weight
(eq. 3 in `search/transducer/scoring.py`), which prices must not change. 2^-60 is below the rounding of these float32
sums, so that the blank keeps its score to the bit. A product with a power of 2 is exact.

The bonus per token of transducers (`beam_beta`) is a negative cost of all tokens. CTC searches add it themselves.
"""

import itertools
import math
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nemo_gpu_decoding.cache import cached
from nemo_gpu_decoding.checks import FieldError, check_kind, check_number, leave_out
from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton, empty_automaton
from nemo_gpu_decoding.vocabulary import Vocabulary, unicode_forms

PRICE_WEIGHT = 2.0**-60
# First words in the names of letters: of scripts with other names, and of accents and apostrophes that scripts share
_OTHER_NAMES = {"HAN": ("CJK", "IDEOGRAPHIC")}
_SHARED = ("COMBINING", "MODIFIER")
_INCOMPLETE = "\ufffd"  # shown for incomplete bytes of a character


@dataclass(frozen=True)
class AllowedTokens:
    """The tokens that a hypothesis may contain, and the price of each other token.

    Raises:
        FieldError: no token is allowed, or the price is negative.
    """

    is_allowed: tuple[bool, ...]  # [V]
    price: float = math.inf  # of each other token, natural log, >= 0; inf: it is forbidden; 0: it is only counted

    def __post_init__(self) -> None:
        if self.price != math.inf:
            check_number("price", self.price)
        if not any(self.is_allowed):
            raise FieldError("is_allowed", "all False", "at least one token that may be written")

    def outside_share(self, tokens: np.ndarray, blank_id: int) -> float:
        """Return the share of a hypothesis' tokens that are not allowed, 0 .. 1, or 0 without tokens.

        Membership in a Python set is faster than counting in NumPy for hypotheses of usual length.

        Args:
            tokens: columns of the log-probs.
            blank_id: column of the blank.
        """
        written = (tokens - (tokens > blank_id)).tolist()
        if self._outside.isdisjoint(written):  # the usual case; the test is four times as fast as counting
            return 0.0
        return 1.0 - (len(written) - sum(map(self._outside.__contains__, written))) / len(written)

    @cached_property
    def costs(self) -> np.ndarray:
        """Return the cost of each token, [V], natural log: 0 if it is allowed, else the price."""
        return np.where(self.is_allowed, 0.0, self.price)

    @cached_property
    def _outside(self) -> frozenset[int]:
        """Return the labels that are not allowed."""
        return frozenset(np.flatnonzero(np.logical_not(self.is_allowed)).tolist())


def with_costs(
    tree: BackoffAutomaton | None, weight: float, costs: np.ndarray
) -> tuple[BackoffAutomaton | None, float]:
    """Return the boosting automaton with `costs` [V] (natural log) subtracted from its arcs, and its weight.

    A tree of None or a weight of 0 means no phrases. If all costs are 0, tree and weight do not change.
    """
    if not costs.any():
        return tree, weight
    if tree is None or weight == 0:
        tree, weight = None, PRICE_WEIGHT
    own = tree and (tree.fingerprint, repr(tree.aliases), getattr(tree, "ac_threshold", 0.0))

    def priced() -> BackoffAutomaton:
        return (tree or empty_automaton(len(costs))).with_costs(costs / weight)

    return cached(("token costs", own, costs.tobytes(), weight), priced), weight


def allowed_tokens(
    vocabulary: Vocabulary,
    *,
    scripts: Sequence[str] = (),
    tokens: Iterable[str] = (),
    texts: Iterable[str] = (),
    price: float = math.inf,
) -> AllowedTokens:
    """Return the tokens that belong to given scripts, to a list of tokens, or to the spelling of given texts.

    Tokens without letters (digits, punctuation, word marks) are always allowed. A token that is a part of a character,
    such as a byte, is allowed only if it is listed.

    Args:
        vocabulary: the model's tokens.
        scripts: names in Unicode: Latin, Cyrillic, Greek, Han, Hiragana, Katakana, Hangul, Arabic, ... A token is
            allowed if each of its letters belongs to one of them.
        tokens: pieces as in the vocabulary, such as "▁the".
        texts: sentences; the tokens with which the tokenizer spells them are allowed.
        price: cost of each other token, natural log, >= 0; inf: it is forbidden.

    Raises:
        FieldError: no letter of the vocabulary belongs to a script, or a token is not in the vocabulary.
    """
    check_kind("vocabulary", vocabulary, Vocabulary)
    lists = [given if isinstance(given, str) else list(given or ()) for given in (scripts, tokens, texts)]
    for name, given in zip(("scripts", "tokens", "texts"), lists, strict=True):
        if isinstance(given, str) or not all(isinstance(item, str) for item in given):
            raise FieldError(name, given, "a list of texts")
    scripts, tokens, texts = lists
    letters = [list(_scripts_of(vocabulary.text([i]))) for i in range(len(vocabulary))]
    names = _checked_names(scripts, frozenset().union(*itertools.chain(*letters)))
    is_allowed = [all(own & names for own in of_token) for of_token in letters]
    numbers = {piece: i for i, piece in enumerate(vocabulary.pieces)}
    for token in tokens:
        form = next((form for form in (token, *unicode_forms(token)) if form in numbers), None)
        if form is None:
            raise FieldError("tokens", token, "pieces of the vocabulary, with their word marks")
        is_allowed[numbers[form]] = True
    kept, faults = 0, []
    for text in filter(str.strip, texts):
        try:
            spelled = vocabulary.tokenize(text)
        except ValueError as error:
            faults.append(str(error))
            continue
        kept += 1
        for i in spelled:
            is_allowed[i] = True
    leave_out("allowed texts", faults, kept, "lines")
    return AllowedTokens(tuple(is_allowed), price)


def _scripts_of(text: str) -> Iterator[frozenset[str]]:
    """Yield, for each letter and mark of a text, its set of scripts; skip characters that all scripts share."""
    for character in text:
        if character == _INCOMPLETE:
            yield frozenset()
        elif unicodedata.category(character)[0] in "LM":
            # NFKC: a fullwidth letter is a letter of its script. KATAKANA-HIRAGANA: of both
            name = unicodedata.name(unicodedata.normalize("NFKC", character)[0], "")
            if not name.startswith(_SHARED):
                yield frozenset(name.partition(" ")[0].split("-"))


def _checked_names(scripts: Sequence[str], found: frozenset[str]) -> frozenset[str]:
    """Return these scripts as in Unicode character names, such as LATIN; `found`: the scripts of the vocabulary."""
    names: frozenset[str] = frozenset()
    for script in scripts:
        own = frozenset(_OTHER_NAMES.get(str(script).upper(), (str(script).upper(),)))
        if not own & found:
            raise FieldError("scripts", script, f"scripts of the vocabulary's letters: {', '.join(sorted(found))}")
        names |= own
    return names
