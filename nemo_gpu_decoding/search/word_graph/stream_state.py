"""Define the state of a stream between two chunks, its models, and its committed words.

Committed words are those that all live hypotheses of a running stream share, traced back and scored once. A partial
result traces back only the back-pointers that are not committed. A commit ends at a word boundary that is the same in
every division of the tokens into spellings. Therefore a commit changes neither words nor tokens of results.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton
from nemo_gpu_decoding.fusion.batch import BatchFusion
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.search.committed import GrowingColumns, Head, common_ancestor, worth_committing
from nemo_gpu_decoding.search.engine import BadRow
from nemo_gpu_decoding.search.inputs import raise_bad_frame
from nemo_gpu_decoding.search.word_graph import keys, records, result
from nemo_gpu_decoding.search.word_graph.best_path import Steps, best_paths, count_back_pointers, final_difference
from nemo_gpu_decoding.search.word_graph.keys import BAD_FRAME, NONE
from nemo_gpu_decoding.search.word_graph.large_lm.scorer import LM_COUNTERS, LmScorer, difference_of_word
from nemo_gpu_decoding.search.word_graph.lattice.links import grown
from nemo_gpu_decoding.search.word_graph.result import BEFORE, Labels, next_end, words_of


@dataclass(frozen=True, eq=False)
class StreamModels:
    """The models and weights that one utterance uses."""

    params: records.SearchParams  # of the batch
    weights: records.StreamParams  # of the utterance
    graph: WordGraph
    boosting: BackoffAutomaton
    lm_scorer: LmScorer | None = None  # with a large LM
    pieces: Sequence[str] | None = None  # text of each token, to spell words that the graph reads as <unk>

    @cached_property
    def search(self) -> records.Search:
        """Return the inputs of compiled code, without the large LM."""
        return records.Search(self.params, self.weights, self.graph.arrays, self.graph.arc_index, self.boosting.arrays)

    @property
    def first_key(self) -> int:
        """Return the key of the first token, see `key_of`."""
        return (self.graph.start << 32) | (self.boosting.start_state << 16)

    @cached_property
    def first(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the first token of an utterance, and its counters."""
        tokens = np.zeros(1, records.TOKEN if self.lm_scorer is None else records.LM_TOKEN)
        counters = np.zeros(1, records.COUNTERS if self.lm_scorer is None else LM_COUNTERS)
        tokens["key"], tokens["back_pointer"], tokens["source"] = self.first_key, NONE, NONE
        counters["tokens"] = 1
        if self.lm_scorer is not None:
            tokens["lm"] = self.lm_scorer.lms.start
        return tokens, counters

    def new_stream(self) -> WordGraphStream:
        """Return a stream before its first frame: one token in the start states of graph, boosting and LMs."""
        tokens, counters = self.first
        links = np.empty(1024 if self.params.keeps_links else 0, records.LINK)
        past = np.empty(2048, records.BACK_POINTER)
        return WordGraphStream(self, tokens, past, links, counters, tokens["back_pointer"], Committed.nothing(self))


ModelsOf = Callable[[BatchFusion, int], StreamModels]  # the models of utterance b of a batch


def models_of_rows(models_of: ModelsOf, fusion: BatchFusion, rows: Sequence[int]) -> list[StreamModels]:
    """Return the models of some utterances; utterances with equal weights and trees share them."""
    columns = (fusion.lm_weights, fusion.boosting_weights, fusion.tree_of)
    options = list(zip(*(values.tolist() for values in columns), strict=True))
    options = [options[row] for row in rows]
    models = {option: models_of(fusion, row) for option, row in dict(zip(options, rows, strict=True)).items()}
    return [models[option] for option in options]


