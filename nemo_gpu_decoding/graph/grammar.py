"""Build the grammar transducer G of a word graph from a word LM in ARPA format.

    state     a context of the LM with n-grams
    arc       word:word, cost -log p(word | context), to the longest suffix that is a context
    back-off  #0:epsilon, cost -log of the back-off weight, to the next shorter context

The back-off label is a separate symbol, as in Kaldi, so that determinization does not treat it as epsilon.
A context with only a back-off arc is removed; the arcs that led to it get its back-off weight. Kaldi's
arpa2fst does the same. kaldilm keeps such contexts: for one LM it makes 197k states instead of 52k.

**Exact back-off.** In G, back-off is an arc that every path may take. A listed n-gram that is less likely than its
back-off estimate is then never used: the path backs off. Interpolated LMs, such as those of KenLM's lmplz, have no
such n-grams; other LMs may have some. For a state with such n-grams, `with_exact_backoff` lets back-off lead to a copy
of the shorter context without the n-grams' last words.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from os import PathLike

import numpy as np

from nemo_gpu_decoding.fusion.automaton import AutomatonArrays, BackoffAutomaton, Columns, SortedArcs, arcs_by_state
from nemo_gpu_decoding.fusion.ngram import NOT_FINAL, SENTENCE_END, SENTENCE_START, build_ngram_automaton
from nemo_gpu_decoding.graph.openfst import Fst
from nemo_gpu_decoding.lm.arpa import UNKNOWN_WORDS, read_arpa
from nemo_gpu_decoding.lm.packed import ROOT

SPECIAL_WORDS = dict.fromkeys(("<s>", "<S>"), SENTENCE_START) | dict.fromkeys(("</s>", "</S>"), SENTENCE_END)


@dataclass(frozen=True, eq=False)
class Grammar:
    """A word LM that is a back-off automaton; the label i is the word `words[i]`."""

    words: tuple[str, ...]  # all words except <s> and </s>, including <unk> if the LM has it
    automaton: BackoffAutomaton
    counts: tuple[int, ...]  # n-grams of order 1, 2, ..., including added words
    name: str
    num_added: int = 0  # words that the file does not list

    @property
    def num_ngrams(self) -> int:
        return sum(self.counts)

    @property
    def unknown(self) -> int | None:
        """Return the LM's label of <unk>, or None if the LM has no <unk>."""
        return next((self.words.index(w) for w in UNKNOWN_WORDS if w in self.words), None)

    @property
    def cost_of_added_word(self) -> float:
        """Return the 1-gram cost of a word that the file does not list (`lm/arpa.py`), natural log."""
        states, arcs = self.automaton.arrays
        root = states[ROOT]
        one_grams = arcs[root["arc_begin"] : root["arc_end"]]
        unknown = one_grams["weight"][one_grams["label"] == (-1 if self.unknown is None else self.unknown)]
        if len(unknown) == 0 or not unknown[0] > NOT_FINAL:
            weights = np.append(one_grams["weight"], root["final_weight"])
            unknown = weights[weights > NOT_FINAL]
        return -float(np.min(unknown, initial=0.0))

    def without_boundaries(self) -> Grammar:
        """Return a copy of the LM that begins in the empty context, and may end in any state at no cost."""
        states, arcs = self.automaton.arrays
        anywhere = states.copy()
        anywhere["final_weight"] = 0.0
        arrays = AutomatonArrays(anywhere, arcs)
        return replace(self, automaton=replace(self.automaton, arrays=arrays, start_state=ROOT))


