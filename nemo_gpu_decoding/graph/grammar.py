"""From a word LM in ARPA format to the grammar transducer G of a word graph.

    state     a context of the LM that has n-grams of its own
    arc       word:word, cost -log p(word | context), to the longest suffix that is a context
    back-off  #0:epsilon, cost -log of the back-off weight, to the next shorter context

The back-off label is a symbol of its own, as in Kaldi: determinization then treats it as a real one.
A context that does nothing but back off is left out and its back-off weight put on the arcs that led to
it. (arpa2fst of Kaldi does so too, kaldilm does not: 197k states instead of 52k for one LM.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from os import PathLike

import numpy as np

from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton, arcs_by_state
from nemo_gpu_decoding.fusion.ngram_automaton import NOT_FINAL, SENTENCE_END, SENTENCE_START, build_ngram_automaton
from nemo_gpu_decoding.graph.openfst import Fst
from nemo_gpu_decoding.lm.arpa import UNKNOWN_WORDS, read_arpa

SPECIAL_WORDS = {
    "<s>": SENTENCE_START, "<S>": SENTENCE_START, "</s>": SENTENCE_END, "</S>": SENTENCE_END,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Grammar:
    """A word LM as back-off automaton; word `words[i]` has the label i there."""

    words: tuple[str, ...]  # all but <s> and </s>; the LM's <unk>, if there is one, among them
    automaton: BackoffAutomaton
    counts: tuple[int, ...]  # n-grams of order 1, 2, ..., added words among them
    name: str
    num_added: int = 0  # words that the file does not list

    @property
    def num_ngrams(self) -> int:
        return sum(self.counts)

    @property
    def unknown(self) -> int | None:
        """The label of <unk>, if the LM has one."""
        return next((self.words.index(w) for w in UNKNOWN_WORDS if w in self.words), None)


def read_grammar(path: str | PathLike[str], added: Iterable[str] = ()) -> Grammar:
    """The grammar of an ARPA file.

    Args:
        added: words that the LM shall list too, see `lm/arpa.py`.

    Raises:
        ValueError: no well-formed ARPA file, or one without words.
        OSError: the file cannot be read.
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
    """G of the words that may be spoken.

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
    """The state to go to in place of each state, and the back-off weight to pay for that.

    A state is redundant if it has no arc of its own and ends no differently than its suffix does. The
    start state stays: what it pays could be put on no arc.
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
