"""Make results of word-graph searches: read words from paths, compute posteriors, and minimise Bayes risk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import NamedTuple, TypeVar

import numpy as np

from nemo_gpu_decoding.graph.csr import Spellings, WordGraph, count_words, word_from_end
from nemo_gpu_decoding.jit import compiled, linked, no_refcount, read_only
from nemo_gpu_decoding.search.result import Path
from nemo_gpu_decoding.search.word_graph import keys
from nemo_gpu_decoding.search.word_graph.best_path import FoundPaths, Steps
from nemo_gpu_decoding.words import joined

W = TypeVar("W", bound="WordPath")


class GraphWord(NamedTuple):
    """A word of a path. Frames count from the start of the stream."""

    text: str
    label: int  # index in the graph's words
    start_frame: int  # first frame of its first token
    end_frame: int  # one past the last frame of its last token
    first_token: int  # index of its first token in the path
    end_token: int  # one past the index of its last token
    posterior: float | None = None  # over the n-best texts, in [0, 1]; None if alternatives are not kept


@dataclass(frozen=True)
class WordPath(Path):
    """A `Path` whose words come from a graph. `score` includes the graph's costs (`parts.lm`)."""

    words: tuple[GraphWord, ...] = ()

    @property
    def text(self) -> str:
        return joined([word.text for word in self.words])

    def after(self: W, n: int) -> W:
        words = tuple(word for word in self.words if word.end_token > n or word.first_token >= n)
        return replace(super().after(n), words=words)


# The committed part of a stream before a path
BEFORE = np.dtype(
    [
        ("words", np.int64),  # committed words that the graph emits on the path
        ("tokens", np.int64),  # committed tokens
        ("stop", np.int64),  # end frame of the last committed token
        ("graph_cost", np.float64),
    ]
)
# The integer fields of `GraphWord`
SPAN = np.dtype([(name, np.int32) for name in ("label", "start_frame", "end_frame", "first_token", "end_token")])
# The ends of a path in the tokens and words of all paths, and its cost in the graph
READ_PATH = np.dtype([("tokens", np.int64), ("words", np.int64), ("graph_cost", np.float64)])
NO_SPELLINGS = Spellings(*(read_only(np.zeros(size, np.int32)) for size in (0, 1, 0, 0)))


class Labels(NamedTuple):
    """A table that gives the words of a graph's output labels."""

    blank_id: int
    num_words: int  # olabels from here on are word-sequence labels
    num_spoken: int  # words from here on are piece labels
    unknown: int  # the label of <unk>; 0: there is none
    are_spelled: bool  # the graph has the spellings of its words

    @classmethod
    def of(cls, graph: WordGraph, blank_id: int) -> Labels:
        return cls(blank_id, len(graph.words), graph.num_spoken, graph.unknown, graph.spellings is not None)


class ReadPaths(NamedTuple):
    """The tokens and words of P paths, one path after the other: N tokens and W words in total."""

    tokens: np.ndarray  # [3, N] int32: label, first frame, number of frames
    confidence: np.ndarray  # [N] float32
    words: np.ndarray  # [W] SPAN
    paths: np.ndarray  # [P] READ_PATH


def read_paths(found_paths: FoundPaths, before: np.ndarray, graph: WordGraph, blank_id: int) -> ReadPaths:
    """Return the tokens and words of P paths; `before` [P] BEFORE describes the committed part of each.

    If the graph has a lexicon, the tokens of each word are exact. A ready-made graph emits each word at some token;
    the word's tokens begin there, and end before the next word's.
    """
    spellings, labels = graph.spellings or NO_SPELLINGS, Labels.of(graph, blank_id)
    return ReadPaths(*_read_paths(found_paths, before, graph.arrays, spellings, graph.spelling_index, labels))


