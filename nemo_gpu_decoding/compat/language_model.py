"""Use a word n-gram LM with pyctcdecode's weights: `LanguageModel` holds a word graph and bonuses of words.

The score of a text is, as in pyctcdecode,

    log P_acoustic + sum over words of alpha * ln P_LM(word | words before) + beta + hotword_weight * [is a hotword]
                   + alpha * ln 10 * unk_score_offset * [is unknown]

The arcs of the graph have the LM's costs, which alpha multiplies. All other terms are bonuses of words. Without
hotwords, the search uses a copy of the graph whose costs contain alpha and the bonuses; other weights need another
copy. As in Kaldi, an n-gram may get its back-off score if that is higher than its own score.

Bonuses in the costs of the graph give the search tight lower bounds. With hotwords, an automaton over the labels of
the graph adds the bonuses instead. The states of this automaton are

state 0          between words: every word has its bonus; <unk> leads to state 1
state 1          before the first piece of an unknown word, which gets a part of the penalty
state 2          after that piece; further pieces cost nothing, and the word's end gets the remaining penalty
other states     in an unknown word that begins like a hotword: as in pyctcdecode, the penalty is due at its end only,
                 and each piece earns a part of the bonus; where the word continues differently, both are settled

If unknown words paid only at their ends, they would first displace words of the LM from the beam.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from nemo_gpu_decoding.checks import FieldError, check_bool, check_number
from nemo_gpu_decoding.compat.alphabet import MOST_SPELLINGS, Alphabet, spellings
from nemo_gpu_decoding.fusion.automaton import Arc, BackoffAutomaton, Columns
from nemo_gpu_decoding.graph.build import Recipe, are_tokens, listed_words, with_warning
from nemo_gpu_decoding.graph.csr import INFINITE, GraphArrays, WordGraph, arc_sources
from nemo_gpu_decoding.graph.grammar import SPECIAL_WORDS, Grammar, read_grammar
from nemo_gpu_decoding.graph.lexicon import Lexicon, OpenVocabulary
from nemo_gpu_decoding.graph.unknown_words import spelling_states, with_piece_labels
from nemo_gpu_decoding.lm.arpa import UNKNOWN_WORDS, ArpaReader

logger = logging.getLogger("nemo_gpu_decoding")

LN10 = math.log(10)
ATTRIBUTES, UNIGRAMS = "attrs.json", "unigrams.txt"  # files of pyctcdecode, beside the LM


class LanguageModel:
    """A word n-gram LM with pyctcdecode's weights, which may be changed at any time.

    Args:
        kenlm_model: ARPA file or KenLM binary, or a `kenlm.Model`.
        unigrams: the known words; others get `unk_score_offset`. None, or no word of the LM: all words of the LM.
        alpha: weight of the LM, >= 0.
        beta: bonus of each word, natural log.
        unk_score_offset: log10, added to the LM's score of an unknown word.
        score_boundary: whether the LM scores the beginning and the end of an utterance.
    """

    def __init__(
        self,
        kenlm_model: str | PathLike[str] | Any,
        unigrams: Collection[str] | None = None,
        alpha: float = 0.5,
        beta: float = 1.5,
        unk_score_offset: float = -10.0,
        score_boundary: bool = True,
    ) -> None:
        path = getattr(kenlm_model, "path", kenlm_model)
        self.path = Path(os.fsdecode(path))
        self.alpha, self.beta, self.unk_score_offset = alpha, beta, unk_score_offset
        self.score_boundary = score_boundary
        if isinstance(unigrams, str | bytes):
            raise FieldError("unigrams", unigrams, "a list of words")
        with ArpaReader(self.path) as arpa:
            self.words = frozenset(word for word in arpa.symbols if word not in SPECIAL_WORDS)
            self.order = len(arpa.counts)  # length of the longest n-grams
        given = frozenset(unigrams or ())
        self.unigrams = (given & self.words) or None  # None: all words are known
        if given and self.unigrams is None:
            shown = f"e.g. {next(iter(given))!r} against {next(iter(self.words), None)!r}"
            logger.warning("unigrams and %s have no word in common, %s: all words are known", self.path, shown)
        self._graph, self._bonuses = lru_cache(None)(self._build), lru_cache(maxsize=8)(self._automaton)
        self._weighted = lru_cache(maxsize=1)(self._weigh)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle path, words and weights only; a copy builds its word graph again."""
        weights = self.alpha, self.beta, self.unk_score_offset, self.score_boundary
        return type(self), (self.path, self.unigrams, *weights)

    def reset_params(
        self,
        alpha: float | None = None,
        beta: float | None = None,
        unk_score_offset: float | None = None,
        score_boundary: bool | None = None,
    ) -> None:
        """Change the weights of the LM; None keeps the old value."""
        given = {"alpha": alpha, "beta": beta, "unk_score_offset": unk_score_offset, "score_boundary": score_boundary}
        for name, value in given.items():
            if value is not None:
                setattr(self, name, value)

    # ------------------------------------------------------------------------------------- graph

    def graph(self, alphabet: Alphabet) -> WordGraph:
        """Return the word graph of the LM; it accepts out-of-vocabulary words if the LM has <unk>."""
        return self._graph(alphabet, self.score_boundary)

    def _build(self, alphabet: Alphabet, boundaries: bool) -> WordGraph:
        words, vocabulary = listed_words(self.path), alphabet.vocabulary
        if are_tokens(words, vocabulary):
            shown = ", ".join(map(repr, words[:3]))
            raise ValueError(f"{self.path} is an LM over tokens ({shown}, ...), expected one over words")
        spelled = Lexicon.from_vocabulary(words, vocabulary, MOST_SPELLINGS if alphabet.is_bpe else 1)
        entries, separator = spelled.spellings, alphabet.separator
        if separator is not None:
            entries = {word: tuple(s for s in several if separator not in s) for word, several in entries.items()}
        is_open = any(word in self.words for word in UNKNOWN_WORDS)
        beginning = alphabet.unknown_word_tokens if is_open else ()
        lexicon = Lexicon(entries, len(alphabet.pieces), spelled.reason, separator, beginning)
        unknown = OpenVocabulary(0.0, 0.0) if is_open else None
        recipe = Recipe(self.path, lexicon, unknown, exact_backoff=True, boundaries=boundaries)
        graph = with_warning(recipe.load(), str(self.path))
        return with_piece_labels(graph) if is_open else graph

    @cached_property
    def _grammar(self) -> Grammar:
        return read_grammar(self.path)

    def score(self, words: Sequence[str], hotwords: Mapping[str, float]) -> float:
        """Return LM score, `beta` and hotword bonuses of an utterance's first words, without </s>; natural log."""
        grammar = self._grammar if self.score_boundary else self._grammar.without_boundaries()
        known, index = self.unigrams or self.words, {word: label for label, word in enumerate(grammar.words)}
        labels = [index.get(word, grammar.unknown) for word in words]
        total = grammar.automaton.score([label for label in labels if label is not None], final=False)
        unknown = sum(word not in known for word in words)
        total += unknown * LN10 * self.unk_score_offset
        return self.alpha * total + self.beta * len(words) + sum(hotwords.get(word, 0.0) for word in words)

    # ----------------------------------------------------------------------------------- bonuses

    def bonuses(self, alphabet: Alphabet, hotwords: Mapping[str, float]) -> BackoffAutomaton:
        """Return the boosting automaton that adds the bonus of each word of the graph.

        Args:
            hotwords: words -> bonus, natural log; words that the LM lacks are spelled.
        """
        return self._bonuses(alphabet, self._checked_weights(), tuple(hotwords.items()))

    def weighted_graph(self, alphabet: Alphabet) -> WordGraph:
        """Return the word graph for utterances without hotwords; its costs contain alpha and the bonuses of words."""
        return self._weighted(alphabet, self._checked_weights())

    def _weigh(self, alphabet: Alphabet, weights: tuple[float, ...]) -> WordGraph:
        graph = self.graph(alphabet)
        return weighted_graph(graph, self._word_bonuses(graph), self._penalty, self.alpha)

    def _checked_weights(self) -> tuple[float, ...]:
        """Return all weights, on which what is kept depends."""
        for name in ("alpha", "beta", "unk_score_offset"):
            check_number(name, getattr(self, name), negative=name != "alpha")
        check_bool("score_boundary", self.score_boundary)
        return self.alpha, self.beta, self.unk_score_offset, self.score_boundary

    @property
    def _penalty(self) -> float:
        """Return the (negative) bonus of an unknown word, natural log."""
        return self.alpha * LN10 * self.unk_score_offset

    def _word_bonuses(self, graph: WordGraph) -> np.ndarray:
        """Return the bonus of each label of the graph without hotwords, [labels], natural log."""
        weights = np.zeros(len(graph.words))
        weights[1 : graph.num_spoken] = self.beta
        if self.unigrams is not None:
            for label, word in enumerate(graph.words[1 : graph.num_spoken], 1):
                if word not in self.unigrams and label != graph.unknown:
                    weights[label] += self._penalty
        return weights

    def _automaton(
        self, alphabet: Alphabet, of_lm: tuple[float, ...], hotwords: tuple[tuple[str, float], ...]
    ) -> BackoffAutomaton:
        graph = self.graph(alphabet)
        weights = self._word_bonuses(graph)
        unlisted: dict[tuple[int, ...], float] = {}
        for word, bonus in hotwords:
            if word in graph.word_ids:
                weights[graph.word_ids[word]] += bonus
            elif graph.pieces is not None:
                unlisted |= dict.fromkeys(spellings(alphabet, word), bonus)
        return bonus_automaton(weights, graph, self._penalty, alphabet, unlisted)

    # ------------------------------------------------------------------------------------- files

    def save_to_dir(self, folder: str | PathLike[str], unigram_encoding: str = "utf-8") -> None:
        """Write the LM file, the known words and the weights to a folder, as pyctcdecode does."""
        target = Path(folder)
        attributes = {name: getattr(self, name) for name in ("alpha", "beta", "unk_score_offset", "score_boundary")}
        (target / ATTRIBUTES).write_text(json.dumps(attributes), encoding="utf-8")
        lines = "".join(f"{word}\n" for word in sorted(self.unigrams or ()))
        (target / UNIGRAMS).write_text(lines, encoding=unigram_encoding)
        shutil.copy2(self.path, target / self.path.name)

    @staticmethod
    def parse_directory_contents(folder: str | PathLike[str]) -> dict[str, str]:
        """Return the paths of the three files in the folder of a saved LM.

        Raises:
            ValueError: the folder does not have these three files, or has others.
        """
        names = [name for name in os.listdir(folder) if not name.startswith((".", "__"))]
        models = [name for name in names if name not in (ATTRIBUTES, UNIGRAMS)]
        if len(names) != 3 or len(models) != 1:
            expected = f"{ATTRIBUTES}, {UNIGRAMS} and an LM"
            raise ValueError(f"{os.fspath(folder)} has the files {sorted(names)}, expected {expected}")
        found = {"json_attrs": ATTRIBUTES, "unigrams": UNIGRAMS, "kenlm": models[0]}
        return {key: os.path.join(folder, name) for key, name in found.items()}

    @classmethod
    def load_from_dir(cls, folder: str | PathLike[str], unigram_encoding: str = "utf-8") -> LanguageModel:
        """Create an LM from a folder that `save_to_dir` or pyctcdecode has written."""
        paths = cls.parse_directory_contents(folder)
        attributes = json.loads(Path(paths["json_attrs"]).read_text(encoding="utf-8"))
        unigrams = Path(paths["unigrams"]).read_text(encoding=unigram_encoding).splitlines()
        try:
            return cls(paths["kenlm"], unigrams or None, **attributes)
        except TypeError as error:
            raise ValueError(f"{paths['json_attrs']} has wrong keys: {error}") from error


