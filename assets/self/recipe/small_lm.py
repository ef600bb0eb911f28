"""Make `lm/word_small.arpa` out of `lm/word3.arpa`: all its words, and the 2-grams that are worth most.

    python assets/self/recipe/small_lm.py LARGE.arpa SMALL.arpa 0.05

`nemo_gpu_decoding.prune_ngram_lm` prunes LMs of all orders; this is what the shipped one was made with.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from nemo_gpu_decoding.lm.arpa import ArpaReader, NGramBlock

LEAST_MASS = 1e-6  # probability that a context leaves to what it does not list


def write_pruned(source: Path, target: Path, share: float) -> None:
    """Write the small LM of an ARPA file as ARPA.

    What a 2-gram (a, b) is worth is p(a b) log(p(b|a) / backed-off p(b|a)), the first-order change of
    the relative entropy if it goes [Stolcke 1998]. Back-off weights are computed anew, so that the
    probabilities of every context sum to 1. 2-grams that are no likelier than their second word alone
    all go: back-off weights grow to nearly 1, so that in a word graph, which can back off from what is
    listed too, the way over the back-off costs less.

    Args:
        share: n-grams of the small LM / those of the large one; all words stay, though, and there may
            be fewer 2-grams that are worth keeping.

    Raises:
        ValueError: the file has no 2-grams.
    """
    with ArpaReader(source) as arpa:
        if not arpa.counts.get(2):
            raise ValueError(f"{source} has no 2-grams, expected an LM that can be pruned")
        total = sum(arpa.counts.values())
        unigrams, bigrams = _lower_orders(arpa)
        words = np.array(arpa.symbols)
    log10_word, backoff = np.zeros(len(words)), np.zeros(len(words))
    log10_word[unigrams.symbols[:, 0]] = unigrams.log10_probs
    backoff[unigrams.symbols[:, 0]] = unigrams.log10_backoffs
    context = log10_word.copy()
    if "<s>" in words and "</s>" in words:  # sentences begin as often as they end
        context[words == "<s>"] = log10_word[words == "</s>"]
    first, second = bigrams.symbols.T
    gain = bigrams.log10_probs - backoff[first] - log10_word[second]
    worth = 10.0 ** (context[first] + bigrams.log10_probs) * gain
    worth[bigrams.log10_probs <= log10_word[second]] = -np.inf
    count = min(max(1, int(share * total) - len(words)), np.count_nonzero(np.isfinite(worth)))
    kept = np.sort(np.argsort(-worth, kind="stable")[:count])
    first, second, log10_probs = first[kept], second[kept], bigrams.log10_probs[kept]
    left = 1 - np.bincount(first, 10.0**log10_probs, len(words))
    below = 1 - np.bincount(first, 10.0 ** log10_word[second], len(words))
    backoff = np.log10(np.maximum(left, LEAST_MASS) / np.maximum(below, LEAST_MASS))
    with target.open("w", encoding="utf-8") as file:
        file.write(f"\\data\\\nngram 1={len(words)}\nngram 2={count}\n\n\\1-grams:\n")
        for word, log10_prob, weight in zip(words, log10_word, backoff, strict=True):
            file.write(f"{log10_prob:.7g}\t{word}\t{weight:.7g}\n")
        file.write("\n\\2-grams:\n")
        for a, b, log10_prob in zip(words[first], words[second], log10_probs, strict=True):
            file.write(f"{log10_prob:.7g}\t{a} {b}\n")
        file.write("\n\\end\\\n")


def _lower_orders(arpa: ArpaReader) -> tuple[NGramBlock, NGramBlock]:
    """All 1-grams and all 2-grams; what comes after them is not read."""
    blocks: dict[int, list[NGramBlock]] = {1: [], 2: []}
    for block in arpa.blocks():
        if block.order not in blocks:
            break
        blocks[block.order].append(block)

    def joined(order: int) -> NGramBlock:
        columns = ((b.symbols, b.log10_probs, b.log10_backoffs) for b in blocks[order])
        return NGramBlock(order, *map(np.concatenate, zip(*columns, strict=True)))

    return joined(1), joined(2)


if __name__ == "__main__":
    write_pruned(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
