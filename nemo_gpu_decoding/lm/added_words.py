"""Adding words to a word LM that was estimated without them: names that are to be found all the same.

An added word is as likely as the LM takes any unknown word to be, <unk>'s 1-gram; in an LM without
<unk> as the least likely word. It has no longer n-grams. Probabilities then sum to slightly more than 1.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path

import numpy as np

from nemo_gpu_decoding.lm.arpa import ArpaReader

_UNKNOWN = ("<unk>", "<UNK>")
_NEVER = -90.0  # log10; below it a 1-gram stands for "not possible"
_GZIP_MAGIC = b"\x1f\x8b"


def write_with_words(
    arpa: str | PathLike[str], words: Sequence[str], target: str | PathLike[str]
) -> list[str]:
    """Write a copy of an ARPA file that lists some words more.

    Args:
        arpa: word n-gram LM, plain or gzipped.
        words: those that the LM lists already are passed over.
        target: file to be written, plain.

    Returns:
        the words that were added. If there are none, nothing is written.

    Raises:
        ValueError: `arpa` is no well-formed ARPA file, or a word is empty or has white space.
        OSError: a file cannot be read or written.
    """
    for word in words:
        if not word or word.split() != [word]:
            raise ValueError(f"the word to be added is {word!r}, expected one without white space")
    listed, log10_prob = _one_grams(arpa)
    added = [word for word in dict.fromkeys(words) if word not in listed]
    if not added:
        return []
    rows = "".join(f"{log10_prob:.7g}\t{word}\t0\n" for word in added).encode()
    counted = f"ngram 1={len(listed) + len(added)}\n".encode()
    with open(target, "wb") as file:
        for line in _lines(Path(arpa)):
            text = line.strip()
            if text.startswith(b"ngram") and text.split(b"=")[0].split() == [b"ngram", b"1"]:
                line = counted
            file.write(line)
            if text == rb"\1-grams:":
                file.write(rows)
    return added


def _one_grams(arpa: str | PathLike[str]) -> tuple[set[str], float]:
    """The symbols of an LM, and log10 of the probability that an unknown word has."""
    with ArpaReader(arpa) as reader:
        blocks = []
        for block in reader.blocks():
            if block.order > 1:
                break
            blocks.append(block)
        symbols = list(reader.symbols)
    probs = np.concatenate([block.log10_probs for block in blocks])
    by_symbol = dict(zip(symbols, probs.tolist(), strict=True))
    unknown = next((by_symbol[symbol] for symbol in _UNKNOWN if symbol in by_symbol), None)
    if unknown is None or unknown <= _NEVER:
        unknown = min((p for p in by_symbol.values() if p > _NEVER), default=0.0)
    return set(symbols), unknown


def _lines(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        is_gzip = file.read(2) == _GZIP_MAGIC
    with gzip.open(path, "rb") if is_gzip else open(path, "rb") as file:
        yield from file
