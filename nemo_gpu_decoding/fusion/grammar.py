"""Closed grammars: the sentences that an utterance may be, as an automaton over tokens.

A token path belongs to a sentence if its pieces spell the sentence, in any segmentation. Letter case and
punctuation do not matter, so that models that write them need no other grammar. The automaton has a state for each
place in the grammar's letters where a token may end:

    sentences "go", "go on"     tokens  ▁  ▁g  o  ▁go  ▁on  .
    state      0 (outside)   1 ""          2 "▁g"   3 "▁go" (a sentence)   4 "▁go▁"   5 "▁go▁on" (a sentence)
    arcs       all: 0        ▁g:2 ▁go:3    o:3      ▁:4 ▁on:5              ...        .:5

A token without an arc leads to state 0, which has no way back. With an infinite price it ends the hypothesis. With a
finite price each such token costs it, and an end inside a sentence costs it once. If no sentence fits an utterance,
its best hypothesis is outside. Costs are no bonuses: the automaton has the weight `PRICE_WEIGHT` (allowed.py).
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from nemo_gpu_decoding.cache import cached
from nemo_gpu_decoding.checks import FieldError, check_number
from nemo_gpu_decoding.fusion import jsgf
from nemo_gpu_decoding.fusion.allowed import PRICE_WEIGHT
from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton, Columns
from nemo_gpu_decoding.vocabulary import WORD_START, Vocabulary

MOST_LETTERS = 300_000
MEMBERS_PER_LETTER = 3  # at most: states of letters in all states of sentences
OUTSIDE, BEGIN = 0, 1


@dataclass(frozen=True, eq=False)
class Grammar:
    """A closed grammar over the tokens of a model; `build_grammar` builds it."""

    automaton: BackoffAutomaton  # with PRICE_WEIGHT
    is_sentence: np.ndarray  # [S] bool, whether a sentence ends in a state

    def accepts(self, tokens: Sequence[int], blank_id: int) -> bool:
        """Whether tokens, columns of the log-probs, spell a sentence; `blank_id` is the column of the blank."""
        state = self.automaton.start_state
        for column in tokens:
            _, state = self.automaton.advance(state, int(column) - (column > blank_id))
        return bool(self.is_sentence[state])


def build_grammar(
    source: str | Sequence[str], vocabulary: Vocabulary, price: float = math.inf, most_letters: int = MOST_LETTERS
) -> Grammar:
    """The grammar of a list of sentences, or of a text in JSGF. Results are cached.

    Args:
        source: sentences, or a text that begins with "#JSGF" (see jsgf.py).
        vocabulary: the model's tokens.
        price: of each token outside of the grammar, natural log, > 0; inf: such tokens are forbidden.
        most_letters: of the grammar, rules included where they are used; bounds time and memory.

    Raises:
        ValueError: the grammar cannot be read, has no sentence, too many letters or states, or a character that is in
            no token.
    """
    if price != math.inf:
        check_number("price", price, above_zero=True)
    if not isinstance(source, str):
        source = tuple(source)
    arguments = source, vocabulary, price, most_letters
    return cached(("grammar", *arguments), partial(_build, *arguments))


def _build(source: str | tuple[str, ...], vocabulary: Vocabulary, price: float, most_letters: int) -> Grammar:
    tokens = _Tokens(vocabulary)
    sentences = _Sentences(_Letters(_expansion_of(source), tokens, most_letters))
    arcs = _live_arcs(sentences, tokens)
    number_of = {state: number for number, state in enumerate(arcs, BEGIN)}
    rows = [sorted((label, number_of[after]) for label, after in own) for own in arcs.values()]
    counts = np.array([0, *map(len, rows)])
    ends = np.cumsum(counts)
    labels, targets = np.array([pair for row in rows for pair in row], np.int64).reshape(-1, 2).T
    is_outside = np.arange(len(counts)) == OUTSIDE
    is_sentence = np.array([False, *map(sentences.is_whole, arcs)])
    cost = price / PRICE_WEIGHT
    columns = Columns(
        arc_begin=ends - counts,
        arc_end=ends,
        backoff_to=np.full(len(counts), OUTSIDE),
        backoff_weights=np.where(is_outside, -cost, 0.0),
        final_weights=np.where(is_sentence | is_outside, 0.0, -cost),
        arc_labels=labels,
        arc_weights=np.zeros(len(labels)),
        arc_targets=targets,
    )
    return Grammar(BackoffAutomaton.from_columns(columns, len(vocabulary), BEGIN, "grammar"), is_sentence)


def _expansion_of(source: str | tuple[str, ...]) -> jsgf.Expansion:
    if isinstance(source, str):
        return jsgf.read_jsgf(source)
    for sentence in source:
        if not isinstance(sentence, str) or not sentence.strip():
            raise FieldError("grammar", sentence, "sentences: texts that are not blank")
    return jsgf.Choice(tuple(jsgf.Sequence(tuple(sentence.split())) for sentence in source))


class _Tokens:
    """The letters of all tokens, as a tree: letter -> tree, and "" -> the tokens that end there."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        if vocabulary.kind == "byte_bpe":
            raise ValueError("grammar: the vocabulary is byte_bpe, expected tokens of whole characters")
        self.separator = " " if vocabulary.kind == "char" else WORD_START
        self.tree: dict[str, Any] = {}
        self.silent: list[int] = []  # punctuation
        self.alphabet: set[str] = set()
        for label, shown in vocabulary.surfaces():
            letters = self.letters_of(shown)
            if letters.strip(self.separator) == "" != shown.strip(self.separator):
                self.silent.append(label)
                continue
            self.alphabet |= set(letters)
            node = self.tree
            for letter in letters:
                node = node.setdefault(letter, {})
            node.setdefault("", []).append(label)

    def letters_of(self, text: str) -> str:
        """A text without letter case and punctuation."""
        plain = unicodedata.normalize("NFKC", text).lower()
        return "".join(c for c in plain if unicodedata.category(c)[0] != "P")