def read_grammar(path: str | PathLike[str], added: Iterable[str] = ()) -> Grammar:
    """Return the grammar of an ARPA file.

    Args:
        added: words to add to the LM, see `lm/arpa.py`.
    """
    arpa, name = read_arpa(path, added), str(path)
    words = tuple(symbol for symbol in arpa.symbols if symbol not in SPECIAL_WORDS)
    if not words:
        raise ValueError(f"{name} lists no words, expected an n-gram LM over words")
    index = {word: label for label, word in enumerate(words)} | SPECIAL_WORDS
    labels = np.array([index[symbol] for symbol in arpa.symbols], np.int64)
    orders = [replace(block, symbols=labels[block.symbols]) for block in arpa.orders]
    automaton = build_ngram_automaton(orders, len(words), normalize_unk=False, name=name)
    counts = tuple(len(block.symbols) for block in arpa.orders)
    return Grammar(words, automaton, counts, name, len(arpa.added))


def grammar_fst(grammar: Grammar, outputs: np.ndarray, backoff_label: int) -> Fst:
    """Build G, restricted to words with an output label.

    Args:
        outputs: [number of words] label of each word in the FST; 0 leaves the word out.
        backoff_label: label of #0.
    """
    states = grammar.automaton.arrays.states
    sources, arcs = arcs_by_state(*grammar.automaton.arrays)
    spoken = (outputs[arcs["label"]] > 0) & np.isfinite(arcs["weight"])
    sources, arcs = sources[spoken], arcs[spoken]
    start = grammar.automaton.start_state
    goes_to, paid = _without_redundant(states, sources, start)
    kept = goes_to == np.arange(len(states))
    number = np.cumsum(kept) - 1
    backing_off = np.flatnonzero(kept & (states["backoff_to"] != np.arange(len(states))))
    suffix = states["backoff_to"][backing_off]
    backoff_weights = states["backoff_weight"][backing_off] + paid[suffix]
    words = outputs[arcs["label"]]
    final = states["final_weight"][kept].astype(np.float64)
    return Fst.from_arcs(
        int(number[goes_to[start]]),
        np.where(final > NOT_FINAL, -final, np.inf),
        np.append(number[sources], number[backing_off]),
        np.append(words, np.full(len(backing_off), backoff_label)),
        np.append(words, np.zeros(len(backing_off), np.int64)),
        np.append(-(arcs["weight"] + paid[arcs["target"]]), -backoff_weights),
        np.append(number[goes_to[arcs["target"]]], number[goes_to[suffix]]),
    )


