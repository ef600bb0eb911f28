"""Pack ARPA files, in memory that does not grow with the number of n-grams.

    report = pack_arpa("lm.arpa.gz", "lm.packed")
    lm = load_packed_lm("lm.packed")

The n-grams are added order by order to a trie (`trie.py`) in mapped files beside the target. Within an
order, any sequence is allowed. The trie finds the context of each n-gram, counts n-grams by context, moves
them behind their contexts and sorts them by label, in time linear in their number. The module then adds states,
back-offs and targets, and packs the result.

Words and blocks of a few MB are in memory. The system decides how many mapped pages are in memory, too.
"""

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import DTypeLike
from tqdm import tqdm

from nemo_gpu_decoding.container import encode_words, map_zeros, write_container
from nemo_gpu_decoding.jit import announce_compilation
from nemo_gpu_decoding.lm import packed
from nemo_gpu_decoding.lm.arpa import UNKNOWN_WORDS, ArpaReader
from nemo_gpu_decoding.lm.trie import BackoffArcs, Zeros, read_trie
from nemo_gpu_decoding.plain_text import path_of

_CHUNK = 1 << 20  # n-grams at a time
_START, _END = "<s>", "</s>"
Name = str | PathLike[str]


@dataclass(frozen=True)
class PackReport:
    """The sizes of a packed LM, and the time and memory that packing took."""

    counts: tuple[int, ...]  # n-grams of each order
    repaired: int  # n-grams whose suffix (all but the first word) is not listed, see `automaton.link`
    states: int
    num_bytes: int  # of the packed file
    seconds: float

    @property
    def num_ngrams(self) -> int:
        return sum(self.counts)


def pack_arpa(source: Name, target: Name, *, temporary: Name | None = None, progress: bool = False) -> PackReport:
    """Pack an ARPA file of any size.

    The packed LM gives each n-gram the score that the ARPA file gives it. An unlisted n-gram has its backed-off
    weight, also if it is the suffix of a listed n-gram.

    Args:
        source: ARPA file, plain or gzipped.
        target: the file to write; it is created only if packing succeeds.
        temporary: folder for temporary files, about 30 bytes per n-gram; None for the target's.
        progress: show a progress bar on stderr if that is a terminal.

    Raises:
        ValueError: the file is not well-formed; its counts differ from the header; an n-gram's context is
            missing. The message names file and line.
        OSError: the file cannot be read, or there is not enough space on the disk.
    """
    announce_compilation("pack-lm")
    begin = time.perf_counter()
    target = path_of(target, "target")
    target.parent.mkdir(parents=True, exist_ok=True)
    zeros = partial(_mapped_zeros, target.parent if temporary is None else temporary)
    with ArpaReader(source) as reader:
        packing = _Packing(reader, zeros, progress)
    shapes = {name: (length,) for name, length in packing.lengths.items()}
    num_bytes = write_container(target, packed.PACKED_LM, packing.facts, shapes, packing.fill)
    return PackReport(
        counts=packing.automaton.counts,
        repaired=packing.automaton.repaired,
        states=packing.automaton.num_states,
        num_bytes=num_bytes,
        seconds=time.perf_counter() - begin,
    )


def pack_arpa_in_memory(source: Name, *, added_words: Sequence[str] = ()) -> packed.PackedLM:
    """Pack an ARPA file in memory; other arguments and errors are as in `pack_arpa`.

    Args:
        added_words: words to add to the LM, with the probability of <unk> (see `lm/arpa.py`).
    """
    with ArpaReader(source, added_words) as reader:
        packing = _Packing(reader, np.zeros, progress=False)
    arrays = {name: np.zeros(length, packed.DTYPES[name]) for name, length in packing.lengths.items()}
    packing.fill(arrays)
    return packed.assemble(arrays, packing.facts, str(source))


def _mapped_zeros(folder: Name, count: int, dtype: DTypeLike) -> np.ndarray:
    """Return an array [count] in an unnamed file of `folder`; the system removes the file with the array."""
    if not count:
        return np.zeros(0, dtype)
    with tempfile.TemporaryFile(dir=folder) as file:
        return map_zeros(file, count * np.dtype(dtype).itemsize, folder).view(dtype)


class _Packing:
    """The automaton of an LM and the header of its file, before the file is written."""

    def __init__(self, reader: ArpaReader, zeros: Zeros, progress: bool) -> None:
        self.progress = progress
        self.automaton = self._read(reader, zeros)
        words = reader.symbols
        self.words = encode_words(words)
        self.facts = self._facts(words)
        if self.arc_bits > packed.MAX_BITS:
            most = 1 << (packed.MAX_BITS - packed.COST_BITS)
            raise ValueError(f"{reader.path} has {self.automaton.num_states} contexts, expected at most {most}")

    @property
    def arc_bits(self) -> int:
        return self.facts["target_bits"] + packed.COST_BITS

    @property
    def lengths(self) -> dict[str, int]:
        """Return the length of each array."""
        arcs = len(self.automaton.labels)
        return {
            "words": len(self.words),
            "states": len(self.automaton.states),
            "labels": packed.num_words(arcs, self.facts["label_bits"]),
            "arcs": packed.num_words(arcs, self.arc_bits),
        }

    def fill(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Fill arrays of the sizes `lengths`; the arrays must contain zeros."""
        automaton = self.automaton
        arrays["words"][:] = self.words
        arrays["states"][:] = automaton.states
        shift = np.uint64(self.facts["target_bits"])
        with self._bar("writing", len(automaton.labels)) as bar:
            for begin in range(0, len(automaton.labels), _CHUNK):
                chunk = slice(begin, begin + _CHUNK)
                labels = automaton.labels[chunk].astype(np.uint64)
                costs = automaton.costs[chunk].view(np.uint32).astype(np.uint64)
                arcs = costs << shift | automaton.targets[chunk]
                packed.write_bits(arrays["labels"], self.facts["label_bits"], begin, labels)
                packed.write_bits(arrays["arcs"], self.arc_bits, begin, arcs)
                bar.update(len(labels))

    def _read(self, reader: ArpaReader, zeros: Zeros) -> BackoffArcs:
        with self._bar("reading", reader.num_bytes, "B") as bar:
            trie = read_trie(reader, zeros, lambda: bar.update(reader.bytes_read - bar.n))
        words = reader.symbols
        if not words:
            raise ValueError(f"{reader.path} has no 1-grams")
        start = words.index(_START) if _START in words else packed.NO_LABEL
        with self._bar("linking", trie.num_inner) as bar:
            return BackoffArcs(trie, start, bar.update)

    def _facts(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the contents of the header: all fields of a `PackedLM` except its arrays."""
        labels = {word: words.index(word) for word in (_END, *UNKNOWN_WORDS) if word in words}
        return {
            "start_state": self.automaton.start_state,
            "sentence_end": labels.get(_END, packed.NO_LABEL),
            "unknown": next((labels[word] for word in UNKNOWN_WORDS if word in labels), packed.NO_LABEL),
            "counts": self.automaton.counts,
            "label_bits": packed.bits_for(len(words) - 1),
            "target_bits": packed.bits_for(self.automaton.num_states - 1),
        }

    def _bar(self, what: str, total: int, unit: str = " n-grams") -> tqdm:
        hidden = None if self.progress else True  # None: shown only if stderr is a terminal
        return tqdm(total=total, desc=what, unit=unit, unit_scale=True, disable=hidden, file=sys.stderr)