@dataclass(frozen=True, eq=False)
class WordGraphStream:
    """The state of an utterance after some frames. Entries below the counts in `counters` never change."""

    models: StreamModels
    tokens: np.ndarray  # [n] TOKEN
    back_pointers: np.ndarray  # [capacity] BACK_POINTER
    links: np.ndarray  # [capacity] LINK
    counters: np.ndarray  # [1] COUNTERS
    live: np.ndarray | None = None  # newest back-pointer, or NONE, of each live hypothesis; None: not known
    committed: Committed | None = None  # the path before the first back-pointer; None: this stream never commits
    device_numbers: np.ndarray | None = None  # numbers of the back-pointers on the device, if these are a part of them

    @property
    def frames(self) -> int:
        return int(self.counters["frames"][0])


def raise_stop(log_probs: np.ndarray, b: int, frame: int, status: int) -> None:
    """Raise the error of a frame of log_probs [n, T, V + 1] that has the status BAD_FRAME or NO_TOKEN."""
    row = log_probs[b, frame]
    if status == BAD_FRAME or not np.isfinite(row).any():
        raise_bad_frame(log_probs, b, frame)
    raise BadRow(
        b,
        f"log_probs[{b}, {frame}] makes every path through the graph impossible, expected a finite "
        "log-probability for the blank or for a label that the graph allows there",
    )


def grown_back_pointers(back_pointers: np.ndarray, counters: np.ndarray, tokens: np.ndarray, more: int) -> np.ndarray:
    """Drop the back-pointers that no token needs, and grow the array if it then has no capacity for `more`."""
    kept = np.empty(len(back_pointers), records.BACK_POINTER)
    size = compact_back_pointers(back_pointers, int(counters["back_pointers"][0]), tokens, kept)
    counters["back_pointers"] = size
    if 2 * size > len(back_pointers) or len(back_pointers) < 2 * more:
        return grown(kept, size, more)
    return kept


@compiled
def compact_back_pointers(back_pointers, count, tokens, kept):
    """Copy the back-pointers that tokens need to `kept`, in order, and update the tokens; return the number copied."""
    number = np.full(count, NONE, np.int32)
    for i in range(len(tokens)):
        if tokens[i].back_pointer >= 0:
            number[tokens[i].back_pointer] = 0
    for i in range(count - 1, -1, -1):
        if number[i] == 0 and back_pointers[i].previous >= 0:
            number[back_pointers[i].previous] = 0
    size = 0
    for i in range(count):
        if number[i] == 0:
            kept[size] = back_pointers[i]
            if back_pointers[i].previous >= 0:
                kept[size].previous = number[back_pointers[i].previous]
            number[i] = size
            size += 1
    for i in range(len(tokens)):
        if tokens[i].back_pointer >= 0:
            tokens[i].back_pointer = number[tokens[i].back_pointer]
    return size


# --------------------------------------------------------------------------------- committed words

FEWEST_BACK_POINTERS = 2048  # smallest capacity


class TextScores(NamedTuple):
    """The unweighted scores of a path up to some step, and the LM and boosting states after this step."""

    graph_cost: float
    difference: float  # sum of LM score differences; 0 without a large LM
    context: int  # LM context
    bonus: float  # sum of boosting bonuses
    boosting_state: int

    @classmethod
    def at_start(cls, models: StreamModels) -> TextScores:
        context = 0 if models.lm_scorer is None else models.lm_scorer.lms.start
        return cls(0.0, 0.0, context, 0.0, models.boosting.start_state)

    def after_words(self, words: Sequence[int], models: StreamModels) -> TextScores:
        """Return the scores after more words; the graph's costs are not added."""
        difference, context = self.difference, self.context
        if models.lm_scorer is not None:
            labels = np.array(words, np.int64)
            difference, context = add_differences(labels, difference, context, models.lm_scorer)
        return TextScores(self.graph_cost, difference, context, *self.boosted(words, models))

    def boosted(self, words: Sequence[int], models: StreamModels) -> tuple[float, int]:
        """Return the bonus and the boosting state after more words."""
        bonus, state = self.bonus, self.boosting_state
        for word in words if models.weights.boosts else ():
            weight, state = models.boosting.advance(state, word)
            bonus += weight
        return bonus, state