# -- the bonuses of words ---------------------------------------------------------------------------

OUTSIDE, ENTERED, INSIDE = 0, 1, 2
# What an unknown word pays at first, natural log: less than the default beam, so that an unknown word that begins like
# a word of the LM stays in the beam until the sound tells them apart.
MOST_ENTRY = 8.0
Hotwords = Mapping[tuple[int, ...], float]  # the tokens of a word -> its bonus


def bonus_automaton(
    weights: np.ndarray, graph: WordGraph, penalty: float, alphabet: Alphabet, hotwords: Hotwords
) -> BackoffAutomaton:
    """Return the boosting automaton that adds bonuses of words and hotwords, and penalties of unknown words.

    Args:
        weights: [number of labels] bonus of each word, natural log; 0 for other labels.
        graph: a graph with labels for the pieces of unknown words, or with a closed vocabulary.
        penalty: cost of an unknown word, <= 0.
        hotwords: unknown words.
    """
    arcs: list[list[Arc]] = [[(label, weight, OUTSIDE) for label, weight in enumerate(weights.tolist())]]
    backoff_to, backoffs, finals = [OUTSIDE], [0.0], [0.0]
    if graph.pieces is not None:
        end, pieces = graph.pieces.end, range(graph.pieces.first, graph.pieces.end)
        arcs[OUTSIDE][graph.unknown] = (graph.unknown, float(weights[graph.unknown]), ENTERED)
        earned = _earned(alphabet, hotwords)
        numbers = {(): ENTERED} | {prefix: INSIDE + n for n, prefix in enumerate(earned, 1)}
        arcs += [[] for _ in range(INSIDE + len(earned))]
        entry = max(penalty, -MOST_ENTRY)
        arcs[INSIDE] = [(label, 0.0, INSIDE) for label in pieces] + [(end, penalty - entry, OUTSIDE)]
        backoff_to += [OUTSIDE, OUTSIDE] + [INSIDE] * len(earned)
        backoffs += [0.0, 0.0]
        finals += [0.0, penalty - entry]
        for prefix, value in earned.items():
            number, due = numbers[prefix], penalty + hotwords.get(prefix, 0.0) - value
            label, before = graph.pieces.first + prefix[-1], earned.get(prefix[:-1], 0.0)
            arcs[numbers[prefix[:-1]]].append((label, value - before, number))
            arcs[number].append((end, due, OUTSIDE))
            backoffs.append(entry - value)
            finals.append(due)
        begun = {label for label, _, _ in arcs[ENTERED]}
        arcs[ENTERED] += [(label, entry, INSIDE) for label in pieces if label not in begun]
    columns = Columns.of_rows(arcs, backoff_to, backoffs, finals)
    return BackoffAutomaton.from_columns(columns, len(weights), OUTSIDE, "bonuses of words")


