"""What is decoded: emissions, references, and the LMs, words and phrases that belong to them.

A `Task` is for CTC decoders; `transducer/task.py` has the one for transducers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from nemo_gpu_decoding.vocabulary import Vocabulary

TOKEN_OFFSET = 100  # NeMo's token LMs spell the token id i as chr(i + 100)
SHORTEST_PHRASE = 5  # letters; shorter words are no use as phrases


T = TypeVar("T", bound="Utterances")


@dataclass(frozen=True, eq=False)
class Utterances(ABC):
    """B utterances of a language of V tokens, whatever a decoder reads of them."""

    name: str
    lengths: torch.Tensor  # [B] int64, valid frames
    frame_seconds: float
    texts: list[str]  # [B] what was said
    tokens: list[list[int]]  # [B] the same as token ids
    vocabulary: Vocabulary  # the V tokens
    lexicon: Mapping[str, tuple[int, ...]]  # word -> its tokens
    lm: Path | None  # token ARPA, plain text
    word_lm: Path | None  # word ARPA, plain text

    @property
    @abstractmethod
    def inputs(self) -> torch.Tensor:
        """[B, T, ...] what a decoder reads."""

    @abstractmethod
    def with_inputs(self: T, inputs: torch.Tensor) -> T:
        """The same utterances, with other numbers for a decoder to read."""

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary)

    @property
    def audio_seconds(self) -> float:
        return float(self.lengths.sum()) * self.frame_seconds

    def first(self: T, utterances: int | None) -> T:
        """The task with its first `utterances` utterances only."""
        if utterances is None or utterances >= len(self.texts):
            return self
        lengths = self.lengths[:utterances]
        few = replace(
            self, lengths=lengths, texts=self.texts[:utterances], tokens=self.tokens[:utterances]
        )
        return few.with_inputs(self.inputs[:utterances, : int(lengths.max())].contiguous())

    def on(self: T, device: torch.device | str) -> T:
        """The task with what decoders read on a device."""
        return replace(self, lengths=self.lengths.to(device)).with_inputs(self.inputs.to(device))

    def phrases(self, count: int) -> list[str]:
        """`count` phrases to boost: half of them rare words of the references, the rest said by nobody.

        Where the references have too few long words, or the lexicon too few others, words and pairs of
        words that nobody said fill the list.
        """
        if count and not self.lexicon:
            raise ValueError("phrases need lexicon=, the spelling of words in pieces")
        log_probs = unigrams(self.word_lm) if self.word_lm else {}
        long_words = (word for word in self.lexicon if len(word) >= SHORTEST_PHRASE)
        words = sorted(long_words, key=lambda word: (log_probs.get(word, -99.0), word))
        said = {word for text in self.texts for word in text.split()}
        chosen = [word for word in words if word in said][: (count + 1) // 2]
        others = [word for word in words if word not in said]
        chosen += others[: count - len(chosen)]
        rng = np.random.default_rng(0)
        while len(chosen) < count:
            first, second = rng.choice(len(others), 2)
            chosen.append(f"{others[first]} {others[second]}")
        return chosen


@dataclass(frozen=True, eq=False)
class Task(Utterances):
    """B utterances of up to T frames over V tokens; the blank is token V."""

    log_probs: torch.Tensor  # [B, T, V + 1] float32, natural log

    @property
    def inputs(self) -> torch.Tensor:
        return self.log_probs

    def with_inputs(self, inputs: torch.Tensor) -> Task:
        return replace(self, log_probs=inputs)

    @property
    def vocab_size(self) -> int:
        return self.log_probs.shape[-1] - 1


def unigrams(arpa: Path) -> dict[str, float]:
    """log10 probabilities of an ARPA's words."""
    log_probs: dict[str, float] = {}
    with arpa.open(encoding="utf-8") as file:
        for line in file:
            if line.startswith("\\2-grams") or line.startswith("\\end"):
                break
            fields = line.split()
            if len(fields) >= 2 and not line.startswith(("\\", "ngram")):
                log_probs[fields[1]] = float(fields[0])
    return log_probs


def spelled_by(lexicon: Mapping[str, tuple[int, ...]]) -> Callable[[str], list[int]]:
    """A tokenizer for `Vocabulary.encode` that knows the words of a lexicon."""

    def encode(text: str) -> list[int]:
        return [token for word in text.split() for token in lexicon[word]]

    return encode


def phrase_lexicon(
    texts: list[str], word_lm: Path | None, vocabulary: Vocabulary
) -> Mapping[str, tuple[int, ...]]:
    """The words that phrases are made of: those that were said and those that the word LM knows."""
    words = {word for text in texts for word in text.split()}
    words |= {word for word in unigrams(word_lm) if not word.startswith("<")} if word_lm else set()
    return {word: tuple(vocabulary.tokenize(word)) for word in sorted(words)}
