"""Back-off n-gram probabilities straight from the definition, and ARPA text for made-up n-grams."""

import itertools
import math
import random
from collections.abc import Container, Mapping, Sequence

from nemo_gpu_decoding.container import encode_words, write_arrays
from nemo_gpu_decoding.lm.packed import PACKED_LM, TABLES

NGram = tuple[str, ...]
Table = dict[NGram, tuple[float, float]]  # n-gram -> log10 probability, log10 back-off weight


def log10_prob(table: Table, history: Sequence[str], symbol: str, order: int) -> float:
    """log10 p(symbol | history): the longest listed n-gram, and a back-off weight per dropped symbol."""
    context = tuple(history)[max(0, len(history) - order + 1) :]
    penalty = 0.0
    while True:
        if (*context, symbol) in table:
            return penalty + table[(*context, symbol)][0]
        assert context, f"{symbol} has no 1-gram"
        penalty += table.get(context, (0.0, 0.0))[1]
        context = context[1:]


def random_table(
    symbols: Sequence[str], order: int, keep: float, seed: int, specials: Sequence[str] = ("<s>", "</s>")
) -> Table:
    """All 1-grams and a random part of the longer n-grams: contexts and suffixes may well be missing."""
    draw = random.Random(seed)
    first = [s for s in (*symbols, *specials) if s != "</s>"]
    last = [s for s in (*symbols, *specials) if s != "<s>"]
    singles = dict.fromkeys((*first, *last))
    table: Table = {(s,): (draw.uniform(-3, 0), draw.uniform(-1, 0)) for s in singles}
    for n in range(2, order + 1):
        for ngram in itertools.product(first, *[symbols] * (n - 2), last):
            if draw.random() < keep:
                table[ngram] = (draw.uniform(-3, 0), draw.uniform(-1, 0) if n < order else 0.0)
    return table


def arpa_text(table: Table, separator: str = "\t") -> str:
    """The table as an ARPA file; weights in full precision, back-off weights of 0 left out."""
    order = max(map(len, table))
    by_order = {n: [g for g in table if len(g) == n] for n in range(1, order + 1)}
    lines = ["\\data\\", *(f"ngram {n}={len(grams)}" for n, grams in by_order.items()), ""]
    for n, grams in by_order.items():
        lines.append(f"\\{n}-grams:")
        for gram in grams:
            prob, backoff = table[gram]
            fields = [repr(prob), " ".join(gram)] + ([repr(backoff)] if backoff else [])
            lines.append(separator.join(fields))
        lines.append("")
    return "\n".join([*lines, "\\end\\", ""])


# ----- The best text of a word graph whose LM costs are replaced by another LM's, from the definition
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


# ------------------------------------------------------------ Small word LMs for the tests of packing
SPECIALS = ("<s>", "</s>", "<unk>")


def closed_table(*, seed, order=3, keep=0.3, words=("x", "y", "z")) -> Table:
    """A random LM without n-grams whose context is not listed; suffixes may well be missing."""
    table = random_table(words, order, keep, seed, SPECIALS)
    kept: Table = {}
    for gram in sorted(table, key=len):
        if len(gram) == 1 or gram[:-1] in kept:
            kept[gram] = table[gram]
    return kept


def write_arpa(path, table, separator="\t"):
    """The table as an ARPA file; returns its path."""
    path.write_text(arpa_text(table, separator))
    return path


def missing_suffixes(table: Table) -> int:
    return sum(gram[1:] not in table for gram in table if len(gram) > 1)


# ----------------- What a token sequence earns from boosted phrases, counted occurrence by occurrence
def phrase_bonus(length: int, context_score: float = 1.0, depth_scaling: float = 2.0) -> float:
    """Bonus of a phrase of so many tokens, from NeMo's formula."""
    return context_score + sum(context_score * depth_scaling + math.log(position) for position in range(2, length + 1))


