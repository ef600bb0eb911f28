"""Paths with words: what cuda_wfst returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from nemo_gpu_decoding.graph.csr import Spellings, WordGraph, count_words, word_from_end
from nemo_gpu_decoding.jit import compiled, inlined
from nemo_gpu_decoding.search.result import Path
from nemo_gpu_decoding.search.word_graph.best_path import Steps

if TYPE_CHECKING:
    pass


W = TypeVar("W", bound="WordPath")


class Word(NamedTuple):
    """A word of a path. Frames count from the start of the stream."""

    text: str
    label: int  # in the graph's words
    start_frame: int  # first frame of its first token
    end_frame: int  # one past the last frame of its last token
    first_token: int  # its tokens are those from first_token to end_token of the path
    end_token: int
    confidence: float | None = None  # posterior in the lattice, in [0, 1]; None without a lattice


@dataclass(frozen=True)
class WordPath(Path):
    """A `Path` whose words come from a graph. `score` includes the graph's costs (`parts.lm`)."""

    words: tuple[Word, ...] = ()
    risk: float | None = None  # expected number of word errors against the lattice; with posteriors "lattice"

    @property
    def text(self) -> str:
        return " ".join(word.text for word in self.words)

    def _cut(self: W, begin: int, n: int) -> W:
        words = tuple(word for word in self.words if word.end_token > n or word.first_token >= n)
        return replace(super()._cut(begin, n), words=words)


def relative_cost(best: float, ended: float) -> float:
    """`NBest.relative_cost` of the costs of the best hypothesis and of the best that may end, inf if none may."""
    return max(0.0, ended - best)


@dataclass(frozen=True)
class TracedText:
    """The tokens of a path, and at which of them the graph emitted each word."""

    tokens: np.ndarray  # [n] int32
    frames: np.ndarray  # [n] int32
    repeats: np.ndarray  # [n] int32
    confidence: np.ndarray  # [n] float32
    words: tuple[int, ...]  # labels
    emitted_at: tuple[int, ...]  # per word the number of tokens before the one with whose arc it came

    def after_words(self, n: int) -> TracedText:
        """Without the first n words, whose tokens are not there."""
        return replace(self, words=self.words[n:], emitted_at=self.emitted_at[n:])

    def followed_by(self, words: Sequence[int]) -> TracedText:
        """With words that are emitted after the last frame."""
        emitted_at = (*self.emitted_at, *[len(self.tokens)] * len(words))
        return replace(self, words=(*self.words, *words), emitted_at=emitted_at)


def traced_text(steps: Steps, graph: WordGraph, blank_id: int) -> TracedText:
    """Split the steps of a path into tokens and words."""
    found, confidence, words = split_steps(steps, graph.arrays, blank_id, len(graph.words), graph.num_spoken)
    tokens, frames, repeats = found
    labels, emitted_at = words.tolist()
    return TracedText(tokens, frames, repeats, confidence, tuple(labels), tuple(emitted_at))


@compiled
def split_steps(steps, graph, blank_id, num_words, num_spoken):
    """The tokens and words of a path.

    Returns:
        [3, n] int32: label, frame and run of each token; [n] float32, its confidence; [2, w] int64: label of each
        word, and the number of tokens before the one with whose arc it came.
    """
    most = 0
    for n in range(len(steps.arcs)):
        most += count_words(_silent(steps.epsilons[n], graph), graph, num_words)
        most += count_words(graph.arcs[steps.arcs[n]].olabel, graph, num_words)
    tokens, words = np.empty((3, len(steps.arcs)), np.int32), np.empty((2, most), np.int64)
    confidence, count, size = np.empty(len(steps.arcs), np.float32), 0, 0
    for n in range(len(steps.arcs)):
        arc = graph.arcs[steps.arcs[n]]
        for olabel in (_silent(steps.epsilons[n], graph), arc.olabel):
            for k in range(count_words(olabel, graph, num_words) - 1, -1, -1):
                word = word_from_end(olabel, k, graph, num_words)
                if 0 < word < num_spoken:  # no piece of an unknown word
                    words[0, size], words[1, size] = word, count
                    size += 1
        if arc.ilabel != blank_id:  # a ready-made graph may emit a word with a blank
            tokens[0, count], tokens[1, count], tokens[2, count] = arc.ilabel, steps.frames[n], steps.runs[n]
            confidence[count] = min(np.float64(steps.probabilities[n]) / max(steps.runs[n], 1), 1.0)
            count += 1
    return tokens[:, :count], confidence[:count], words[:, :size]