class _Letters:
    """The letters of a grammar as a nondeterministic automaton [Thompson, CACM 11(6), 1968].

    A state has one letter that leads to another state, or free steps to others.
    """

    def __init__(self, expansion: jsgf.Expansion, tokens: _Tokens, most: int) -> None:
        self.most = most  # letters
        self.letters: list[tuple[str, int] | None] = []
        self.free: list[list[int]] = []
        self._tokens = tokens
        # without separator in the tokens, words are not separated
        self.separator = tokens.separator if tokens.separator in tokens.alphabet else ""
        self.begin = self._new_state()
        self.end = self._add(expansion, self.begin)

    def _new_state(self, *before: int) -> int:
        """A state after free steps from others."""
        if len(self.letters) == self.most:
            raise ValueError(f"grammar has more than {self.most} letters, rules included where they are used")
        self.letters.append(None)
        self.free.append([])
        for state in before:
            self.free[state].append(len(self.letters) - 1)
        return len(self.letters) - 1

    def _add(self, node: jsgf.Expansion, begin: int) -> int:
        """Append an expansion; returns the state after it."""
        if isinstance(node, jsgf.Sequence):
            for part in node.parts:
                begin = self._add(part, begin)
            return begin
        if isinstance(node, jsgf.Choice):
            return self._new_state(*[self._add(option, begin) for option in node.options])
        if isinstance(node, jsgf.Repeat):
            begin = self._new_state(begin)
            end = self._add(node.part, begin)
            self.free[end].append(begin)
            return end
        return self._add_word(str(node), begin)

    def _add_word(self, word: str, begin: int) -> int:
        letters, state = self._tokens.letters_of(word), begin
        for letter in letters:
            if letter not in self._tokens.alphabet:
                raise ValueError(f"grammar: {word!r} has the character {letter!r}, which is in no token of the model")
        if letters:
            state = self._new_state(begin)
        for letter in self.separator + letters if letters else "":
            before, state = state, self._new_state()
            self.letters[before] = letter, state
        return state


class _Sentences:
    """The letters of a grammar as a deterministic automaton, whose states are made when they are reached."""

    def __init__(self, letters: _Letters) -> None:
        self._letters = letters
        self._numbers: dict[frozenset[int], int] = {}
        self._members: list[frozenset[int]] = []
        self._size, self._most = 0, MEMBERS_PER_LETTER * letters.most
        self._after: dict[int, dict[str, int]] = {}
        begin = {letters.begin}
        # the separator before the first word may be missing
        first = self.after(self._number(begin)).get(letters.separator)
        self.begin = self._number(begin if first is None else begin | self._members[first])

    def is_whole(self, state: int) -> bool:
        """Whether a sentence ends in a state."""
        return self._letters.end in self._members[state]

    def after(self, state: int) -> dict[str, int]:
        """Letter -> the state after it."""
        if state not in self._after:
            reached: dict[str, set[int]] = {}
            for edge in map(self._letters.letters.__getitem__, self._members[state]):
                if edge is not None:
                    reached.setdefault(edge[0], set()).add(edge[1])
            self._after[state] = {letter: self._number(states) for letter, states in reached.items()}
        return self._after[state]

    def _number(self, states: Iterable[int]) -> int:
        """The number of the state for some states of `_Letters` and those that are free steps away."""
        members, pending = set(states), list(states)
        while pending:
            new = set(self._letters.free[pending.pop()]) - members
            members |= new
            pending += new
        found = frozenset(members)
        if found not in self._numbers:
            self._size += len(found)
            if self._size > self._most:
                raise ValueError(f"grammar is ambiguous: more than {self._most} states, expected fewer alternatives")
            self._numbers[found] = len(self._members)
            self._members.append(found)
        return self._numbers[found]


def _live_arcs(sentences: _Sentences, tokens: _Tokens) -> dict[int, list[tuple[int, int]]]:
    """State -> its arcs (label, state after it); only states from which a sentence can be finished."""
    arcs: dict[int, list[tuple[int, int]]] = {}
    before: dict[int, list[int]] = {}
    pending = [sentences.begin]
    while pending:
        state = pending.pop()
        if state in arcs:
            continue
        arcs[state] = [(label, state) for label in tokens.silent]
        ways = [(tokens.tree, state)]
        while ways:
            node, at = ways.pop()
            arcs[state] += [(label, at) for label in node.get("", ())]
            ways += [(node[letter], after) for letter, after in sentences.after(at).items() if letter in node]
        for _, after in arcs[state]:
            before.setdefault(after, []).append(state)
            pending.append(after)
    live: set[int] = set()
    pending = [state for state in arcs if sentences.is_whole(state)]
    while pending:
        state = pending.pop()
        if state not in live:
            live.add(state)
            pending += before.get(state, ())
    if sentences.begin not in live:
        raise ValueError("grammar has no sentence that tokens of the model spell, expected at least one")
    return {state: [arc for arc in own if arc[1] in live] for state, own in arcs.items() if state in live}
