"""What is decoded: emissions, references, and the LMs, words and phrases that belong to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from nemo_gpu_decoding.vocabulary import Vocabulary

TOKEN_OFFSET = 100  # NeMo's token LMs spell the token id i as chr(i + 100)
SHORTEST_PHRASE = 5  # letters; shorter words are no use as phrases


@dataclass(frozen=True, eq=False)
class Task:
    """B utterances of up to T frames over V tokens; the blank is token V."""

    name: str
    log_probs: torch.Tensor  # [B, T, V + 1] float32, natural log
    lengths: torch.Tensor  # [B] int64, valid frames
    frame_seconds: float
    texts: list[str]  # [B] what was said
    tokens: list[list[int]]  # [B] the same as token ids
    vocabulary: Vocabulary  # the V tokens
    lexicon: Mapping[str, tuple[int, ...]]  # word -> its tokens
    lm: Path | None  # token ARPA, plain text
    word_lm: Path | None  # word ARPA, plain text

    @property
    def vocab_size(self) -> int:
        return self.log_probs.shape[-1] - 1

    @property
    def audio_seconds(self) -> float:
        return float(self.lengths.sum()) * self.frame_seconds

    def first(self, utterances: int | None) -> Task:
        """The task with its first `utterances` utterances only."""
        if utterances is None or utterances >= len(self.texts):
            return self
        lengths = self.lengths[:utterances]
        return replace(
            self,
            log_probs=self.log_probs[:utterances, : int(lengths.max())].contiguous(),
            lengths=lengths,
            texts=self.texts[:utterances],
            tokens=self.tokens[:utterances],
        )

    def on(self, device: torch.device | str) -> Task:
        """The task with its log-probs and lengths on a device."""
        return replace(self, log_probs=self.log_probs.to(device), lengths=self.lengths.to(device))

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
