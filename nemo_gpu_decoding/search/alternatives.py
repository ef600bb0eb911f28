"""Word alternatives: the confusion network of an utterance, from an n-best list or a lattice.

The network has a place for each word of the best path, and a place between two words where other hypotheses insert
one. The posteriors of a place sum to 1.

Hypotheses are aligned to the best path with the fewest word errors. A determinised lattice may hold billions of texts,
so alignment goes from state to state [Xu, Povey, Mangu & Zhu 2011]. e(s, q) is the expected number of errors between
the texts that lead to state s and the first q words. It is the mean, over the arcs to s, of the least number of errors
after each arc. Texts that lead to the same state share one alignment.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.search.result import Path, Place, WordOption
from nemo_gpu_decoding.search.word_graph.lattice.determinize import WORD_ARC
from nemo_gpu_decoding.search.word_graph.lattice.word_lattice import WordLattice
from nemo_gpu_decoding.search.word_graph.result import WordPath
from nemo_gpu_decoding.vocabulary import Vocabulary

LEAST_POSTERIOR = 1e-3  # of an alternative


def word_alternatives(
    paths: Sequence[Any], vocabulary: Vocabulary, lattice: WordLattice | None = None
) -> tuple[Place, ...]:
    """The confusion network of an utterance.

    Args:
        paths: the n-best list, of `Path` or `WordPath`; the first path is the transcript.
        vocabulary: spells the words of token paths.
        lattice: of all hypotheses, in place of the n-best list.
    """
    texts = [timed_words(path, vocabulary) for path in (paths if lattice is None else paths[:1])]
    if lattice is None:
        words = ["", *dict.fromkeys(word.text for text in texts for word in text)]
        ids = {word: n for n, word in enumerate(words)}
        arcs, costs, times, num_states = _chains(texts, [path.score for path in paths], ids)
    else:
        labels = np.unique(np.append(lattice.arcs["word"], 0))
        spoken = {word.label: word.text for word in paths[0].words}  # <unk> with its spelling
        words = [spoken.get(label, lattice.words[label]) if label else "" for label in labels.tolist()]
        ids = {word: n for n, word in enumerate(words)}
        arcs, costs, num_states = lattice.arcs.copy(), lattice.costs, lattice.num_states
        arcs["word"] = np.searchsorted(labels, arcs["word"])
        times = lattice.state_frames[np.stack([arcs["source"], arcs["target"]])].astype(np.float64)
    best = np.array([ids.get(word.text, -1) for word in texts[0]], np.int64)
    masses = np.zeros((2 * len(best) + 1, len(words), 3))
    align_lattice(arcs, costs, num_states, best, times, masses)
    return tuple(_places(masses, words, texts[0], [int(n) for n in best]))


def _chains(
    texts: Sequence[Sequence[TimedWord]], scores: Sequence[float], ids: dict[str, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Texts as a lattice: arcs [A] WORD_ARC by source, costs [A], first and end frames [2, A], number of states."""
    rows, state = [], 1
    last = 1 + sum(max(0, len(text) - 1) for text in texts)
    for text, score in zip(texts, scores, strict=True):
        source = 0
        for n, word in enumerate(text or [TimedWord("", 0, 0)]):
            target = state if n + 1 < len(text) else last
            rows.append((source, target, ids[word.text], 0.0 if source else -score, word.start, word.end))
            source, state = target, state + (target == state)
    rows.sort(key=lambda row: row[0])
    arcs = np.zeros(len(rows), WORD_ARC)
    columns = list(zip(*rows, strict=True))
    for name, values in zip(("source", "target", "word"), columns, strict=False):
        arcs[name] = values
    return arcs, np.array(columns[3], np.float64), np.array(columns[4:], np.float64), last + 1


def _places(masses: np.ndarray, words: Sequence[str], best: Sequence[TimedWord], ids: Sequence[int]) -> list[Place]:
    """The places of the masses that `align_lattice` computes."""
    places = []
    for row, mass in enumerate(masses):
        index = row // 2 if row % 2 else None
        posteriors = mass[:, 0] / max(1.0, mass[:, 0].sum())
        posteriors[0] = max(0.0, 1 - posteriors.sum())
        order = np.argsort(-posteriors, kind="stable").tolist()
        word_of_best = 0 if index is None else ids[index]  # the transcript is always in the network
        kept = [n for n in order if posteriors[n] >= LEAST_POSTERIOR or n == word_of_best]
        if index is None and kept == [0]:
            continue
        if index is not None:
            start, end = float(best[index].start), float(best[index].end)
        else:
            start, end = (mass[:, 1:].sum(axis=0) / mass[:, 0].sum()).tolist()
        options = tuple(WordOption(words[n], round(float(posteriors[n]), 4)) for n in kept)
        places.append(Place(index, start, end, options))
    return places