@compiled
def _read_paths(found_paths, before, graph, spellings, index, labels):
    steps, first, n, size = found_paths.steps, 0, 0, 0
    tokens, confidence = np.empty((3, len(steps.arcs)), np.int32), np.empty(len(steps.arcs), np.float32)
    most = _most_words(steps, graph, labels.num_words)
    for p in range(len(before)):
        most += count_words(_silent(found_paths.ends[p].epsilon, graph), graph, labels.num_words)
    words, paths, emitted = np.empty(most, SPAN), np.empty(len(before), READ_PATH), np.empty((2, most), np.int64)
    begins, ends = np.empty(most, np.int64), np.empty(most, np.int64)
    for p in range(len(before)):
        stop, end = found_paths.step_ends[p], found_paths.ends[p]
        steps_of_path = Steps(
            steps.arcs[first:stop], steps.epsilons[first:stop], steps.frames[first:stop], steps.runs[first:stop],
            steps.probabilities[first:stop],
        )  # fmt: skip
        count, emits = _split_steps(steps_of_path, end.epsilon, graph, labels, tokens[:, n:], confidence[n:], emitted)
        own_words = emitted[:, before[p].words : emits]
        w = own_words.shape[1]
        dead, choice = np.zeros(8 * (w + count) + 9, np.int64), np.zeros(w + 1, np.int64)
        tries = own_words, tokens[0, n : n + count], choice, dead
        _find_word_spans(tries, spellings, index, labels, begins[:w], ends[:w])
        _fill_words(words[size : size + w], own_words[0], begins, ends, tokens[:, n:], before[p])
        paths[p].graph_cost = _graph_cost(steps_of_path, end, found_paths.ended[p], graph, before[p].graph_cost)
        n, size, first = n + count, size + w, stop
        paths[p].tokens, paths[p].words = n, size
    return tokens[:, :n], confidence[:n], words[:size], paths


@linked
def _graph_cost(steps, end, ended, graph, total):
    """Add the graph's costs of a path and of its end to `total`."""
    total, state = add_graph_costs(steps, graph, total), end.state
    if end.epsilon != keys.NONE:
        total += np.float64(graph.epsilons[end.epsilon].cost)
        state = graph.epsilons[end.epsilon].target
    if ended:
        total += np.float64(graph.states[state].final_cost)
    return total


@no_refcount
def add_graph_costs(steps, graph, total):
    """Add the costs of the arcs and closure arcs of a path to `total`, float64."""
    for n in range(len(steps.arcs)):
        if steps.epsilons[n] >= 0:
            total += np.float64(graph.epsilons[steps.epsilons[n]].cost)
        total += np.float64(graph.arcs[steps.arcs[n]].cost)
    return total


@linked
def _most_words(steps, graph, num_words):
    """Return the number of words that the arcs and closure arcs of a path emit."""
    most = 0
    for n in range(len(steps.arcs)):
        most += count_words(_silent(steps.epsilons[n], graph), graph, num_words)
        most += count_words(graph.arcs[steps.arcs[n]].olabel, graph, num_words)
    return most


@compiled
def emitted_words(steps, graph, labels):
    """Return the tokens [n] int32 of a path, and its words [2, w] int64 as in `_split_steps`."""
    tokens, confidence = np.empty((3, len(steps.arcs)), np.int32), np.empty(len(steps.arcs), np.float32)
    words = np.empty((2, _most_words(steps, graph, labels.num_words)), np.int64)
    count, size = _split_steps(steps, keys.NONE, graph, labels, tokens, confidence, words)
    return tokens[0, :count], words[:, :size]


@linked
def _split_steps(steps, last_epsilon, graph, labels, tokens, confidence, words):
    """Split a path into tokens and words.

    Args:
        last_epsilon: closure arc at the end of the path, or NONE.
        tokens: output [3, at least the number of steps] int32: label, first frame, number of frames.
        confidence: output [at least the number of steps] float32.
        words: output [2, at least `_most_words`] int64: label; number of tokens before the arc that emits the word.

    Returns:
        the numbers of tokens and of words.
    """
    count, size = 0, 0
    for n in range(len(steps.arcs)):
        arc = graph.arcs[steps.arcs[n]]
        size = _add_words(_silent(steps.epsilons[n], graph), count, words, size, graph, labels)
        size = _add_words(arc.olabel, count, words, size, graph, labels)
        if arc.ilabel != labels.blank_id:  # a ready-made graph may emit a word with a blank
            tokens[0, count], tokens[1, count], tokens[2, count] = arc.ilabel, steps.frames[n], steps.runs[n]
            confidence[count] = min(np.float64(steps.probabilities[n]) / max(steps.runs[n], 1), 1.0)
            count += 1
    size = _add_words(_silent(last_epsilon, graph), count, words, size, graph, labels)
    return count, size


@linked
def _silent(epsilon, graph):
    """Return the output label of a closure arc, or 0 for NONE."""
    return graph.epsilons[epsilon].olabel if epsilon >= 0 else np.int32(0)


@linked
def _add_words(olabel, count, words, size, graph, labels):
    """Append the words of an output label to the `size` words in `words`; `count` tokens precede the new words."""
    for k in range(count_words(olabel, graph, labels.num_words) - 1, -1, -1):
        word = word_from_end(olabel, k, graph, labels.num_words)
        if 0 < word < labels.num_spoken:  # piece labels are no words
            words[0, size], words[1, size] = word, count
            size += 1
    return size