def weighted_graph(graph: WordGraph, weights: np.ndarray, penalty: float, alpha: float) -> WordGraph:
    """Return a copy of a graph with `alpha` times its costs, less the bonuses; arguments as in `bonus_automaton`."""
    states, arcs, epsilons, sequences = (array.copy() for array in graph.arrays)
    bonuses, entry = np.append(weights, np.zeros(len(sequences))), max(penalty, -MOST_ENTRY)
    begins, inside = np.zeros((2, len(states)), bool)
    if graph.pieces is not None:
        bonuses[graph.pieces.end] = penalty - entry
        begins, inside = spelling_states(graph)
    for n, (first, second) in enumerate(sequences.tolist(), len(weights)):  # of labels before their own
        bonuses[n] = bonuses[first] + bonuses[second]
    sources, ends = arc_sources(states, "arc"), states["final_cost"] < INFINITE
    arcs["cost"] = alpha * arcs["cost"] - bonuses[arcs["olabel"]] - entry * begins[sources]
    epsilons["cost"] = alpha * epsilons["cost"] - bonuses[epsilons["olabel"]]
    states["final_cost"][ends] = alpha * states["final_cost"][ends] - (penalty - entry) * inside[ends]
    states["least_cost"] = INFINITE
    np.minimum.at(states["least_cost"], sources, arcs["cost"])
    epsilons["least_cost"] = states["least_cost"][epsilons["target"]]
    return replace(graph, arrays=GraphArrays(states, arcs, epsilons, sequences))