@dataclass(frozen=True, eq=False)
class Committed:
    """The committed words and tokens of a stream."""

    columns: GrowingColumns  # fields of `WordPath`
    head: Head | None  # the committed part of the columns; None: nothing is committed
    scores: TextScores  # at the end of the committed part
    words: int = 0  # committed words that the graph emits later: the first ones of the trace-back
    stop: int = 0  # end frame of the last committed token

    @classmethod
    def nothing(cls, models: StreamModels) -> Committed:
        return cls(GrowingColumns(), None, TextScores.at_start(models))

    @property
    def tokens(self) -> int:
        return 0 if self.head is None else len(self.head["tokens"])

    @property
    def before(self) -> tuple[int, int, int, float]:
        """Return the fields of BEFORE for a path that continues the committed words."""
        return self.words, self.tokens, self.stop, self.scores.graph_cost


def shared_steps(state: WordGraphStream) -> tuple[int, int]:
    """Return the newest back-pointer that all live hypotheses share, and the number of steps up to it."""
    assert state.live is not None
    common = common_ancestor(state.back_pointers["previous"], state.live)
    return common, count_back_pointers(state.back_pointers, common)


def more_committed(state: WordGraphStream) -> tuple[Committed, int] | None:
    """Commit the next words that all live hypotheses of a running stream share.

    Returns:
        The committed part, and the number of the new first back-pointer; None if too few words are shared.
    """
    old = state.committed
    if old is None or state.live is None:
        return None
    common, count = shared_steps(state)
    if not worth_committing(count):
        return None
    models, best = state.models, best_paths([state], final=False)
    steps, before_path = best.steps, np.array([old.before], BEFORE)
    read = result.read_paths(best, before_path, models.graph, models.params.blank_id)
    path_words = words_of(read, before_path, models.graph, models.pieces)
    emitted_before, kinds = old.words, Labels.of(models.graph, models.params.blank_id)
    tokens, (labels, emitted_at) = result.emitted_words(steps, models.graph.arrays, kinds)
    is_token = models.graph.arrays.arcs["ilabel"][steps.arcs[:count]] != models.params.blank_id
    before = np.cumsum(is_token) - is_token  # tokens before each step; the token of the last step may become longer
    known = int((emitted_at < before[-1] + is_token[-1]).sum())  # words that these steps emit
    new = slice(emitted_before, known)
    n, size = _last_boundary(labels[new], emitted_at[new], tokens[: before[-1]], models.graph)
    first, later = int(np.searchsorted(before, size)), emitted_before + n - int((emitted_at < size).sum())
    if n == 0 or later < 0 or path_words[n - 1].end_token != old.tokens + size or not worth_committing(first):
        return None
    columns = dict(zip(("tokens", "frames", "repeats"), read.tokens[:, :size], strict=True))
    old.columns.extend({**columns, "token_confidence": read.confidence[:size], "words": path_words[:n]})
    emitted = result.emitted_labels(path_words[:n], read.tokens[0], models.graph, complete=True)
    scores = old.scores.after_words(emitted, models)
    taken = Steps(*(values[:first] for values in steps))
    scores = scores._replace(graph_cost=result.add_graph_costs(taken, models.graph.arrays, scores.graph_cost))
    stop = int(read.tokens[1, size - 1] + read.tokens[2, size - 1])
    root = common
    for _ in range(count - 1 - first):
        root = int(state.back_pointers["previous"][root])
    return Committed(old.columns, old.columns.head(), scores, later, stop), root


def without_committed(state: WordGraphStream, committed: Committed, root: int) -> WordGraphStream:
    """Return the stream without the back-pointers before `root`; both arguments are those of `more_committed`."""
    counters, tokens = state.counters.copy(), state.tokens.copy()
    kept = state.back_pointers[root : int(counters["back_pointers"][0])]
    back_pointers = np.empty(max(FEWEST_BACK_POINTERS, 2 * len(kept)), records.BACK_POINTER)
    back_pointers[: len(kept)] = kept
    previous = back_pointers["previous"][: len(kept)]
    np.maximum(previous - root, keys.NONE, out=previous)  # no token needs what is before root
    tokens["back_pointer"] -= root
    counters["back_pointers"] = len(kept)
    live = tokens["back_pointer"]
    return replace(
        state, tokens=tokens, back_pointers=back_pointers, counters=counters, live=live, committed=committed
    )