def _without_redundant(states: np.ndarray, sources: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the state that replaces each state, and the back-off weight between them.

    A state is redundant if it has no arcs and backing off gives the same final weight. The start state stays, because
    no arc could take its back-off weight.
    """
    numbers = np.arange(len(states))
    suffix, final = states["backoff_to"], states["final_weight"]
    backed_off = states["backoff_weight"] + final[suffix]
    same_end = np.isclose(final, backed_off, rtol=1e-6) | (np.maximum(final, final[suffix]) <= NOT_FINAL)
    redundant = (np.bincount(sources, minlength=len(states)) == 0) & (suffix != numbers) & same_end
    redundant[start] = False
    goes_to, paid = numbers.copy(), np.zeros(len(states), np.float32)
    pending = numbers[redundant]
    while len(pending):
        paid[pending] += states["backoff_weight"][goes_to[pending]]
        goes_to[pending] = suffix[goes_to[pending]]
        pending = pending[redundant[goes_to[pending]]]
    return goes_to, paid


# ------------------------------------------------------------------------------------ exact back-off


logger = logging.getLogger("nemo_gpu_decoding")

END = -1  # stands for </s> among words
TOLERANCE = 1e-3  # natural log; a smaller difference is rounding
MOST_COPIED = 2_000_000  # arcs


def with_exact_backoff(automaton: BackoffAutomaton) -> BackoffAutomaton:
    """Return the LM with copies of contexts, in which no listed word gets a higher probability by backing off.

    If the copies would have too many arcs, the LM is returned unchanged, with a warning.
    """
    table = SortedArcs(*automaton.arrays)
    worse = _worse_than_backoff(automaton.arrays.states, table)
    if not worse:
        return automaton
    copies = _Copies(automaton, table, worse)
    for state in worse:
        copies.backoff_to[state] = copies.copied(copies.backoff_to[state], worse[state])
        if copies.num_arcs > MOST_COPIED:
            logger.warning(
                "%s: %d contexts have words that are less likely than by back-off; back-off stays possible for these "
                "words, as in Kaldi, because exact back-off would need more than %d more arcs",
                automaton.name, len(worse), MOST_COPIED,
            )  # fmt: skip
            return automaton
    return copies.finish()


def _worse_than_backoff(states: np.ndarray, table: SortedArcs) -> dict[int, set[int]]:
    """Return for each state the words (and END) whose n-gram is less likely than its back-off estimate."""
    sources, arcs = table.sources, table.arcs
    suffix, backoff = states["backoff_to"], states["backoff_weight"].astype(np.float64)
    pending = np.flatnonzero(suffix[sources] != sources)
    at, estimate = suffix[sources[pending]], backoff[sources[pending]]
    worse: dict[int, set[int]] = {}
    while len(pending):
        places, listed = table.find(at, arcs["label"][pending])
        estimates = estimate + arcs["weight"][places]
        for arc in pending[listed & (arcs["weight"][pending] < estimates - TOLERANCE)].tolist():
            worse.setdefault(int(sources[arc]), set()).add(int(arcs["label"][arc]))
        pending, at, estimate = pending[~listed], at[~listed], estimate[~listed]
        estimate, at = estimate + backoff[at], suffix[at]
    final = states["final_weight"].astype(np.float64)
    ends = np.maximum(final, NOT_FINAL) < backoff + final[suffix] - TOLERANCE
    for state in np.flatnonzero(ends & (suffix != np.arange(len(suffix))) & (final[suffix] > NOT_FINAL)).tolist():
        worse.setdefault(state, set()).add(END)
    return worse


class _Copies:
    """The columns of an LM that grows by copies of its states."""

    def __init__(self, automaton: BackoffAutomaton, table: SortedArcs, worse: dict[int, set[int]]) -> None:
        self.automaton, self.table, self.worse = automaton, table, worse
        states = automaton.arrays.states
        self.backoff_to = states["backoff_to"].tolist()
        self.backoff_weights = states["backoff_weight"].tolist()
        self.final_weights = states["final_weight"].tolist()
        self.added: list[np.ndarray] = []  # arcs of each copy
        self.num_arcs = 0
        self._copy_of: dict[tuple[int, frozenset[int]], int] = {}

    def copied(self, state: int, without: set[int]) -> int:
        """Return the copy of a state that lacks these words."""
        key = state, frozenset(without)
        if key in self._copy_of:
            return self._copy_of[key]
        begin, count = self.table.begins[state], self.table.counts[state]
        arcs = self.table.arcs[begin : begin + count]
        number = self._copy_of[key] = len(self.backoff_to)
        kept = arcs[~np.isin(arcs["label"], list(without))]
        self.added.append(kept)
        self.num_arcs += len(kept)
        suffix = int(self.automaton.arrays.states["backoff_to"][state])
        self.final_weights.append(NOT_FINAL if END in without else self.final_weights[state])
        if suffix == state:  # no back-off: a word that is left out is impossible
            self.backoff_to.append(number)
            self.backoff_weights.append(-np.inf)
        else:
            self.backoff_to.append(suffix)
            self.backoff_weights.append(self.backoff_weights[state])
            self.backoff_to[number] = self.copied(suffix, without | self.worse.get(state, set()))
        return number

    def finish(self) -> BackoffAutomaton:
        arcs = np.concatenate([self.table.arcs, *self.added])
        counts = [*self.table.counts, *map(len, self.added)]
        of_states = map(np.array, (self.backoff_to, self.backoff_weights, self.final_weights))
        columns = Columns.grouped(counts, *of_states, arcs["label"], arcs["weight"], arcs["target"])
        automaton = self.automaton
        return BackoffAutomaton.from_columns(columns, automaton.vocab_size, automaton.start_state, automaton.name)
