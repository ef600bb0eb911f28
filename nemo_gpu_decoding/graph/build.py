"""Build a word graph L o G from a word LM (ARPA) and a lexicon with kaldifst, like Kaldi's mkgraph.

    G   the LM with its redundant back-off states removed            grammar.py
    L   the spellings, with disambiguation symbols                   lexicon.py
    LG  minimize(determinize*(L o G)), disambiguation to epsilon     this file

Weights stay exact: determinization* compares weights to 2^-20 and minimization to 2^-30. Kaldi's default
is 2^-10, which changes path costs by up to 2e-3 (measured).

    graph = build_graph("lm.arpa.gz", Lexicon.from_file("lexicon.txt", pieces))
"""

import hashlib
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from nemo_gpu_decoding.checks import FieldError, check_int, check_kind
from nemo_gpu_decoding.extras import require
from nemo_gpu_decoding.graph.csr import EPSILON_WORD, Spellings, WordGraph
from nemo_gpu_decoding.graph.grammar import Grammar, grammar_fst, read_grammar, with_exact_backoff
from nemo_gpu_decoding.graph.lexicon import Lexicon, OpenVocabulary, lexicon_fst
from nemo_gpu_decoding.graph.openfst import Fst, read_fst, write_fst
from nemo_gpu_decoding.graph.store import load_or_build
from nemo_gpu_decoding.graph.unknown_words import NEW_WORDS, PIECE_COST, WORD_COST, Entrance
from nemo_gpu_decoding.jit import cache_root
from nemo_gpu_decoding.lm.arpa import ArpaReader
from nemo_gpu_decoding.plain_text import path_of, read_lines
from nemo_gpu_decoding.vocabulary import CONTINUATION, WORD_START, Vocabulary

logger = logging.getLogger("nemo_gpu_decoding")

_RECIPE_VERSION = 2  # version of the construction, part of the cache key
DETERMINIZE_DELTA, MINIMIZE_DELTA = 2.0**-20, 2.0**-30
MOST_GROWTH = 4  # largest growth of the number of states in determinization
Progress = Callable[[str], None]
BUILD_STEPS = 7  # calls of `progress` while a graph is built


UNSPELLED = "LM words without spelling"  # in reports of graphs


def build_graph(
    arpa: str | PathLike[str],
    lexicon: Lexicon | Vocabulary,
    *,
    segmentations: int = 1,
    open_vocabulary: OpenVocabulary | None = None,
    added_words: Sequence[str] = (),
    cache: bool | str | PathLike[str] = True,
    progress: Progress = logger.info,
) -> WordGraph:
    """Build the graph of a word LM, or load it from the cache.

    Args:
        arpa: word n-gram LM, plain or gzipped.
        lexicon: the spellings, or the model's vocabulary to spell the LM's words with.
        segmentations: spellings per word, if a vocabulary is given.
        open_vocabulary: costs of words that the LM does not list; None: the search does not find such words. Needs an
            LM with <unk> and a lexicon with `beginning_tokens`.
        added_words: words to add to the LM, with the probability of <unk> (see `lm/arpa.py`).
        cache: True for the cache folder, a folder, or False. A cache that cannot be read or written gives a warning.
        progress: function that is called with the name of each step when it begins.

    Raises:
        ValueError: the LM or the lexicon is malformed, or they have no word in common; the LM has tokens
            instead of words.
        ImportError: kaldifst is not installed.
    """
    if not isinstance(lexicon, Lexicon | Vocabulary):
        raise FieldError("lexicon", lexicon, "a Lexicon or a Vocabulary")
    check_int("segmentations", segmentations, 1)
    check_kind("open_vocabulary", open_vocabulary or OpenVocabulary(), OpenVocabulary)
    if isinstance(lexicon, Vocabulary):
        lexicon = spell_words(arpa, lexicon, segmentations, added_words)
    if open_vocabulary is not None and not lexicon.beginning_tokens:
        raise FieldError("beginning_tokens", (), "the tokens that may begin a word", "with an open vocabulary")
    recipe = Recipe(path_of(arpa, "arpa"), lexicon, open_vocabulary, tuple(dict.fromkeys(added_words)), progress)
    return with_warning(recipe.load(cache), str(arpa))


