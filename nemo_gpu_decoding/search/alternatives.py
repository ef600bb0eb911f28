"""Find word alternatives: build an utterance's confusion network from an n-best list or a lattice.

The network has a place for each word of the best path, and a place between two words if other hypotheses insert a word
there. The posteriors of the words at a place sum to 1.

Each hypothesis is aligned with the best path so that word errors are fewest. A determinised lattice may hold billions
of texts, so alignment goes from state to state [Xu, Povey, Mangu & Zhu 2011]. e(s, q) is the expected number of errors
between the texts that lead to state s and the best path's first q words: the mean, over the arcs to s, of the least
number of errors after each arc. Texts that lead to the same state share one alignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.search.result import Path, Place, WordOption
from nemo_gpu_decoding.search.word_graph.lattice.determinize import WORD_ARC
from nemo_gpu_decoding.search.word_graph.lattice.word_lattice import WordLattice
from nemo_gpu_decoding.search.word_graph.result import WordPath
from nemo_gpu_decoding.vocabulary import Vocabulary

LEAST_POSTERIOR = 1e-3  # of an alternative
WINDOW = 64  # words of the best path that a word of another one is compared with at first
_FAR = 1e9  # errors of an alignment outside of the windows


def word_alternatives(
    paths: Sequence[Any], vocabulary: Vocabulary, lattice: WordLattice | None = None
) -> tuple[Place, ...]:
    """Return the confusion network of an utterance.

    Args:
        paths: the n-best list, of `Path` or `WordPath`; the first path is the transcript.
        vocabulary: gives the words of paths that have only tokens.
        lattice: all hypotheses; it is aligned instead of the n-best list.
    """
    texts = [timed_words(path, vocabulary) for path in (paths if lattice is None else paths[:1])]
    size = width = len(texts[0]) + 1
    if lattice is None:
        words = ["", *dict.fromkeys(word.text for text in texts for word in text)]
        ids = {word: n for n, word in enumerate(words)}
        arcs, costs, times, read = _chains(texts, [path.score for path in paths], ids)
        width = min(size, WINDOW)
    else:
        labels = np.unique(np.append(lattice.arcs["word"], 0))
        spoken = {word.label: word.text for word in paths[0].words}  # <unk> with its spelling
        words = [spoken.get(label, lattice.words[label]) if label else "" for label in labels.tolist()]
        ids = {word: n for n, word in enumerate(words)}
        arcs, costs, read = lattice.arcs.copy(), lattice.costs, np.zeros(lattice.num_states, np.int64)
        arcs["word"] = np.searchsorted(labels, arcs["word"])
        times = lattice.state_frames[np.stack([arcs["source"], arcs["target"]])].astype(np.float64)
    best = np.array([ids.get(word.text, -1) for word in texts[0]], np.int64)
    while True:
        begins = np.clip(read - width // 2, 0, size - width)
        cells, most_errors = align_lattice(arcs, costs, begins, width, best, times)
        if width == size or most_errors < width // 2:  # no better alignment leaves the windows
            return tuple(_places(cells, words, texts[0], best.tolist()))
        width = min(size, 4 * width)


def _chains(
    texts: Sequence[Sequence[TimedWord]], scores: Sequence[float], ids: dict[str, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return texts as a lattice: arcs [A] WORD_ARC by source, costs [A], first and end frames [2, A], and the number
    of words before each state [S]."""
    rows: list[tuple[float, ...]] = []
    read = [0, *(n for text in texts for n in range(1, len(text))), len(texts[0])]
    state, last = 1, len(read) - 1
    for text, score in zip(texts, scores, strict=True):
        source = 0
        for n, word in enumerate(text or [TimedWord("", 0, 0)]):
            target = state if n + 1 < len(text) else last
            rows.append((source, target, ids[word.text], 0.0 if source else -score, word.start, word.end))
            source, state = target, state + (target == state)
    columns = np.array(sorted(rows, key=itemgetter(0)), np.float64).T.copy()
    arcs = np.zeros(len(rows), WORD_ARC)
    arcs["source"], arcs["target"], arcs["word"] = columns[:3]
    return arcs, columns[3], columns[4:], np.array(read)


def _places(cells: Sequence[Any], words: Sequence[str], best: Sequence[TimedWord], ids: Sequence[int]) -> list[Place]:
    """Return the places of the confusion network from the cells that `align_lattice` returns."""
    masses: dict[int, dict[int, np.ndarray]] = {2 * n + 1: {word: np.zeros(3)} for n, word in enumerate(ids)}
    for row, word, mass, start, end in cells:
        masses.setdefault(row, {}).setdefault(word, np.zeros(3))[:] += mass, mass * start, mass * end
    places = []
    for row, of_words in sorted(masses.items()):
        index = row // 2 if row % 2 else None
        numbers = sorted({0, *of_words} - {-1})
        mass = np.array([of_words.get(n, np.zeros(3)) for n in numbers])
        posteriors = mass[:, 0] / max(1.0, mass[:, 0].sum())
        posteriors[0] = max(0.0, 1 - posteriors.sum())
        order = np.argsort(-posteriors, kind="stable").tolist()
        word_of_best = 0 if index is None else ids[index]  # the transcript is always in the network
        kept = [n for n in order if posteriors[n] >= LEAST_POSTERIOR or numbers[n] == word_of_best]
        if index is None and kept == [0]:
            continue
        if index is not None:
            start, end = float(best[index].start), float(best[index].end)
        else:
            start, end = (mass[:, 1:].sum(axis=0) / mass[:, 0].sum()).tolist()
        options = tuple(WordOption(words[numbers[n]], round(float(posteriors[n]), 4)) for n in kept)
        places.append(Place(index, start, end, options))
    return places