@inlined
def _silent(epsilon, graph):
    """The olabel of a closure arc, or of none."""
    return graph.epsilons[epsilon].olabel if epsilon >= 0 else np.int32(0)


def words_of(
    traced: TracedText, graph: WordGraph, pieces: Sequence[str] | None, first: int = 0, stop: int = 0
) -> tuple[Word, ...]:
    """The words of a path with their tokens and frames.

    With a lexicon in the graph the tokens of each word are exact. A ready-made graph only emits a
    word at some token: there a word's tokens are those up to the next word's. `pieces`
    spell words that only <unk> stands for. Before these tokens there are `first` others, the last of which ends at
    frame `stop`.
    """
    if graph.spellings is None:
        spans = _emitted_spans(traced)
    else:
        spans = _spelled_spans(traced, graph, graph.spellings)
    tokens, frames = traced.tokens.tolist(), traced.frames.tolist()
    stops = (traced.frames + traced.repeats).tolist()
    words = []
    for label, (begin, end) in zip(traced.words, spans, strict=True):
        text = _text(label, tokens[begin:end], graph, pieces)
        before = stops[begin - 1] if begin else stop  # where a word lies that has no token yet
        start_frame, end_frame = (frames[begin], stops[end - 1]) if begin < end else (before, before)
        words.append(Word(text, label, start_frame, end_frame, first + begin, first + end))
    return tuple(words)


def _text(word: int, tokens: list[int], graph: WordGraph, pieces: Sequence[str] | None) -> str:
    if word != graph.unknown or graph.unknown == 0 or pieces is None or not tokens:
        return graph.words[word]
    return "".join(pieces[t] for t in tokens).replace("▁", "").replace("##", "").strip()


def _spelled_spans(traced: TracedText, graph: WordGraph, spellings: Spellings) -> list[tuple[int, int]]:
    ends = np.zeros(len(traced.words), np.int64)
    words = np.array(traced.words, np.int64)
    found = find_spans(
        words, traced.tokens, graph.unknown, graph.spelling_index, spellings.begin, spellings.tokens,
        spellings.beginning, ends,
    )  # fmt: skip
    if not found:  # cannot be, unless the spellings are not those that the graph was made of
        return _emitted_spans(traced)
    stops = ends.tolist()
    return list(zip([0, *stops], stops, strict=False))


def _emitted_spans(traced: TracedText) -> list[tuple[int, int]]:
    """From the token with which each word was emitted to that of the next."""
    return list(zip(traced.emitted_at, [*traced.emitted_at[1:], len(traced.tokens)], strict=False))


@compiled
def find_spans(words, tokens, unknown, index, begin, spelled, beginning, ends):
    """Divide tokens among words: fill ends [number of words] with one past the last token of each.

    The words' spellings, one after the other, are the tokens. The last word may be incomplete (a
    partial result); <unk> takes a token that may begin a word and all that may not after it.

    Returns:
        whether that is possible.
    """
    count, size = len(words), len(tokens)
    choice = np.zeros(count + 1, np.int64)  # spellings of each word that were tried
    dead = np.zeros((count + 1, size + 1), np.bool_)  # (word, first token) from which that is impossible
    n, at = 0, 0
    while n < count:
        end = next_end(words[n], n == count - 1, tokens, at, choice, n, unknown, index, begin, spelled, beginning)
        if end >= 0 and not dead[n + 1, end]:
            ends[n] = at = end
            n += 1
            choice[n] = 0
        elif end < 0:
            dead[n, at] = True
            if n == 0:
                return False
            n -= 1
            at = ends[n - 1] if n > 0 else 0
    return True


@inlined
def _is_in(values, value):
    found = False
    for v in values:
        found = found or v == value
    return found


@inlined
def next_end(word, is_last, tokens, at, choice, n, unknown, index, begin, spelled, beginning):
    """The next end to be tried for word n, -1 if there is none; counts choice[n] up."""
    size = len(tokens)
    if word == unknown and unknown != 0:
        end = at + 1
        while end < size and not _is_in(beginning, tokens[end]):
            end += 1
        choice[n] += 1  # the longest first, in case that a word of the lexicon begins like no word
        end -= choice[n] - 1
        return end if at < end <= size else -1
    while index[word] + choice[n] < index[word + 1]:
        entry = index[word] + choice[n]
        choice[n] += 1
        length = begin[entry + 1] - begin[entry]
        compared = min(length, size - at)
        if compared == length or is_last:
            same = True
            for k in range(compared):
                same = same and tokens[at + k] == spelled[begin[entry] + k]
            if same:
                return at + compared
    return -1