@linked
def _find_word_spans(tries, spellings, index, labels, begins, ends):
    """Fill begins and ends [w] with the first token of each word, and one past its last token."""
    is_spelled = labels.are_spelled and find_spans(tries, labels.unknown, index, spellings, ends)
    words, tokens, _, _ = tries
    for w in range(len(ends)):
        if is_spelled:
            begins[w] = ends[w - 1] if w > 0 else 0
        else:  # from the token that emits the word to the token that emits the next word
            begins[w] = words[1, w]
            ends[w] = words[1, w + 1] if w + 1 < len(ends) else len(tokens)


@linked
def _fill_words(words, labels, begins, ends, tokens, before):
    """Fill words [w] SPAN. A word without tokens starts and ends where the previous token ends."""
    for w in range(len(words)):
        word, begin, end = words[w], begins[w], ends[w]
        start = stop = before.stop if begin == 0 else np.int64(tokens[1, begin - 1] + tokens[2, begin - 1])
        if begin < end:
            start, stop = np.int64(tokens[1, begin]), np.int64(tokens[1, end - 1] + tokens[2, end - 1])
        word.label, word.start_frame, word.end_frame = labels[w], start, stop
        word.first_token, word.end_token = before.tokens + begin, before.tokens + end


def words_of(read: ReadPaths, before: np.ndarray, graph: WordGraph, pieces: Sequence[str] | None) -> list[GraphWord]:
    """Return the words of all paths, from `read_paths`; `pieces` spell the words that the graph reads as <unk>."""
    labels, *numbers = (read.words[name].tolist() for name in SPAN.names or ())  # faster than tuples of each word
    texts = [graph.words[label] for label in labels]
    if pieces is not None and graph.unknown:
        for w in np.flatnonzero(read.words["label"] == graph.unknown).tolist():
            p, span = int(np.searchsorted(read.paths["words"], w, side="right")), read.words[w]
            first = (int(read.paths["tokens"][p - 1]) if p else 0) - int(before["tokens"][p])
            tokens = read.tokens[0, first + span["first_token"] : first + span["end_token"]].tolist()
            if tokens:
                texts[w] = "".join(pieces[t] for t in tokens).replace("▁", "").replace("##", "").strip()
    return list(map(GraphWord._make, zip(texts, labels, *numbers, repeat(None), strict=False)))


def emitted_labels(words: Sequence[GraphWord], tokens: np.ndarray, graph: WordGraph, *, complete: bool) -> list[int]:
    """Return the labels of words as the search emits them: <unk> with its pieces, if the graph has labels for pieces.

    Args:
        words: the words of a path.
        tokens: [N] int32, of the path from the first word on.
        complete: whether the last word is complete.
    """
    pieces = graph.pieces
    if pieces is None or not words:
        return [word.label for word in words]
    labels, before = [], words[0].first_token
    for word in words:
        labels.append(word.label)
        if word.label == graph.unknown:
            spelled = tokens[word.first_token - before : word.end_token - before]
            labels += [*(pieces.first + spelled).tolist(), pieces.end]
    return labels if complete or labels[-1] != pieces.end else labels[:-1]


@linked
def find_spans(tries, unknown, index, spellings, ends):
    """Divide tokens among words, by backtracking: fill ends [w] with one past the last token of each word.

    The spellings of the words, one after the other, must equal the tokens. The last word may be incomplete, in a
    partial result. <unk> reads one token that may begin a word, then tokens that may not.

    Args:
        tries: words [2, w] int64, as in `_split_steps`; tokens [n] int32; [w + 1] int64, number of spellings of each
            word that were tried; a cache, int64, of pairs (word, first token) from which no division exists, as word *
            (n + 1) + first token + 1. A pair at another pair's place replaces it, so that memory grows with the
            length only.

    Returns:
        whether there is a division.
    """
    words, tokens, choice, dead = tries
    count, n, at = words.shape[1], 0, 0
    while n < count:
        end = next_end(words[0, n], n == count - 1, tokens, at, choice, n, unknown, index, spellings)
        pair = (n + 1) * (len(tokens) + 1) + end + 1
        if end >= 0 and dead[pair % len(dead)] != pair:
            ends[n] = at = end
            n += 1
            choice[n] = 0
        elif end < 0:
            pair = n * (len(tokens) + 1) + at + 1
            dead[pair % len(dead)] = pair
            if n == 0:
                return False
            n -= 1
            at = ends[n - 1] if n > 0 else 0
    return True