def _earned(alphabet: Alphabet, hotwords: Hotwords) -> dict[tuple[int, ...], float]:
    """Return the share of the bonus for each prefix of a hotword, in proportion to its characters, shortest first."""
    earned: dict[tuple[int, ...], float] = {}
    for spelled, bonus in hotwords.items():
        lengths = np.cumsum([alphabet.lengths[token] for token in spelled]).tolist()
        for n, length in enumerate(lengths, 1):
            earned[spelled[:n]] = max(earned.get(spelled[:n], 0.0), bonus * length / lengths[-1])
    return earned


@lru_cache(maxsize=8)
def hotword_automaton(alphabet: Alphabet, words: frozenset[tuple[str, float]]) -> BackoffAutomaton:
    """Return the boosting automaton over tokens for pairs (hotword, bonus), which the search without an LM uses.

    state 0          between words
    state 1          in a word that does not begin like a hotword
    next states      after a hotword, one for each bonus: a token that does not begin a word takes the bonus back
    other states     in a hotword
    """
    hotwords = {tokens: bonus for word, bonus in words for tokens in spellings(alphabet, word)}
    earned, bonuses, count = _earned(alphabet, hotwords), sorted(set(hotwords.values())), len(alphabet.pieces)
    numbers = {prefix: n for n, prefix in enumerate(earned, 2 + len(bonuses))}
    first = {prefix[0]: (value, numbers[prefix]) for prefix, value in earned.items() if len(prefix) == 1}
    inside = [token for token in range(count) if not alphabet.breaks(token)]
    between = {token: first.get(token, (0.0, int(token != alphabet.separator))) for token in range(count)}
    arcs = [[(token, *step) for token, step in between.items()], [(token, 0.0, 1) for token in inside]]
    arcs += [[(token, -bonus, 1) for token in inside] for bonus in bonuses]
    arcs += [[] for _ in earned]
    backoff_to, due = [0] * (2 + len(bonuses)), [0.0] * (2 + len(bonuses))
    for prefix, value in earned.items():
        if len(prefix) > 1:
            arcs[numbers[prefix[:-1]]].append((prefix[-1], value - earned[prefix[:-1]], numbers[prefix]))
        backoff_to.append(2 + bonuses.index(hotwords[prefix]) if prefix in hotwords else 1)
        due.append(hotwords.get(prefix, 0.0) - value)
    columns = Columns.of_rows(arcs, backoff_to, due, due)
    return BackoffAutomaton.from_columns(columns, count, OUTSIDE, "bonuses of words")
