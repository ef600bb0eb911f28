"""A made-up n-gram LM of any size, and files that are made once and kept between runs."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.bench.language import FOLLOW, SUCCESSORS, Language, zipf

SPECIALS = ("<s>", "</s>", "<unk>")  # the first symbols; the words come after them
STOP = 1
END = 0.05  # probability that a sentence ends after a word
UNKNOWN_PROBABILITY = 1e-7
BIGRAM_SHARE = 0.3  # of all n-grams, before those that are drawn twice are dropped
NOISE = 0.1  # deviation of the log10 factors of 3-grams
LOG10_BACKOFF = float(np.log10(1 - FOLLOW))  # after any word
BLOCK = 1 << 20  # n-grams at a time
DIGITS = 5  # after the point


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/nemo_gpu_decoding/bench`, by default below `~/.cache`; made if missing."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(home) / "nemo_gpu_decoding" / "bench"
    path.mkdir(parents=True, exist_ok=True)
    return path


def cached(name: str, make: Callable[[Path], object]) -> Path:
    """Path of the cached file `name`; `make(path)` writes it (aside, then renamed) if missing."""
    path = cache_dir() / name
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            make(Path(folder) / name)
            (Path(folder) / name).replace(path)
    return path


def plain_file(path: str | Path | None) -> Path | None:
    """The file itself, or its unpacked copy if it ends in .gz."""
    if path is None or Path(path).suffix != ".gz":
        return None if path is None else Path(path)

    def unpack(target: Path) -> None:
        with gzip.open(path, "rb") as packed, target.open("wb") as plain:
            shutil.copyfileobj(packed, plain)

    return cached(f"{content_key(path)}-{Path(path).stem}", unpack)


def content_key(path: str | Path) -> str:
    """Short digest of a file's content, for the names of files made from it."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()[:16]


class Bigrams(NamedTuple):
    """All 2-grams, by context, then by second symbol. B 2-grams, S symbols."""

    begin: np.ndarray  # [S + 1] int64, where the 2-grams of a context begin
    seconds: np.ndarray  # [B] int32, the second symbol
    log10_probs: np.ndarray  # [B] float32


