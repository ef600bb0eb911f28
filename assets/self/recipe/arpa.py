"""N-gram language models: interpolated modified Kneser-Ney, written as ARPA text.

NeMo's beam search reads *token* language models in which the token with id ``i`` is written as
the single character ``chr(i + 100)``; `encode_tokens` does that.  Word models need no encoding.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import sentencepiece

START, END, UNKNOWN = "<s>", "</s>", "<unk>"
TOKEN_OFFSET = 100

NGram = tuple[str, ...]


@dataclass
class Model:
    """A back-off model.  `probability[n]` and `backoff[n]` are keyed by n-grams of length n."""

    order: int
    probability: list[dict[NGram, float]]
    backoff: list[dict[NGram, float]]

    def conditional(self, ngram: NGram) -> float:
        """P(last word | words before it), backing off to shorter n-grams where needed."""
        weight = 1.0
        while ngram not in self.probability[len(ngram)]:
            if len(ngram) == 1:
                return weight * self.probability[1][(UNKNOWN,)]
            weight *= self.backoff[len(ngram) - 1].get(ngram[:-1], 1.0)
            ngram = ngram[1:]
        return weight * self.probability[len(ngram)][ngram]


def encode_tokens(sentence: str, tokenizer: sentencepiece.SentencePieceProcessor) -> list[str]:
    """A sentence as NeMo's token characters."""
    return [chr(token + TOKEN_OFFSET) for token in tokenizer.encode(sentence)]


def count_ngrams(sentences: list[list[str]], order: int) -> list[Counter]:
    """How often every n-gram occurs, by length 1 to `order` (index 0 is unused)."""
    counts = [Counter() for _ in range(order + 1)]
    for sentence in sentences:
        words = [START, *sentence, END]
        for n in range(1, order + 1):
            counts[n].update(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
    return counts


def adjust(counts: list[Counter]) -> list[Counter]:
    """Kneser-Ney counts: below the highest order, count different left neighbours instead.

    N-grams that begin a sentence have no left neighbour and keep their plain count.
    """
    adjusted = counts[:]
    for n in range(len(counts) - 2, 0, -1):
        adjusted[n] = Counter(ngram[1:] for ngram in counts[n + 1])
        for ngram, count in counts[n].items():
            if ngram[0] == START:
                adjusted[n][ngram] = count
    del adjusted[1][(START,)]
    return adjusted


def discount_function(counts: Counter) -> Callable[[int], float]:
    """How much to take off a count of 1, 2, and 3 or more (Chen and Goodman 1998)."""
    ones, twos, threes, fours = (sum(c == k for c in counts.values()) for k in (1, 2, 3, 4))
    if not all((ones, twos, threes, fours)):  # too little text to estimate from
        discounts = (0.5, 1.0, 1.5)
    else:
        y = ones / (ones + 2 * twos)
        raw = (1 - 2 * y * twos / ones, 2 - 3 * y * threes / twos, 3 - 4 * y * fours / threes)
        limits = (0.95, 1.999, 2.999)
        discounts = tuple(min(max(d, 0.1), limit) for d, limit in zip(raw, limits, strict=True))
    return lambda count: discounts[min(count, 3) - 1]


def estimate(sentences: list[list[str]], order: int, prune: list[int]) -> Model:
    """Estimate a model; n-grams seen `prune[n - 1]` times or fewer are dropped at length n."""
    counts = count_ngrams(sentences, order)
    adjusted = adjust(counts)
    model = Model(order, [{}, unigrams(adjusted[1])], [{}])
    for n in range(2, order + 1):
        kept = [ngram for ngram in adjusted[n] if counts[n][ngram] > prune[n - 1]]
        add_order(model, adjusted[n], kept)
    return model


def unigrams(counts: Counter) -> dict[NGram, float]:
    """Unigram probabilities; the mass freed by discounting is shared equally, also with <unk>."""
    discount = discount_function(counts)
    total = sum(counts.values())
    kept = {ngram: (count - discount(count)) / total for ngram, count in sorted(counts.items())}
    share = (1 - sum(kept.values())) / (len(kept) + 1)
    return {ngram: p + share for ngram, p in kept.items()} | {(UNKNOWN,): share}


def add_order(model: Model, counts: Counter, kept: list[NGram]) -> None:
    """Add the next longer n-grams, interpolated with the model so far.

    The mass freed by discounting and pruning becomes the back-off weight of each history.
    """
    discount = discount_function(counts)
    total: Counter[NGram] = Counter()
    for ngram, count in counts.items():
        total[ngram[:-1]] += count
    kept_mass: Counter = Counter()
    for ngram in kept:
        kept_mass[ngram[:-1]] += counts[ngram] - discount(counts[ngram])
    backoff = {h: max(1e-9, 1 - mass / total[h]) for h, mass in kept_mass.items()}
    probability = {}
    for ngram in kept:
        history = ngram[:-1]
        own = (counts[ngram] - discount(counts[ngram])) / total[history]
        probability[ngram] = own + backoff[history] * model.conditional(ngram[1:])
    model.backoff.append(backoff)
    model.probability.append(probability)


def write_arpa(model: Model, path: Path) -> None:
    """Write the model in ARPA format: log10 probability, n-gram, log10 back-off weight."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tables = [sorted(table.items()) for table in model.probability]
    tables[1].insert(0, ((START,), 1.0))  # <s> is only ever a history: log10 probability 0
    with open(path, "w", encoding="utf-8") as arpa:
        arpa.write("\\data\\\n")
        for n in range(1, model.order + 1):
            arpa.write(f"ngram {n}={len(tables[n])}\n")
        for n in range(1, model.order + 1):
            arpa.write(f"\n\\{n}-grams:\n")
            for ngram, probability in tables[n]:
                arpa.write(f"{math.log10(probability):.6g}\t{' '.join(ngram)}")
                if n < model.order:
                    arpa.write(f"\t{math.log10(model.backoff[n].get(ngram, 1.0)):.6g}")
                arpa.write("\n")
        arpa.write("\n\\end\\\n")


def write_models(sentences: list[str], tokenizer_model: Path, folder: Path) -> None:
    """Write a word trigram, and token models of order 3 and 6."""
    tokenizer = sentencepiece.SentencePieceProcessor(str(tokenizer_model))
    words = [sentence.split() for sentence in sentences]
    tokens = [encode_tokens(sentence, tokenizer) for sentence in sentences]
    write_arpa(estimate(words, 3, [0, 0, 1]), folder / "word3.arpa")
    write_arpa(estimate(tokens, 3, [0, 0, 1]), folder / "tok3.arpa")
    write_arpa(estimate(tokens, 6, [0, 0, 1, 1, 1, 1]), folder / "tok6.arpa")