@compiled
def align_lattice(arcs, costs, num_states, text, times, masses):
    """Align the texts of a lattice with a text, and sum up the posteriors of the words in each place.

    Args:
        arcs: [A] WORD_ARC, sorted by source.
        costs: [A] float64, cost of each arc, natural log.
        num_states: number of states of the lattice.
        text: [Q] int64, the words of the text.
        times: [2, A] float64, first and end frame of each arc.
        masses: [2 Q + 1, W, 3] float64, zeros, filled: the posterior of each word in a place, and its products with
            the first and the end frame. Row 2 q + 1: words aligned with word q; row 2 q: words inserted before it.
    """
    size = len(text) + 1
    reached, shares = np.full(num_states, -np.inf), np.empty(len(arcs))
    reached[0] = 0.0
    for i in range(len(arcs)):
        reached[arcs[i].target] = np.logaddexp(reached[arcs[i].target], reached[arcs[i].source] - costs[i])
    errors, row = np.zeros((num_states, size)), np.empty(size)
    errors[0] = np.arange(size)
    for i in range(len(arcs)):
        shares[i] = np.exp(reached[arcs[i].source] - costs[i] - reached[arcs[i].target])
        _errors_after(errors[arcs[i].source], arcs[i].word, text, row)
        errors[arcs[i].target] += shares[i] * row
    mass = np.zeros((num_states, size))  # [s, q]: posterior of the alignment of state s with the first q words
    mass[num_states - 1, size - 1] = 1.0
    for i in range(len(arcs) - 1, -1, -1):
        before, word, here = errors[arcs[i].source], arcs[i].word, mass[arcs[i].source]
        _errors_after(before, word, text, row)
        rest = shares[i] * mass[arcs[i].target]
        for q in range(size - 1, -1, -1):
            if word == 0:
                here[q] += rest[q]
            elif q > 0 and row[q] == before[q - 1] + (word != text[q - 1]):
                here[q - 1] += rest[q]
                _count(masses[2 * q - 1, word], rest[q], times[:, i])
            elif q > 0 and row[q] == row[q - 1] + 1:
                rest[q - 1] += rest[q]
            else:
                here[q] += rest[q]
                _count(masses[2 * q, word], rest[q], times[:, i])


@compiled
def _errors_after(before, word, text, row):
    """Fill row [Q + 1]: expected errors against the first q words after an arc; `before` [Q + 1]: before the arc."""
    if word == 0:
        row[:] = before
        return
    row[0] = before[0] + 1
    for q in range(1, len(row)):
        row[q] = min(before[q - 1] + (word != text[q - 1]), row[q - 1] + 1, before[q] + 1)


@compiled
def _count(cell, mass, times):
    """Add a word's mass to its cell of `masses`; times [2]: its first and end frame."""
    cell[0] += mass
    cell[1] += mass * times[0]
    cell[2] += mass * times[1]


class TimedWord(NamedTuple):
    """A word with its first frame and its end frame."""

    text: str
    start: int
    end: int


def timed_words(path: Path, vocabulary: Vocabulary) -> list[TimedWord]:
    """The words of a path."""
    if isinstance(path, WordPath):
        return [TimedWord(word.text, word.start_frame, word.end_frame) for word in path.words]
    frames, repeats = path.frames.tolist(), path.repeats.tolist()
    spans = vocabulary.words(path.tokens.tolist())
    words = []
    for span in spans:
        tokens = range(span.end_token - 1, span.first_token - 1, -1)
        # as in NeMo's timestamps, punctuation does not extend a word
        last = next((n for n in tokens if not _is_punctuation(vocabulary.text([path.tokens[n]]))), tokens[0])
        words.append(TimedWord(span.text, frames[span.first_token], frames[last] + repeats[last]))
    return words


def _is_punctuation(text: str) -> bool:
    return all(unicodedata.category(character)[0] in "PZ" for character in text)
