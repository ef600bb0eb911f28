"""Read KenLM's binary files of the kinds probing and trie; a trie may be quantised and have compressed pointers.

    header      magic, order, kind, number of n-grams of each order
    vocabulary  hashes of the words; not read
    search      the n-grams
    strings     the words, in the order of their numbers, each followed by a zero byte

A trie reads n-grams from their last word to their first: the children of an n-gram are the n-grams with one more word
before it. A trie's entries are bit fields without padding: word, back-off weight and probability, first child.

A probing file has a hash table per order, whose keys cannot be decoded: the key of "a b c" is combined(key of "b c",
a). So the reader tries every word that may precede "b c": for bigrams all words, for trigrams each w of a listed "w
b". [Heafield 2011; lm/binary_format.cc of KenLM, format version 5]
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.plain_text import as_utf8

MAGIC = b"mmap lm http://kheafield.com/code"
_VERSION = MAGIC + b" format version 5\n\0"
_SANITY = (len(_VERSION) + 8) // 8 * 8 + 32  # magic text with a zero byte, and numbers in the machine's format
_KINDS = (
    "probing", "rest probing", "trie", "quantised trie", "trie with compressed pointers",
    "quantised trie with compressed pointers",
)  # fmt: skip
_PROBING, _REST, _TRIE = 0, 1, 2
_CHUNK = 1 << 20  # n-grams per block
MOST_TRIALS = 200_000_000_000  # about 5 minutes
_FIRST, _SECOND = np.uint64(8978948897894561157), np.uint64(17894857484156487943)
_INVERSE = np.uint64(pow(int(_SECOND), -1, 1 << 64))

Columns = tuple[np.ndarray, np.ndarray, np.ndarray]  # symbols [M, order] int32, log10 probabilities and back-offs


class KenlmBinary:
    """A KenLM binary file that is read as n-grams.

    Raises:
        ValueError: the file is truncated, has no words, or has a version, machine or kind that cannot be read.
        OSError: the file cannot be read.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        with open(self.path, "rb") as file:
            self._bytes = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        self.order, self._multiplier, self.kind, self.sizes = self._read_header()
        self.counts = dict(enumerate(self.sizes, 1))  # n-grams of each order, as `sizes`
        header, count = (_SANITY + 27 + 8 * self.order) // 8 * 8, self.sizes[0]
        self._search = header + 8 + (12 * self._buckets(count) if self.kind == _PROBING else 8 * count)
        try:
            if self.kind >= _TRIE:
                trie = _Trie(self._bytes, self._search, self)
                end, self._orders = trie.end, self._trie_orders(trie)
            else:
                end, self._orders = self._tables()[-1].end, self._probing_orders()
        except (IndexError, ValueError):  # of tables that are cut off
            end = len(self._bytes) + 1
        if len(self._bytes) < end:
            raise ValueError(f"{self.path} is truncated: {len(self._bytes)} bytes, expected at least {end}")
        words = as_utf8(self._bytes[end:].tobytes(), str(self.path)).split(b"\0")[: self.sizes[0]]
        if len(words) < self.sizes[0]:
            raise ValueError(f"{self.path} has {len(words)} words, expected {self.sizes[0]}")
        self.symbols = [word.decode() for word in words]

    def next_order(self) -> Iterator[Columns]:
        """Yield the n-grams of the next order, beginning with 1, in blocks."""
        symbols, probs, backoffs = next(self._orders)
        for begin in range(0, len(symbols), _CHUNK):
            rows = slice(begin, begin + _CHUNK)
            # a probability's sign bit has another use
            yield symbols[rows], -np.abs(probs[rows].astype(np.float64)), backoffs[rows].astype(np.float64)

    # ------------------------------------------------------------------------------------ header

    def _read_header(self) -> tuple[int, np.float32, int, tuple[int, ...]]:
        """Return the order, the places of probing tables per n-gram, the kind, and the n-grams of each order."""
        start = self._bytes[: _SANITY + 20].tobytes()
        if not start.startswith(_VERSION) or len(start) < _SANITY + 20:
            raise ValueError(f"{self.path} is a KenLM binary of another version than 5, or incomplete")
        numbers = np.frombuffer(start, "<f4", 3, _SANITY - 32)
        if numbers.tolist() != [0.0, 1.0, -0.5]:
            raise ValueError(f"{self.path} was made on a machine with other numbers, expected little-endian IEEE 754")
        order, kind = start[_SANITY], int(np.frombuffer(start, "<u4", 1, _SANITY + 8)[0])
        name = _KINDS[kind] if kind < len(_KINDS) else f"kind {kind}"
        if kind >= len(_KINDS) or kind == _REST or order < 2:
            raise ValueError(
                f"{self.path} is a KenLM binary of order {order} ({name}), expected order 2 or more and {_KINDS[0]} "
                "or trie: build_binary trie lm.arpa lm.bin"
            )
        if not start[_SANITY + 12]:
            raise ValueError(f"{self.path} does not have the words, expected a file that build_binary wrote with them")
        counts = np.frombuffer(self._bytes[_SANITY + 20 : _SANITY + 20 + 8 * order].tobytes(), "<u8")
        multiplier = np.frombuffer(start, "<f4", 1, _SANITY + 4)[0]
        return order, multiplier, kind, tuple(counts.tolist())

    def _floats(self, begin: int, count: int) -> np.ndarray:
        return np.frombuffer(self._bytes[begin : begin + 4 * count].tobytes(), "<f4")

    # -------------------------------------------------------------------------------------- trie

    def _trie_orders(self, trie: _Trie) -> Iterator[Columns]:
        counts = self.sizes
        values = self._floats(trie.unigrams, 4 * counts[0]).reshape(-1, 4)
        pointers = trie.unigram_children()
        symbols = np.arange(counts[0], dtype=np.int32)[:, None]
        yield symbols, values[:, 0], values[:, 1]
        for n in range(2, self.order + 1):
            parents = np.repeat(np.arange(len(pointers) - 1), np.diff(pointers))
            words, probs, backoffs, pointers = trie.entries(n)
            symbols = np.concatenate([words[:, None], symbols[parents]], axis=1)
            yield symbols, probs, backoffs

    # ----------------------------------------------------------------------------------- probing

    def _buckets(self, count: int) -> int:
        return max(count + 1, int(self._multiplier * np.float32(count)))

    def _tables(self) -> list[_Table]:
        """Return the hash tables of orders 2 and above."""
        begin, tables = self._search + 8 * (self.sizes[0] + 1), []
        for n, count in enumerate(self.sizes[1:], 2):
            has_backoffs = n < self.order
            tables.append(_Table(begin, self._buckets(count), 16 if has_backoffs else 12))
            begin = tables[-1].end
        return tables

    def _probing_orders(self) -> Iterator[Columns]:
        counts = self.sizes
        values = self._floats(self._search, 2 * counts[0]).reshape(-1, 2)
        symbols = np.arange(counts[0], dtype=np.int32)[:, None]
        yield symbols, values[:, 0], values[:, 1]
        suffixes = prefixes = np.zeros(counts[0], np.int64)  # of each n-gram: rows of the next shorter order
        keys = np.arange(counts[0], dtype=np.uint64)
        for n, table in enumerate(self._tables(), 2):
            entries = table.read(self._bytes)
            entries = entries[np.argsort(entries["key"], kind="stable")]
            if n == 2:
                self._check_trials(2, len(entries) * counts[0])
                rows, suffixes, prefixes = _find_bigrams(entries["key"], counts[0], _FIRST, _INVERSE)
            else:
                before = np.argsort(suffixes, kind="stable")  # (n - 1)-grams by their last words
                begin = np.searchsorted(suffixes[before], np.arange(int(max(suffixes.max(), prefixes.max())) + 2))
                self._check_trials(n, int((begin[prefixes + 1] - begin[prefixes]).sum()))
                known = keys, symbols[:, 0], prefixes
                rows, suffixes, prefixes = _find_longer(entries["key"], *known, before, begin, _FIRST, _SECOND)
            read = entries[rows]
            if len(read) < len(entries):
                raise ValueError(
                    f"{self.path}: {len(read)} of {len(entries)} {n}-grams are readable, because the others begin "
                    "with an n-gram that is not listed. Expected the ARPA file, or build_binary trie"
                )
            keys = read["key"]
            symbols = np.concatenate([symbols[prefixes][:, :1], symbols[suffixes]], axis=1)
            yield symbols, read["prob"], read["backoff"]

    def _check_trials(self, n: int, trials: int) -> None:
        if trials > MOST_TRIALS:
            raise ValueError(
                f"{self.path} is a KenLM binary of the kind 'probing', which would take {trials:,} trials to read its "
                f"{n}-grams, expected at most {MOST_TRIALS:,}. Give the ARPA file, or build_binary trie"
            )