class SyntheticLM:
    """A made-up trigram LM of about `ngrams` n-grams over a `Language`; memory: 8 bytes per 2-gram.

    A sentence ends with probability END; else with probability FOLLOW one of the word's likely
    successors comes, else any word. The LM lists every word; as 2-grams of every word its likely
    successors, its end, and other words, of frequent words more; as 3-grams of the 2-grams first in a
    word's list the first ones of the second word's list. Within a list words stand by frequency.
    1-grams and 2-grams have the source's probabilities, so that they are proper with one back-off
    weight for all; those of 3-grams are off by random factors, so that weights are as varied as those
    of an LM made of text.

    Args:
        ngrams: at least as many as the likely successors of all words.
        rng: every LM drawn from it in the same state is the same.
    """

    def __init__(self, language: Language, ngrams: int, rng: np.random.Generator) -> None:
        self.symbols = [*SPECIALS, *language.lexicon]
        self._language, self._rng = language, rng
        words = (1 - END) * language.word_probabilities
        self.log10_words = np.log10(np.concatenate([[1.0, END, UNKNOWN_PROBABILITY], words]))
        self.bigrams = self._draw_bigrams(ngrams)
        self._widest, self._breadth = self._fit_trigrams(ngrams)
        rest = sum(int(self._continuations(*chunk).sum()) for chunk in self._chunks())
        self.counts = (len(self.symbols), len(self.bigrams.seconds), rest)

    def trigrams(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Blocks of all 3-grams: symbols [M, 3] int32 and log10 probabilities [M]; once."""
        begin, seconds = self.bigrams.begin, self.bigrams.seconds
        for first, last in self._chunks():
            counts = self._continuations(first, last)
            contexts = np.repeat(np.arange(first, last), counts)  # the 2-gram that each goes on from
            place = np.arange(len(contexts)) - np.repeat(np.cumsum(counts) - counts, counts)
            suffixes = begin[seconds[contexts]] + place  # its last two words are a 2-gram, too
            words = np.searchsorted(begin, contexts, "right") - 1
            symbols = np.stack([words, seconds[contexts], seconds[suffixes]], 1)
            noise = self._rng.normal(0.0, NOISE, len(contexts))
            yield symbols.astype(np.int32), self.bigrams.log10_probs[suffixes] + noise

    def _draw_bigrams(self, ngrams: int) -> Bigrams:
        """In blocks of contexts; a context's number of draws falls with the root of its rank."""
        num_words, size = len(self._language.lexicon), len(self.symbols)
        draws = BIGRAM_SHARE * ngrams / np.sqrt(np.arange(1, num_words + 1))
        draws = (draws / (2 * np.sqrt(num_words))).astype(np.int64)
        cuts = np.flatnonzero(np.diff(np.cumsum(draws + SUCCESSORS + 1) // BLOCK)) + 1
        seconds, log10_probs = [], []
        counts = np.zeros(size + 1, np.int64)
        for contexts in np.split(np.arange(num_words), cuts):
            keys, probabilities = self._bigrams_of(contexts, draws[contexts])
            counts += np.bincount(keys // size + 1, minlength=size + 1)
            seconds.append((keys % size).astype(np.int32))
            log10_probs.append(np.log10(probabilities).astype(np.float32))
        return Bigrams(np.cumsum(counts), np.concatenate(seconds), np.concatenate(log10_probs))

    def _bigrams_of(self, contexts: np.ndarray, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Keys (context symbol * S + second symbol), ascending, and probabilities."""
        language, size, shift = self._language, len(self.symbols), len(SPECIALS)
        likely = language.successors[contexts] + shift
        likely_keys = ((contexts + shift)[:, None] * size + likely).ravel()
        # as often the first as the second ten words, the first as the second hundred, ...
        others = np.exp(self._rng.random(int(draws.sum())) * np.log(len(language.lexicon)))
        others = others.astype(np.int64) - 1 + shift
        other_keys = np.repeat(contexts + shift, draws) * size + others
        ends = (contexts + shift) * size + STOP
        keys = np.unique(np.concatenate([likely_keys, other_keys, ends]))
        words = np.maximum(keys % size - shift, 0)
        probabilities = (1 - END) * (1 - FOLLOW) * language.word_probabilities[words]
        shares = np.tile((1 - END) * FOLLOW * zipf(SUCCESSORS), len(contexts))
        np.add.at(probabilities, np.searchsorted(keys, likely_keys), shares)
        probabilities[keys % size == STOP] = END
        return keys, probabilities

    def _fit_trigrams(self, ngrams: int) -> tuple[int, float]:
        """(Most 3-grams of a context, how many of a context first in its word's list): both limit.

        The 2-gram at place j >= 1 of its word's list (the end is at place 0) has breadth / j.
        """
        degrees = np.diff(self.bigrams.begin)[len(SPECIALS) :]
        wanted = ngrams - len(self.symbols) - len(self.bigrams.seconds)
        widest, places = int(degrees.min()), np.arange(1, degrees.max())
        low, high = 0.0, float(widest * len(places))
        for _ in range(60):
            middle = (low + high) / 2
            totals = np.append(0, np.cumsum(np.minimum(widest, middle // places)))
            low, high = (middle, high) if totals[degrees - 1].sum() <= wanted else (low, middle)
        return widest, low

    def _continuations(self, first: int, last: int) -> np.ndarray:
        """How many 3-grams go on from each 2-gram in a range."""
        numbers, begin = np.arange(first, last), self.bigrams.begin
        places = numbers - begin[np.searchsorted(begin, numbers, "right") - 1]
        counts = np.minimum(self._widest, self._breadth // np.maximum(places, 1)).astype(np.int64)
        return np.where(places == 0, 0, counts)

    def _chunks(self) -> Iterator[tuple[int, int]]:
        total, step = len(self.bigrams.seconds), max(1, BLOCK // SUCCESSORS)
        for first in range(0, total, step):
            yield first, min(first + step, total)

    def write(self, path: Path) -> None:
        """As ARPA, in memory that does not grow with the number of 3-grams; over a million lines/s."""
        encoded = np.array([symbol.encode() for symbol in self.symbols])
        table = encoded.view(np.uint8).reshape(len(self.symbols), -1)  # [S, longest], filled with zeros
        begin, seconds, log10_probs = self.bigrams
        backoffs = np.full(len(self.symbols), LOG10_BACKOFF)
        backoffs[: len(SPECIALS)] = 0.0
        with path.open("wb") as file:
            file.write(b"\\data\\\n")
            file.writelines(b"ngram %d=%d\n" % entry for entry in enumerate(self.counts, 1))
            file.write(b"\n\\1-grams:\n")
            unigrams = np.arange(len(self.symbols))[:, None]
            file.write(format_ngrams(self.log10_words, unigrams, table, backoffs))
            file.write(b"\n\\2-grams:\n")
            for first in range(0, len(seconds), BLOCK):
                block = slice(first, first + BLOCK)
                numbers = np.arange(first, first + len(seconds[block]))
                firsts = np.searchsorted(begin, numbers, "right") - 1
                file.write(format_ngrams(log10_probs[block], np.stack([firsts, seconds[block]], 1), table))
            file.write(b"\n\\3-grams:\n")
            file.writelines(format_ngrams(probs, symbols, table) for symbols, probs in self.trigrams())
            file.write(b"\n\\end\\\n")


def format_ngrams(
    log10_probs: np.ndarray, symbols: np.ndarray, table: np.ndarray, log10_backoffs: np.ndarray | None = None
) -> bytes:
    """ARPA lines of M n-grams, in numpy.

    Args:
        log10_probs: [M], and log10_backoffs [M], which may be None: no back-off weights.
        symbols: [M, order] rows of the table.
        table: the symbols in UTF-8, [S, longest] uint8, filled up with zeros.
    """
    number, width, (count, order) = DIGITS + 3, table.shape[1] + 1, symbols.shape
    lines = np.zeros((count, 2 * number + order * width + 2), np.uint8)
    lines[:, :number] = fixed_point(log10_probs)
    for position in range(order):
        begin = number + position * width
        lines[:, begin] = ord(" ") if position else ord("\t")
        lines[:, begin + 1 : begin + width] = table[symbols[:, position]]
    if log10_backoffs is not None:
        lines[:, -number - 2] = ord("\t")
        lines[:, -number - 1 : -1] = fixed_point(log10_backoffs)
    lines[:, -1] = ord("\n")
    return lines[lines != 0].tobytes()


def fixed_point(values: np.ndarray) -> np.ndarray:
    """Numbers, limited to -9.99999 .. 0, [M], as text of equal length, [M, DIGITS + 3] uint8."""
    scaled = np.rint(np.clip(-values.astype(np.float64), 0.0, 9.99999) * 10**DIGITS).astype(np.uint32)
    text = np.empty((len(values), DIGITS + 3), np.uint8)
    for column in range(DIGITS + 2, 2, -1):
        scaled, digit = np.divmod(scaled, 10)
        text[:, column] = ord("0") + digit
    text[:, 0], text[:, 1], text[:, 2] = ord("-"), ord("0") + scaled, ord(".")
    return text
