"""Spell words as token sequences, and build the lexicon transducer L of a word graph.

The lexicon has disambiguation symbols, like Kaldi's lexicons [Mohri, Pereira & Riley 2008]. A sequence that is a
prefix of another one, or that spells several words, ends in a symbol #1, #2, .... These symbols make L o G
determinizable; after determinization they become epsilons. With the entries

    a        ▁a              an     ▁an            Anne   ▁an ne          Ann    ▁an ne

the sequences become  ▁a;  ▁an #1 (it begins others);  ▁an ne #1  and  ▁an ne #2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np

from nemo_gpu_decoding.graph.openfst import Fst
from nemo_gpu_decoding.plain_text import read_lines
from nemo_gpu_decoding.schema import checked_options, option
from nemo_gpu_decoding.vocabulary import LetterCaseError, Vocabulary

Spelling = tuple[int, ...]


@dataclass(frozen=True)
class Lexicon:
    """The token sequences that spell the words. Tokens are log-prob column numbers.

    Raises:
        ValueError: a word has no spelling, an empty or repeated one, or a token out of range.
    """

    spellings: Mapping[str, tuple[Spelling, ...]]
    vocab_size: int  # number of tokens
    reason: str = ""  # the reason why a first word could not be spelled
    # A token that occurs once or more between words; it is optional before the first and after the last word. The
    # spellings do not contain it. None: the spellings mark where a word begins.
    separator: int | None = None
    beginning_tokens: tuple[int, ...] = ()  # tokens that may begin a word; (): not known

    def __post_init__(self) -> None:
        for word, spellings in self.spellings.items():
            if not spellings or not all(spellings):
                raise ValueError(f"the word {word!r} has an empty spelling, expected at least one token")
            if len(set(spellings)) < len(spellings):
                raise ValueError(f"the word {word!r} has the same spelling twice")
            for token in (min(map(min, spellings)), max(map(max, spellings))):
                if not 0 <= token < self.vocab_size:
                    expected = f"0 .. {self.vocab_size - 1} (vocab_size)"
                    raise ValueError(f"the word {word!r} has the token {token}, expected {expected}")

    @classmethod
    def from_vocabulary(cls, words: Iterable[str], vocabulary: Vocabulary, segmentations: int = 1) -> Lexicon:
        """Spell the words with the model's tokenizer.

        In character models with a space, each word has two spellings: without a space, for the beginning
        of an utterance, and with a space before it.

        Args:
            words: words of the LM; symbols in <...> are skipped.
            segmentations: largest number of spellings of a word: the tokenizer's, then others with as few
                pieces as possible. More spellings allow more alignments and make the graph larger.
        """
        spellings: dict[str, tuple[Spelling, ...]] = {}
        faults: dict[type[ValueError], ValueError] = {}  # the first one of each class
        for word in words:
            if word.startswith("<") and word.endswith(">"):
                continue
            try:
                splits = vocabulary.segmentations(word, segmentations)
            except ValueError as error:
                faults.setdefault(type(error), error)
                continue
            spellings[word] = tuple(map(tuple, splits))
            if vocabulary.space is not None:
                spellings[word] += tuple((vocabulary.space, *spelling) for spelling in spellings[word])
        reason = str(faults.get(LetterCaseError) or next(iter(faults.values()), ""))  # the one that can be mended
        return cls(spellings, len(vocabulary), reason, beginning_tokens=beginning_tokens(vocabulary))

    @classmethod
    def from_pieces(
        cls, entries: Iterable[tuple[str, Sequence[str]]], pieces: Sequence[str], name: str = "lexicon"
    ) -> Lexicon:
        """Create a lexicon from (word, piece texts) pairs; a word may have several pairs."""
        index = {piece: token for token, piece in enumerate(pieces)}
        spellings: dict[str, dict[Spelling, None]] = {}
        for word, spelled in entries:
            unknown = [piece for piece in spelled if piece not in index]
            if unknown:
                raise ValueError(
                    f"{name}: the word {word!r} is spelled with {unknown[0]!r}, expected pieces of the "
                    f"model's {len(index)}"
                )
            spellings.setdefault(word, {})[tuple(index[piece] for piece in spelled)] = None
        return cls({word: tuple(texts) for word, texts in spellings.items()}, len(pieces))

    @classmethod
    def from_file(cls, path: str | PathLike[str], pieces: Sequence[str]) -> Lexicon:
        """Read a file with a word and its pieces in each line, separated by white space.

        Raises:
            ValueError: a line has no pieces or an unknown one; the message names file and line.
            OSError: the file cannot be read.
        """
        entries = []
        for number, line in enumerate(read_lines(path), 1):
            fields = line.split()
            if len(fields) == 1:
                raise ValueError(f"{path}, line {number}: the word {fields[0]!r} has no pieces")
            if fields:
                entries.append((fields[0], fields[1:]))
        return cls.from_pieces(entries, pieces, str(Path(path)))


@checked_options
@dataclass(frozen=True)
class OpenVocabulary:
    """The costs of words that the LM does not list; such a word is a beginning token, then any tokens.

    An unknown word costs the LM's <unk> plus the costs below. `Lexicon.beginning_tokens` may begin it.
    """

    # Natural-log penalties, >= 0, of an unknown word and of each of its pieces
    word_cost: float = option(2.0, low=0, nemo="unknown_word_cost")
    piece_cost: float = option(4.0, low=0, nemo="unknown_piece_cost")


def beginning_tokens(vocabulary: Vocabulary) -> tuple[int, ...]:
    """Return the tokens that may begin a word: all tokens if the pieces do not mark beginnings of words.

    In a character model, this is the space, so an utterance cannot begin with an unknown word.
    """
    if vocabulary.space is not None:
        return (vocabulary.space,)
    return tuple(token for token in range(len(vocabulary)) if vocabulary.starts_word(token))


def disambiguated(spellings: Sequence[Spelling]) -> np.ndarray:
    """Return the disambiguation symbol at the end of each spelling: 1, 2, ..., or 0 for no symbol."""
    times = Counter(spellings)
    prefixes = {spelling[:end] for spelling in times for end in range(1, len(spelling))}
    used: Counter[Spelling] = Counter()
    symbols = np.zeros(len(spellings), np.int64)
    for i, spelling in enumerate(spellings):
        if times[spelling] > 1 or spelling in prefixes:
            used[spelling] += 1
            symbols[i] = used[spelling]
    return symbols


def lexicon_fst(
    lexicon: Lexicon, outputs: Mapping[str, int], backoff_label: int, unknown: tuple[int, OpenVocabulary] | None = None
) -> Fst:
    """Build L over the words in `outputs`. Input labels: token + 1, then from vocab_size + 1 on #0, #1, ...

    Args:
        outputs: label of each word in G.
        backoff_label: label of #0 in G.
        unknown: label of <unk> in G, and its costs.
    """
    entries = [(outputs[word], s) for word in outputs for s in lexicon.spellings.get(word, ())]
    symbols = disambiguated([spelling for _, spelling in entries])
    first = lexicon.vocab_size + 1  # of #0
    rows = [(0, first, backoff_label, 0.0, 0)]
    behind = 0  # the state after a word
    if lexicon.separator is not None:
        behind = 1
        rows += [(state, lexicon.separator + 1, 0, 0.0, 0) for state in (0, behind)]
    states = behind + 1
    for (word, spelling), symbol in zip(entries, symbols.tolist(), strict=True):
        labels = [token + 1 for token in spelling] + ([first + symbol] if symbol else [])
        at = 0
        for i, label in enumerate(labels):
            target = behind if i == len(labels) - 1 else states
            rows.append((at, label, word if i == 0 else 0, 0.0, target))
            states += target != behind
            at = target
    num_symbols = int(symbols.max(initial=0)) + 1
    if unknown is not None:  # a loop between two disambiguation symbols, which separate it from known words
        (word, penalties), symbol, inside = unknown, first + num_symbols, states + 1
        beginning = lexicon.beginning_tokens
        # with a separator, no token marks the beginning of a word
        others = beginning if behind else sorted(set(range(lexicon.vocab_size)) - set(beginning))
        rows.append((0, symbol, word, penalties.word_cost, states))
        rows += ((states, token + 1, 0, penalties.piece_cost, inside) for token in beginning)
        rows += ((inside, token + 1, 0, penalties.piece_cost, inside) for token in others)
        rows.append((inside, symbol, 0, 0.0, behind))
        states += 2
    sources, inputs, words, costs, targets = (np.array(column) for column in zip(*rows, strict=True))
    final = np.full(states, np.inf)
    final[[0, behind]] = 0.0
    return Fst.from_arcs(0, final, sources, inputs, words, costs, targets)
