"""Build closed grammars: automata over tokens that accept a list of sentences.

A token path belongs to a sentence if its pieces spell the sentence, in any segmentation. Letter case and punctuation
do not matter, so that one grammar fits models with and without them. The automaton has a state for each place in the
grammar's letters where a token may end:

    sentences "go", "go on"     tokens  ▁  ▁g  o  ▁go  ▁on  .
    state      0 (outside)   1 ""          2 "▁g"   3 "▁go" (a sentence)   4 "▁go▁"   5 "▁go▁on" (a sentence)
    arcs       all: 0        ▁g:2 ▁go:3    o:3      ▁:4 ▁on:5              ...        .:5

A token without an arc leads to state 0, outside of the grammar, and no arc leads back. With an infinite price, such a
token ends the hypothesis. With a finite price, each token outside costs the price, and so does an utterance that ends
inside a sentence. If no sentence fits, the best hypothesis is outside. The boosting weight is `PRICE_WEIGHT`.
"""

import logging
import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from nemo_gpu_decoding.cache import cached
from nemo_gpu_decoding.checks import FieldError, check_kind, check_number, leave_out
from nemo_gpu_decoding.fusion.allowed import PRICE_WEIGHT
from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton, Columns
from nemo_gpu_decoding.fusion.phrases import MOST_SHOWN
from nemo_gpu_decoding.vocabulary import WORD_START, Vocabulary

logger = logging.getLogger("nemo_gpu_decoding")

MOST_LETTERS = 300_000
JSGF = "#JSGF"  # begins files of the Java Speech Grammar Format
OUTSIDE, BEGIN = 0, 1
OTHER_SPEECH = ("[unk]", "<unk>")  # an entry in grammars of other toolkits, in any letter case
OTHER_PRICE = 4.0  # with such an entry, in place of inf


@dataclass(frozen=True, eq=False)
class Grammar:
    """A closed grammar: an automaton over a model's tokens that accepts sentences; `build_grammar` builds it."""

    automaton: BackoffAutomaton  # with PRICE_WEIGHT
    is_sentence: np.ndarray  # [S] bool, whether a sentence ends in a state

    def accepts(self, tokens: Sequence[int], blank_id: int) -> bool:
        """Return whether tokens (columns of the log-probs, blank in column `blank_id`) spell a sentence."""
        state = self.automaton.start_state
        for column in tokens:
            _, state = self.automaton.advance(state, int(column) - (column > blank_id))
        return bool(self.is_sentence[state])


def build_grammar(
    sentences: Sequence[str], vocabulary: Vocabulary, price: float = math.inf, most_letters: int = MOST_LETTERS
) -> Grammar:
    """Return the closed grammar that accepts a list of sentences. Grammars are cached.

    Args:
        sentences: all sentences that an utterance may be.
        vocabulary: the model's tokens.
        price: cost of each token outside of the grammar, natural log, > 0; inf: such tokens are forbidden.
        most_letters: limit for all sentences together, which bounds time and memory.

    Raises:
        ValueError: there is no sentence that tokens spell; a sentence is blank, has rules of JSGF, or has a character
            that is in no token; there are too many letters.
    """
    if price != math.inf:
        check_number("price", price, above_zero=True)
    check_kind("vocabulary", vocabulary, Vocabulary)
    if isinstance(sentences, str) or not isinstance(sentences, Iterable):
        raise FieldError("grammar", sentences, "a list of sentences")
    arguments = tuple(sentences), vocabulary, price, most_letters
    for text in arguments[0]:
        if not isinstance(text, str):
            raise FieldError("grammar", text, "sentences: texts")
        if text.lstrip().startswith(JSGF):
            raise FieldError("grammar", text[:MOST_SHOWN], "a list of sentences, without rules of JSGF")
    return cached(("grammar", *arguments), partial(_build, *arguments))