def with_warning(graph: WordGraph, name: str) -> WordGraph:
    """Return the graph; log a warning if it lacks words of its LM, because they cannot be spelled."""
    lacking, examples = graph.report.get(UNSPELLED, 0), graph.report.get("examples of them", ())
    if lacking:
        logger.warning(
            "%s: %d of %d words have no spelling, e.g. %s, and are left out: %s",
            name, lacking, lacking + graph.report["words"], ", ".join(examples[:3]),
            graph.report["why"] or "the lexicon lacks them",
        )  # fmt: skip
    return graph


def spell_words(
    arpa: str | PathLike[str],
    vocabulary: Vocabulary,
    segmentations: int = 1,
    added_words: Sequence[str] = (),
    track: Callable[[Sequence[str]], Iterable[str]] = iter,
) -> Lexicon:
    """Spell the words of an LM with the model's tokenizer.

    Args:
        arpa: word n-gram LM, plain or gzipped; only its 1-grams are read.
        segmentations: spellings per word, see `Lexicon.from_vocabulary`.
        added_words: words to add to the LM.
        track: a function from all words to an iterator over them, for a progress display.
    """
    words = listed_words(arpa, added_words)
    if are_tokens(words, vocabulary):
        raise ValueError(
            f"{arpa} is an LM over tokens ({', '.join(map(repr, words[:3]))}, ...), expected one over "
            "words; flexctc_beam, alsd_pp and aes_pp take LMs over tokens"
        )
    if vocabulary.spells_by_guess:
        logger.warning(
            "the %d pieces are those of a unigram model, whose spelling they do not tell: words are "
            "spelled with the fewest pieces, which may cost most of the accuracy. Expected the model's "
            "tokenizer (Vocabulary.from_sentencepiece, or encode=) or a lexicon file",
            len(vocabulary),
        )
    return Lexicon.from_vocabulary(track(words), vocabulary, segmentations)


def listed_words(arpa: str | PathLike[str], added_words: Sequence[str] = ()) -> list[str]:
    """Return the words of an LM, without symbols in <...>; only its 1-grams are read.

    Args:
        added_words: words to add to the LM.
    """
    with ArpaReader(arpa, added_words) as reader:
        return [word for word in reader.symbols if not (word.startswith("<") and word.endswith(">"))]


def load_fst_graph(path: str | PathLike[str], words: str | PathLike[str] | Sequence[str] | None = None) -> WordGraph:
    """Load a ready-made decoding graph, such as the TLG.fst of NeMo's `wfst_lm_path`.

    Input labels are column + 1, as in Kaldi. Decode a T o L o G with `topology="graph"`, and an L o G (without
    disambiguation symbols) with another topology.

    Args:
        path: binary OpenFst file.
        words: words.txt, or the words by label; needed if the file has no output symbols.

    Raises:
        ValueError: the file is no decoding graph, has no words, or cannot be searched.
        OSError: a file cannot be read.
    """
    fst = read_fst(path)
    if words is None and fst.output_symbols is None:
        raise FieldError("words", None, f"the words.txt of {path}, which has no output symbols")
    table = fst.output_symbols if words is None else words
    if isinstance(table, (str, PathLike)):
        table = _read_symbols(path_of(table))
    if isinstance(table, dict):  # some labels may be missing, and words after the last label of an arc are left out
        most = int(fst.arcs["output"].max(initial=0))
        last = max((label for label in table if label <= most), default=-1)
        table = [table.get(label, EPSILON_WORD) for label in range(last + 1)]
    return WordGraph.from_fst(fst, table or (), name=str(path))


def graph_cache_folder() -> Path:
    """Return the cache folder of graphs: below $NEMO_GPU_DECODING_CACHE, or else ~/.cache."""
    return cache_root() / "graphs"