def class_bonus(lm, tokens: Sequence[int], share: float, phrases: int) -> float:
    """Bonus of a phrase from the LM's weights of its tokens after the root (`default_bonuses.py`)."""
    state, total = 0, math.log(share / phrases)
    for token in tokens:
        weight, state = lm.advance(state, token)
        total -= weight
    return max(1e-3, 0.7 * total + 0.5 * len(tokens))


def earned(
    tokens: Sequence[int],
    bonuses: Mapping[tuple[int, ...], float],
    is_continuation: Container[int] = (),
    outside_words: Container[tuple[int, ...]] = (),
) -> float:
    """For every position the largest bonus and the largest penalty of the phrases that occur there and
    count, added up.

    An occurrence does not count if a label of `is_continuation` follows, unless its phrase is one of `outside_words`.
    """
    total = 0.0
    for begin in range(len(tokens)):
        here = [
            bonus
            for phrase, bonus in bonuses.items()
            if tuple(tokens[begin : begin + len(phrase)]) == phrase
            and (phrase in outside_words or not word_continues(tokens, begin + len(phrase), is_continuation))
        ]
        total += max(0.0, *here, 0.0) + min(0.0, *here, 0.0)
    return total


def earned_apart(
    tokens: Sequence[int],
    bonuses: Mapping[tuple[int, ...], float],
    is_continuation: Container[int] = (),
    outside_words: Container[tuple[int, ...]] = (),
) -> float:
    """As `earned`, but no token is paid for twice: token by token, by the rules of `context_graph.py`."""
    text, penalties = tuple(tokens), [0.0] * len(tokens)  # of the penalties that begin at each token, the largest
    beginnings = {phrase[:n] for phrase in bonuses for n in range(1, len(phrase) + 1)}

    def counts(phrase: tuple[int, ...], end: int) -> bool:
        return phrase in outside_words or not word_continues(text, end, is_continuation)

    def best_apart(begin: int, end: int, word_ends: bool) -> tuple[float, int]:
        """What occurrences that do not overlap earn between begin and end at most, and where the last one ends."""
        best = [(0.0, begin)]
        for stop in range(begin + 1, end + 1):
            found = best[-1]
            for start in range(begin, stop):
                phrase = text[start:stop]
                value = best[start - begin][0] + max(0.0, bonuses.get(phrase, 0.0))
                if value > found[0] and (counts(phrase, stop) or (word_ends and stop == end)):
                    found = (value, stop)
            best.append(found)
        return best[-1]

    total, begin = 0.0, 0  # text[begin:end] is the match
    for end in range(len(text) + 1):
        while begin < end and (end == len(text) or text[begin : end + 1] not in beginnings):
            paid, stop = best_apart(begin, end, word_ends=False)
            may_end_here = best_apart(begin, end, word_ends=True)[0] > paid
            total += paid
            begin = end if may_end_here else stop if paid else begin + 1
        if end < len(text) and text[begin : end + 1] not in beginnings:
            begin = end + 1
        for start in range(begin, min(end + 1, len(text))):
            phrase = text[start : end + 1]
            if bonuses.get(phrase, 0.0) < 0 and counts(phrase, end + 1):
                penalties[start] = min(penalties[start], bonuses[phrase])
    return total + sum(penalties)


def word_continues(tokens: Sequence[int], position: int, is_continuation: Container[int]) -> bool:
    return position < len(tokens) and tokens[position] in is_continuation


def facts_of(lm):
    """The header of the file of a packed LM."""
    bits = {"label_bits": lm.arrays.label_bits, "target_bits": lm.arrays.target_bits}
    return {name: getattr(lm, name) for name in ("start_state", "sentence_end", "unknown", "counts")} | bits


def save_packed_lm(lm, path, facts=None):
    """Write a packed LM to a file, perhaps with other facts; returns the size of the file in bytes."""
    arrays = {"words": encode_words(lm.words), **{name: getattr(lm.arrays, name) for name in TABLES}}
    return write_arrays(path, PACKED_LM, facts or facts_of(lm), arrays)