def _build(texts: tuple[str, ...], vocabulary: Vocabulary, price: float, most_letters: int) -> Grammar:
    tokens = _Tokens(vocabulary)
    others = [text for text in texts if text.strip().lower() in OTHER_SPEECH]
    if others and price == math.inf:
        price = OTHER_PRICE
        logger.warning("grammar has %r, other speech: grammar_price is %g in place of inf", others[0], price)
    sentences = _Sentences([text for text in texts if text not in others], tokens, most_letters)
    arcs = _live_arcs(sentences, tokens)
    number_of = {state: number for number, state in enumerate(arcs, BEGIN)}
    rows = [[(label, 0.0, number_of[after]) for label, after in leaving] for leaving in arcs.values()]
    is_sentence = np.array([False, *(state in sentences.whole for state in arcs)])
    cost = price / PRICE_WEIGHT
    backoff_weights, final_weights = np.zeros(len(is_sentence)), np.where(is_sentence, 0.0, -cost)
    backoff_weights[OUTSIDE], final_weights[OUTSIDE] = -cost, 0.0
    columns = Columns.of_rows([[], *rows], np.full(len(is_sentence), OUTSIDE), backoff_weights, final_weights)
    return Grammar(BackoffAutomaton.from_columns(columns, len(vocabulary), BEGIN, "grammar"), is_sentence)


class _Tokens:
    """A trie of the letters of all tokens, as nested dictionaries; key "" has the tokens that end in a node."""

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
        """Return a text in lower case, decomposed (NFKD) and without punctuation and characters of no width."""
        plain = unicodedata.normalize("NFKD", text.lower()).lower()
        return "".join(c for c in plain if unicodedata.category(c) != "Cf" and unicodedata.category(c)[0] != "P")


class _Sentences:
    """A trie of the letters of all sentences; its nodes are states, and `begin` is the root."""

    begin = 0

    def __init__(self, sentences: Sequence[str], tokens: _Tokens, most: int) -> None:
        self.after: list[dict[str, int]] = [{}]  # by state: letter -> the state after it
        self.whole: set[int] = set()  # states in which a sentence ends
        # without separator in the tokens, words are not separated
        separator = tokens.separator if tokens.separator in tokens.alphabet else ""
        left = most
        faults: list[str] = []
        for sentence in sentences:
            try:
                letters = "".join(separator + word for word in _words_of(sentence, tokens) if word)
            except ValueError as error:
                faults.append(str(error))
                continue
            left -= len(letters)
            if left < 0:
                raise ValueError(f"grammar has more than {most} letters")
            state = self.begin
            for letter in letters:
                if letter not in self.after[state]:
                    self.after[state][letter] = len(self.after)
                    self.after.append({})
                state = self.after[state][letter]
            self.whole.add(state)
        leave_out("grammar", faults, len(sentences) - len(faults), "sentences")
        if separator in self.after[self.begin]:  # the separator before the first word may be missing
            self.after[self.begin] |= self.after[self.after[self.begin][separator]]


def _words_of(sentence: str, tokens: _Tokens) -> list[str]:
    """Return the letters of each word in a sentence, without letter case and punctuation."""
    words = sentence.split()
    spelled = [tokens.letters_of(word) for word in words]
    for word, letters in zip(words, spelled, strict=True):
        if word.lower() in OTHER_SPEECH:
            raise ValueError(f"{sentence!r} has {word!r} beside words, expected it alone, or grammar_price")
        if word[0] + word[-1] in ("[]", "()", "{}"):
            logger.warning("grammar: %r is read as a word; other speech is '[unk]'", word)
        for letter in letters:
            if letter not in tokens.alphabet:
                raise ValueError(f"{word!r} has the character {letter!r}, which is in no token of the model")
    if not any(spelled):
        raise ValueError(f"{sentence!r} has no letters")
    return spelled


def _live_arcs(sentences: _Sentences, tokens: _Tokens) -> dict[int, list[tuple[int, int]]]:
    """Map each state from which a sentence can be completed to its arcs (label, next state)."""
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
            ways += [(node[letter], after) for letter, after in sentences.after[at].items() if letter in node]
        for _, after in arcs[state]:
            before.setdefault(after, []).append(state)
            pending.append(after)
    live: set[int] = set()
    pending = [state for state in arcs if state in sentences.whole]
    while pending:
        state = pending.pop()
        if state not in live:
            live.add(state)
            pending += before.get(state, ())
    if sentences.begin not in live:
        raise ValueError("grammar has no sentence that tokens of the model spell, expected at least one")
    return {state: [arc for arc in leaving if arc[1] in live] for state, leaving in arcs.items() if state in live}