def _last_boundary(words: np.ndarray, emitted_at: np.ndarray, tokens: np.ndarray, graph: WordGraph) -> tuple[int, int]:
    """Return the last word boundary that no later token can move.

    Returns:
        the numbers of words and of tokens before it; 0, 0 if there is none.
    """
    if graph.spellings is None:  # the tokens of a word end where the graph emits the next word
        n = int(np.flatnonzero(np.diff(emitted_at, prepend=0) > 0).max(initial=0))
        return (n, int(emitted_at[n])) if n else (0, 0)
    return last_sure_end(words, tokens, graph.unknown, graph.spelling_index, graph.spellings)


@compiled
def last_sure_end(words, tokens, unknown, index, spellings):
    """Find the last word that ends at the same token in every division of the tokens (see `find_spans`).

    The function tracks all possible ends of each word, and stops where a word may end beyond the tokens.

    Returns:
        the number of words up to it, and of their tokens; 0, 0 if there is none.
    """
    is_end, choice = np.zeros((2, len(tokens) + 1), np.bool_), np.zeros(1, np.int64)
    is_end[0, 0], first, last, sure, size = True, 0, 0, 0, 0
    for n in range(len(words)):
        ends, next_ends = is_end[n % 2], is_end[(n + 1) % 2]
        low, high = len(tokens), 0
        next_ends[:] = False
        for at in range(first, last + 1):
            choice[0] = 0
            while ends[at]:
                end = next_end(words[n], True, tokens, at, choice, 0, unknown, index, spellings)
                if end == len(tokens):
                    return sure, size
                if end < 0:
                    break
                next_ends[end], low, high = True, min(low, end), max(high, end)
        if low > high:
            return sure, size
        first, last = low, high
        if low == high:
            sure, size = n + 1, low
    return sure, size


@compiled
def add_differences(words, total, context, lm):
    """Add the unweighted LM score differences of words [N] int64 to a total; return it and the last LM context."""
    for word in words:
        cost, context = difference_of_word(word, context, lm.lms)
        total += cost
    return total, context


def weighted_differences(
    texts: Sequence[Sequence[int]], starts: Sequence[TextScores], ended: Sequence[bool], models: Sequence[StreamModels]
) -> list[float]:
    """Return the weighted LM score difference of each text, </s> included where `ended`, or 0 without a large LM."""
    differences, alike = [0.0] * len(texts), defaultdict(list)
    for n, models_of_text in enumerate(models):  # a call takes as long for one text as for all texts of a batch
        if models_of_text.lm_scorer is not None:
            alike[id(models_of_text.lm_scorer)].append(n)
    for rows in alike.values():
        words = np.array([word for row in rows for word in texts[row]], np.int64)
        ends, totals = np.cumsum([len(texts[row]) for row in rows]), np.array([starts[row].difference for row in rows])
        before = np.array([starts[row].context for row in rows]), np.array([ended[row] for row in rows])
        _add_weighted(words, ends, *before, models[rows[0]].lm_scorer, totals)
        for row, total in zip(rows, totals.tolist(), strict=True):
            differences[row] = total
    return differences


@compiled
def _add_weighted(words, ends, contexts, ended, lm, totals):
    """Add the differences of the words of each text to `totals`, and weight the sums."""
    first = 0
    for n in range(len(ends)):
        total, context = add_differences(words[first : ends[n]], totals[n], contexts[n], lm)
        first, totals[n] = ends[n], 0.0
        if lm.difference_weight != 0:  # 0 * inf would be NaN
            totals[n] = total * lm.difference_weight
            if ended[n]:
                totals[n] += final_difference(context, lm)