@compiled
def align_lattice(arcs, costs, begins, width, text, times):
    """Align the texts of a lattice with a text.

    Args:
        arcs: [A] WORD_ARC, sorted by source.
        costs: [A] float64, cost of each arc, natural log.
        begins: [S] int64, the least q of each state; a state is aligned with the first q .. q + width - 1 words.
        width: width of these windows; len(text) + 1 allows all alignments.
        text: [Q] int64, the words of the text.
        times: [2, A] float64, first and end frame of each arc.

    Returns:
        Cells (row, word, posterior, first frame, end frame), and the largest number of errors in a text. Row 2 q + 1:
        a word aligned with word q; row 2 q: a word inserted before it.
    """
    num_states, most_errors, cells = len(begins), 0.0, [(0, 0, 0.0, 0.0, 0.0)]
    cells.clear()
    reached, shares = np.full(num_states, -np.inf), np.empty(len(arcs))
    reached[0] = 0.0
    for i in range(len(arcs)):
        reached[arcs[i].target] = np.logaddexp(reached[arcs[i].target], reached[arcs[i].source] - costs[i])
    errors, row = np.zeros((num_states, width)), np.empty(width)
    errors[0] = np.arange(width)
    for i in range(len(arcs)):
        source, target = arcs[i].source, arcs[i].target
        shares[i] = np.exp(reached[source] - costs[i] - reached[target])
        _errors_after(errors[source], begins[target] - begins[source], arcs[i].word, text, begins[target], row)
        errors[target] += shares[i] * row
        if target == num_states - 1:
            most_errors = max(most_errors, row[width - 1])
    mass = np.zeros((num_states, width))  # [s, n]: posterior of the alignment of state s with begins[s] + n words
    mass[num_states - 1, width - 1] = 1.0
    for i in range(len(arcs) - 1, -1, -1):
        before, word, here, begin = errors[arcs[i].source], arcs[i].word, mass[arcs[i].source], begins[arcs[i].target]
        shift = begin - begins[arcs[i].source]
        _errors_after(before, shift, word, text, begin, row)
        rest = shares[i] * mass[arcs[i].target]
        for n in range(width - 1, -1, -1):
            q = begin + n
            if rest[n] == 0.0:
                continue
            if word == 0:
                here[n + shift] += rest[n]
            elif q > 0 and row[n] == _errors_at(before, n + shift - 1) + (word != text[q - 1]):
                here[n + shift - 1] += rest[n]
                cells.append((2 * q - 1, word, rest[n], times[0, i], times[1, i]))
            elif n > 0 and row[n] == row[n - 1] + 1:
                rest[n - 1] += rest[n]
            else:
                here[n + shift] += rest[n]
                cells.append((2 * q, word, rest[n], times[0, i], times[1, i]))
    return cells, most_errors


@compiled
def _errors_after(before, shift, word, text, begin, row):
    """Fill row [N]: expected errors, after an arc, against the first begin + n words.

    `before` [N] has the expected errors before the arc, against the first begin - shift + n words.
    """
    for n in range(len(row)):
        row[n] = _errors_at(before, n + shift) + (word != 0)
        if word != 0 and begin + n > 0:
            row[n] = min(_errors_at(before, n + shift - 1) + (word != text[begin + n - 1]), row[n])
            if n > 0:
                row[n] = min(row[n], row[n - 1] + 1)


@compiled
def _errors_at(errors, n):
    """Return an item of errors [N], or a large number outside of the window."""
    return errors[n] if 0 <= n < len(errors) else _FAR


class TimedWord(NamedTuple):
    """A word with its first frame and its end frame."""

    text: str
    start: int
    end: int


def timed_words(path: Path, vocabulary: Vocabulary) -> list[TimedWord]:
    """Return the words of a path with their frames."""
    if isinstance(path, WordPath):
        return [TimedWord(word.text, word.start_frame, word.end_frame) for word in path.words]
    frames, repeats = path.frames.tolist(), path.repeats.tolist()
    tokens = path.tokens.tolist()
    words = []
    for span in vocabulary.words(tokens):
        last = vocabulary.last_spoken(tokens, span)
        words.append(TimedWord(span.text, frames[span.first_token], frames[last] + repeats[last]))
    return words