@linked
def _is_in(values, value):
    is_in = False
    for v in values:
        is_in = is_in or v == value
    return is_in


@linked
def next_end(word, is_last, tokens, at, choice, n, unknown, index, spellings):
    """Return the next end to try for word n, or -1 if there is none. Increments choice[n]."""
    size, begin, spelled = len(tokens), spellings.begin, spellings.tokens
    if word == unknown and unknown != 0:
        end = at + 1
        while end < size and not _is_in(spellings.beginning, tokens[end]):
            end += 1
        choice[n] += 1  # the longest first; a word of the lexicon may begin with a token that `beginning` lacks
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


# ---------------------------------------------------------- word posteriors and minimum Bayes risk
#
# The posterior of a text is exp(score), normalised over the n-best list. The result of minimum Bayes risk (MBR) is the
# path with the least expected number of word errors. The posterior of a word is that of the texts that have
# it in the same place, by Levenshtein alignment.


def posteriors(scores: Sequence[float]) -> np.ndarray:
    """Return the softmax of scores: exp(scores), normalised to sum 1, [n] float64."""
    values = np.exp(np.asarray(scores, np.float64) - max(scores))
    return values / values.sum()


def with_posteriors(paths: Sequence[WordPath]) -> tuple[WordPath, ...]:
    """Add posteriors to the words of paths: the probability share of the paths with the same word at the place."""
    shares = posteriors([path.score for path in paths])
    texts = _texts(paths)
    rated = []
    for path, text in zip(paths, texts, strict=True):
        posterior = np.zeros(len(text))
        for share, other in zip(shares, texts, strict=True):
            posterior += share * matches(text, other)
        values = np.minimum(posterior, 1.0).tolist()
        words = tuple(GraphWord(*word[:-1], value) for word, value in zip(path.words, values, strict=True))
        rated.append(replace(path, words=words))
    return tuple(rated)


def minimum_bayes_risk(paths: Sequence[WordPath]) -> WordPath:
    """Return the path with the least expected number of word errors; of equal paths, the path with the best score.

    Raises:
        ValueError: paths is empty.
    """
    if not paths:
        raise ValueError("paths is empty, expected the n-best list of an utterance")
    shares, texts = posteriors([path.score for path in paths]), _texts(paths)
    risks = [
        sum(
            share * align(text, other, np.zeros(len(text), np.bool_))
            for share, other in zip(shares, texts, strict=True)
        )
        for text in texts
    ]
    best = min(range(len(paths)), key=lambda n: (round(risks[n], 9), -paths[n].score))
    return paths[best]


def _texts(paths: Sequence[WordPath]) -> list[np.ndarray]:
    return [np.array([word.label for word in path.words], np.int64) for path in paths]


def matches(text: Sequence[int] | np.ndarray, other: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return which words of `text` are aligned with the same word of `other`, [len(text)] bool."""
    matched = np.zeros(len(text), np.bool_)
    align(np.asarray(text, np.int64), np.asarray(other, np.int64), matched)
    return matched


@compiled
def align(text, other, matched):
    """Count word errors between two texts; sets `matched` for words of `text` aligned with the same word of `other`.

    An alignment with n errors is within n words of the diagonal. So a band around the diagonal is doubled until it
    contains the alignment. For similar texts, memory grows linearly with their length.
    """
    rows, columns, band = len(text) + 1, len(other) + 1, abs(len(text) - len(other)) + 8
    while True:
        distances = np.full((rows, 2 * band + 3), rows + columns, np.int64)  # of i and j at [i, j - i + band + 1]
        for i in range(rows):
            for j in range(max(0, i - band), min(columns, i + band + 1)):
                k = j - i + band + 1
                if i == 0 or j == 0:
                    distances[i, k] = i + j
                    continue
                replaced = distances[i - 1, k] + (text[i - 1] != other[j - 1])
                distances[i, k] = min(replaced, distances[i - 1, k + 1] + 1, distances[i, k - 1] + 1)
        errors = distances[rows - 1, columns - rows + band + 1]
        if errors <= band:
            break
        band *= 2
    i, j = rows - 1, columns - 1
    while i > 0 and j > 0:
        k, same = j - i + band + 1, text[i - 1] == other[j - 1]
        if distances[i, k] == distances[i - 1, k] + (not same):
            i, j = i - 1, j - 1
            matched[i] = same
        elif distances[i, k] == distances[i - 1, k + 1] + 1:
            i -= 1
        else:
            j -= 1
    return errors
