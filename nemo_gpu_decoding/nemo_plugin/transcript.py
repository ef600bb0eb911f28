"""The transcript of an utterance, or of a long recording."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from nemo_gpu_decoding.live.interface import BoostedPhrase, Word
from nemo_gpu_decoding.search.slots import Slot

if TYPE_CHECKING:
    from nemo_gpu_decoding.search.result import FoundPhrase
    from nemo_gpu_decoding.search.word_graph.lattice.lattice import Lattice


class Segment(NamedTuple):
    """The part of a long recording between two cuts, with its transcript. Times are in seconds."""

    start: float
    end: float
    text: str = ""
    score: float | None = None
    n_best: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Transcript:
    """The result of a strategy for one utterance."""

    text: str
    score: float | None  # natural log, as the strategy defines it
    words: tuple[Word, ...] = ()  # with timestamps
    n_best: tuple[tuple[str, float], ...] = ()  # (text, score), best first, for n-best lists
    lattice: Lattice | None = None  # of a word graph, with decoding_mode lattice
    error: str = ""  # why the audio, or a part of a long recording, could not be decoded; "": decoded
    segments: tuple[Segment, ...] = ()  # of a long recording
    outside_share: float | None = None  # of tokens that are not allowed, 0 .. 1; None: all tokens are
    in_grammar: bool | None = None  # False: no sentence of the grammar fits; None: no grammar
    alternatives: tuple[Slot, ...] = ()  # with timestamps: the confusion network of n-best lists and lattices
    phrases: tuple[BoostedPhrase, ...] = ()  # boosted ones in the text, in their order


def boosted_phrases(found: Iterable[FoundPhrase]) -> tuple[BoostedPhrase, ...]:
    """The phrases of a hypothesis for output."""
    return tuple(BoostedPhrase(phrase.text, float(f"{phrase.probability:.4g}")) for phrase in found)