@dataclass
class Recipe:
    """The inputs of a graph and the steps that build it from them."""

    arpa: Path
    lexicon: Lexicon
    open_vocabulary: OpenVocabulary | None
    added_words: tuple[str, ...] = ()
    progress: Progress = logger.info
    exact_backoff: bool = False  # see `with_exact_backoff`
    boundaries: bool = True  # whether the LM scores the beginning and the end of an utterance

    def load(self, cache: bool | str | PathLike[str] = True) -> WordGraph:
        """Build the graph, or load it from the cache; see `build_graph`."""
        if cache is False:
            return self.build()
        folder = graph_cache_folder() if cache is True else Path(cache)
        return load_or_build(folder / f"{self.fingerprint}.graph", self.build)

    @property
    def fingerprint(self) -> str:
        """Return a hash that depends on the contents of the LM's file, not on its name."""
        digest = hashlib.sha256(f"{_RECIPE_VERSION} {DETERMINIZE_DELTA} {MINIMIZE_DELTA}".encode())
        with open(self.arpa, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        others = self.open_vocabulary, self.added_words, self.exact_backoff, self.boundaries
        digest.update(repr((self.lexicon, *others)).encode())
        return digest.hexdigest()[:32]

    @cached_property
    def grammar(self) -> Grammar:
        self.progress(f"reading {self.arpa.name}")
        grammar = read_grammar(self.arpa, self.added_words)
        if not self.boundaries:
            grammar = grammar.without_boundaries()
        if self.exact_backoff:
            grammar = replace(grammar, automaton=with_exact_backoff(grammar.automaton))
        if self.open_vocabulary is not None and grammar.unknown is None:
            raise ValueError(f"{grammar.name} has no <unk>, expected one for an open vocabulary")
        return grammar

    @cached_property
    def words(self) -> list[str]:
        """Return the word of each label: epsilon, the LM's words that have spellings, <unk> in an open vocabulary."""
        spoken = [word for word in self.grammar.words if word in self.lexicon.spellings]
        if not spoken:
            known = f"its words are {', '.join(map(repr, list(self.lexicon.spellings)[:3]))}"
            raise ValueError(
                f"{self.grammar.name} and the lexicon have no word in common, e.g. "
                f"{', '.join(repr(word) for word in self.grammar.words[:4] if word[0] != '<')}: "
                f"{self.lexicon.reason or known}"
            )
        unknown = [] if self.open_vocabulary is None else [self.grammar.words[self.grammar.unknown or 0]]
        return [EPSILON_WORD, *spoken, *unknown]

    @property
    def unknown(self) -> int:
        """Return the label of <unk>, 0 if the vocabulary is closed."""
        return 0 if self.open_vocabulary is None else len(self.words) - 1

    def build(self) -> WordGraph:
        began = time.perf_counter()
        index = {word: label for label, word in enumerate(self.words) if label}
        outputs = np.array([index.get(word, 0) for word in self.grammar.words])
        self.progress(f"making G of {self.grammar.num_ngrams} n-grams")
        backoff_label = len(self.words)  # of #0 in G
        g = grammar_fst(self.grammar, outputs, backoff_label)
        self.progress(f"making L of {len(index)} words")
        known = {word: label for word, label in index.items() if label != self.unknown}
        open_words = None if self.open_vocabulary is None else (self.unknown, self.open_vocabulary)
        lg = compose_and_optimize(lexicon_fst(self.lexicon, known, backoff_label, open_words), g, self.progress)
        self.progress(f"laying out {lg.num_states} states")
        is_epsilon = np.zeros(max(int(lg.arcs["input"].max(initial=0)) + 1, 1), bool)
        is_epsilon[0] = True
        is_epsilon[self.lexicon.vocab_size + 1 :] = True  # disambiguation symbols
        graph = WordGraph.from_fst(
            lg, self.words, is_epsilon=is_epsilon, spellings=self._spellings(),
            unknown=self.unknown, name=self.grammar.name,
        )  # fmt: skip
        report = {
            "states": graph.num_states,
            "arcs": graph.num_arcs,
            "epsilon arcs": int(is_epsilon[lg.arcs["input"]].sum()),
            "epsilon-closure arcs": len(graph.arrays.epsilons),
            **self._lm_report(),
            "LM contexts kept": g.num_states,
            "seconds": round(time.perf_counter() - began, 1),
        }
        takes_new_words = self.lexicon.separator is None and not self.exact_backoff and self.open_vocabulary is None
        if takes_new_words and self.lexicon.beginning_tokens:  # the file says where words of a request begin
            report[NEW_WORDS] = Entrance.of(graph, self.grammar, self.lexicon.vocab_size)._asdict()
        return replace(graph, report=report)

    def _spellings(self) -> Spellings:
        entries = [(n, tokens) for n, word in enumerate(self.words) for tokens in self.lexicon.spellings.get(word, ())]
        lengths = [len(spelling) for _, spelling in entries]
        return Spellings(
            np.array([label for label, _ in entries], np.int32),
            np.append(0, np.cumsum(lengths)).astype(np.int32),
            np.array([token for _, spelling in entries for token in spelling], np.int32),
            np.array(self.lexicon.beginning_tokens, np.int32),
        )

    def _lm_report(self) -> dict[str, Any]:
        """Return counts of the LM's n-grams and words, and of words that cannot be spelled."""
        unspoken = {
            label: word
            for label, word in enumerate(self.grammar.words)
            if word not in self.lexicon.spellings and not (word.startswith("<") and word.endswith(">"))
        }
        read = self.grammar.automaton.arrays.arcs["label"]
        unlisted, costs = set(self.lexicon.spellings) - set(self.grammar.words), self.open_vocabulary
        return {
            "words": len(self.words) - 1,
            "added words": self.grammar.num_added,
            "spellings": sum(len(self.lexicon.spellings.get(word, ())) for word in self.words),
            "open vocabulary": self.open_vocabulary is not None,
            **({} if costs is None else {WORD_COST: costs.word_cost, PIECE_COST: costs.piece_cost}),
            "n-grams": self.grammar.num_ngrams,
            "n-grams by order": list(self.grammar.counts),
            UNSPELLED: len(unspoken),
            "examples of them": list(unspoken.values())[:10],
            "why": self.lexicon.reason,
            "n-grams that end in such a word": int(np.isin(read, list(unspoken)).sum()),
            "lexicon words not in the LM": len(unlisted),
            "LM contexts": self.grammar.automaton.num_states,
        }


def compose_and_optimize(lexicon: Fst, grammar: Fst, progress: Progress = logger.info) -> Fst:
    """Return minimize(determinize*(lexicon o grammar)), computed by kaldifst with exact weights."""
    require("kaldifst")
    import kaldifst

    with tempfile.TemporaryDirectory(prefix="nemo-gpu-decoding-") as folder:
        paths = [os.path.join(folder, name) for name in ("l.fst", "g.fst", "lg.fst")]
        write_fst(lexicon, paths[0])
        write_fst(grammar, paths[1])
        left, right = (kaldifst.StdVectorFst.read(path) for path in paths[:2])
        progress("composing L and G")
        kaldifst.arcsort(left, sort_type="olabel")
        lg = kaldifst.compose(left, right)
        if lg.num_states == 0:
            raise ValueError("the graph is empty: no word of the LM can be spelled to its end")
        most = MOST_GROWTH * lg.num_states + 10_000  # a limit, because determinize* may not terminate
        progress(f"determinizing {lg.num_states} states")
        try:
            kaldifst.determinize_star(lg, delta=DETERMINIZE_DELTA, max_states=most)
        except RuntimeError as error:
            said = str(error)
            why = f"more than {most:,} states" if "aborted since passed" in said else said.rsplit("[E] ")[-1]
            raise ValueError(
                f"L o G cannot be determinized ({why}), expected spellings that tell the LM's words apart"
            ) from error
        progress(f"minimizing {lg.num_states} states")
        kaldifst.minimize_encoded(lg, delta=MINIMIZE_DELTA)
        lg.write(paths[2])
        return read_fst(paths[2])


def are_tokens(words: Sequence[str], vocabulary: Vocabulary) -> bool:
    """Return whether an LM lists tokens of the model, by their pieces or in NeMo's encoding, chr(id + 100)."""
    if not words:
        return False
    pieces = frozenset(vocabulary.pieces)
    if all(word in pieces for word in words):
        return any(word.startswith((WORD_START, CONTINUATION)) for word in words)
    return all(len(word) == 1 and 0 <= ord(word) - 100 < len(vocabulary) for word in words)


_NUMBER = re.compile("[0-9]{1,9}")


def _read_symbols(path: Path) -> dict[int, str]:
    """Read words.txt, which has a symbol and its number in each line."""
    symbols = {}
    for number, line in enumerate(read_lines(path), 1):
        if not (fields := line.split()):
            continue
        if len(fields) != 2 or not _NUMBER.fullmatch(fields[1]):
            raise ValueError(f"{path}, line {number}: expected a word and its number")
        symbols[int(fields[1])] = fields[0]
    return symbols