class _Table(NamedTuple):
    """A hash table that holds the n-grams of one order."""

    begin: int
    buckets: int
    size: int  # of an entry, bytes

    @property
    def end(self) -> int:
        return self.begin + self.buckets * self.size

    def read(self, data: np.ndarray) -> np.ndarray:
        """Return all used entries of the hash table; missing back-offs are 0."""
        fields = [("key", "<u8"), ("prob", "<f4"), ("backoff", "<f4")]
        stored = np.frombuffer(data[self.begin : self.end].tobytes(), np.dtype(fields[: self.size // 4 - 1]))
        stored = stored[stored["key"] != 0]
        entries = np.zeros(len(stored), np.dtype(fields))
        for name in stored.dtype.names or ():
            entries[name] = stored[name]
        return entries


class _Trie:
    """The bit-packed trie in a KenLM file. Orders are 1 .. order."""

    def __init__(self, data: np.ndarray, begin: int, file: KenlmBinary) -> None:
        # a number may begin in any byte
        self._words = np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))
        self._data, self._file = data, file
        self._bins: list[list[np.ndarray]] = []  # values of quantised probabilities and back-offs, by order
        self._chop_limit, self._quant_bits = 0, (31, 32)
        counts = file.sizes
        if file.kind in (3, 5):
            begin = self._read_bins(begin)
        self.unigrams = begin
        begin += 16 * (counts[0] + 2)
        self._is_chopped = file.kind >= 4
        if self._is_chopped and file.order > 2:
            self._chop_limit = int(data[begin + 1])
        self._word_bits = counts[0].bit_length()
        # of orders 2 and above: first bit of the entries, high parts of pointers
        self._begins, self._pointers = [], []
        for n in range(2, file.order):
            inline = counts[n].bit_length() - self._chop(counts[n - 1] + 1, counts[n])
            high = np.zeros(1, np.uint64)
            base = begin
            if self._is_chopped:
                entries = (counts[n] >> inline) + 1
                at = (base + 7) // 8 * 8 + 8
                high = np.frombuffer(data[at : at + 8 * entries].tobytes(), "<u8")
                base += 8 * (1 + entries) + 7
            self._begins.append(8 * base)
            self._pointers.append((inline, high))
            begin = base + ((1 + counts[n - 1]) * (self._word_bits + sum(self._quant_bits) + inline) + 7) // 8 + 8
        self._begins.append(8 * begin)
        longest = self._word_bits + self._quant_bits[0]
        self.end = begin + ((1 + counts[-1]) * longest + 7) // 8 + 8

    def unigram_children(self) -> np.ndarray:
        """Return the first bigram that ends in each word, and the number of bigrams. [V + 1] int64"""
        at = self.unigrams + 8 + 16 * np.arange(self._file.sizes[0] + 1)
        return self._words[at].astype(np.int64)

    def entries(self, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return first word, log10 probability and back-off of each n-gram, and [N + 1] their first children."""
        count, is_longest = self._file.sizes[n - 1], n == self._file.order
        inline, high = (0, np.zeros(1, np.uint64)) if is_longest else self._pointers[n - 2]
        prob_bits, backoff_bits = self._quant_bits[0], 0 if is_longest else self._quant_bits[1]
        total = self._word_bits + prob_bits + backoff_bits + inline
        at = self._begins[n - 2] + total * np.arange(count + 1)
        words = self._bits(at[:-1], self._word_bits).astype(np.int32)
        values = at[:-1] + self._word_bits
        if self._bins:  # the back-off comes first
            tables = self._bins[n - 2]
            probs = tables[0][self._bits(values + backoff_bits, prob_bits)]
            backoffs = np.zeros(count, np.float32) if is_longest else tables[1][self._bits(values, backoff_bits)]
        else:
            probs = self._bits(values, prob_bits).astype(np.uint32).view(np.float32)
            backoffs = self._bits(values + prob_bits, backoff_bits).astype(np.uint32).view(np.float32)
        if is_longest:
            return words, probs, backoffs, np.zeros(0, np.int64)
        low = self._bits(at + (total - inline), inline).astype(np.int64)
        top = np.searchsorted(high, np.arange(count + 1), side="right") - 1 if self._is_chopped else 0
        return words, probs, backoffs, low + (np.asarray(top) << inline)

    def _bits(self, at: np.ndarray, width: int) -> np.ndarray:
        """Return the numbers of `width` <= 57 bits that begin at these bits."""
        return (self._words[at >> 3] >> (at & 7).astype(np.uint64)) & np.uint64((1 << width) - 1)

    def _read_bins(self, begin: int) -> int:
        """Read the values of quantised numbers; return the position after them."""
        self._quant_bits = int(self._data[begin + 1]), int(self._data[begin + 2])
        begin += 8
        for n in range(2, self._file.order + 1):
            tables = []
            for bits in self._quant_bits[: 1 if n == self._file.order else 2]:
                tables.append(np.frombuffer(self._data[begin : begin + (4 << bits)].tobytes(), "<f4"))
                begin += 4 << bits
            self._bins.append(tables)
        return begin

    def _chop(self, entries: int, most: int) -> int:
        """Return the number of high bits that KenLM stores in a separate table, for pointers up to `most`."""
        if not self._is_chopped:
            return 0
        required = most.bit_length()
        change = [(most >> (required - c)) * 64 - entries * c for c in range(min(required, self._chop_limit) + 1)]
        return change.index(min(change))


@compiled
def _find_bigrams(keys, words, first, inverse):
    """Find the bigrams of keys last * first ^ (1 + word) * second: rows of the keys, last words, first words."""
    result = np.empty((3, len(keys)), np.int64)
    n, most = 0, np.uint64(words)
    for last in range(words):
        mixed = np.uint64(last) * first
        for row in range(len(keys)):
            before = ((keys[row] ^ mixed) * inverse) - np.uint64(1)
            if before < most and n < len(keys):
                result[0, n], result[1, n], result[2, n] = row, last, np.int64(before)
                n += 1
    return result[:, :n]


@compiled
def _find_longer(sought, keys, firsts, prefixes, before, begin, first, second):
    """Find the n-grams made of a word and one of `keys`: rows in `sought`, of the last and of the first n - 1 words.

    Args:
        sought: [N] keys of the n-grams, ascending.
        keys: [M] keys of the (n - 1)-grams; firsts: their first words; prefixes: rows of their first n - 2 words.
        before: [M] the (n - 1)-grams by the rows of their last n - 2 words; begin: the first of each row.
    """
    result = np.empty((3, len(sought)), np.int64)
    n = 0
    for last in range(len(keys)):
        mixed = keys[last] * first
        for at in range(begin[prefixes[last]], begin[prefixes[last] + 1]):
            shorter = before[at]
            key = mixed ^ ((np.uint64(1) + np.uint64(firsts[shorter])) * second)
            row = np.searchsorted(sought, key)
            if row < len(sought) and sought[row] == key and n < len(sought):
                result[0, n], result[1, n], result[2, n] = row, last, shorter
                n += 1
    return result[:, :n]
