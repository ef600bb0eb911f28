"""`Task`: the inputs of decoders, with their references, LMs, words, phrases and weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from benchmarks.options import SYNTHETIC_WEIGHTS, Weights
from nemo_gpu_decoding import LSTMNetworks, Vocabulary
from nemo_gpu_decoding.graph.lexicon import Lexicon
from nemo_gpu_decoding.lm.arpa import read_arpa

SHORTEST_PHRASE = 5  # letters; shorter words are no use as phrases
PARTS = ("embedding", "lstm", "encoder", "prediction", "output")  # of a transducer
PADDED = -30.0  # log-prob of what is not blank in padded frames


class Transducer(NamedTuple):
    """Prediction network and joint of a task; created for every device."""

    kind: str  # rnnt or tdt
    durations: tuple[int, ...]  # frames, of TDT
    ours: Callable[[], Any]  # -> `TransducerNetworks`
    nemo: Callable[[], tuple[Any, Any]]  # the same networks in NeMo's types


@dataclass(frozen=True, eq=False)
class Task:
    """B utterances of up to T frames over V tokens. For CTC the blank is token V."""

    name: str
    inputs: torch.Tensor  # [B, T, V + 1] float32 log-probs, natural log; transducers: encoder output [B, T, D]
    lengths: torch.Tensor  # [B] int64, valid frames
    texts: list[str]  # [B] what was said
    tokens: list[list[int]]  # [B] the same as token ids
    vocabulary: Vocabulary  # the V tokens
    lexicon: Mapping[str, tuple[int, ...]]  # word -> its tokens
    frame_seconds: float
    lm: Path | None = None  # token ARPA, plain text
    word_lm: Path | None = None  # word ARPA, plain text
    weights: Weights = SYNTHETIC_WEIGHTS
    transducer: Transducer | None = None

    @classmethod
    def of(
        cls, name: str, rows: Sequence[torch.Tensor], texts: Sequence[str], vocabulary: Vocabulary, **others: Any
    ) -> Task:
        """The task of utterances [T, ...]; padded frames of log-probs are blank, those of transducers are 0."""
        padding = 0.0 if others.get("transducer") else PADDED
        inputs = nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=padding).float()
        lengths = torch.tensor([len(row) for row in rows])
        inputs[..., -1][torch.arange(inputs.shape[1]) >= lengths[:, None]] = 0.0
        tokens = [list(vocabulary.tokenize(text)) if text.strip() else [] for text in texts]
        return cls(name, inputs, lengths, texts=list(texts), tokens=tokens, vocabulary=vocabulary, **others)

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary)

    @property
    def kind(self) -> str | None:
        return self.transducer.kind if self.transducer else None

    @property
    def audio_seconds(self) -> float:
        return float(self.lengths.sum()) * self.frame_seconds

    def first(self, utterances: int) -> Task:
        """The task with its first `utterances` utterances only."""
        return self._take(torch.arange(min(utterances, len(self.texts))))

    def repeated(self, utterances: int) -> Task:
        """The task with `utterances` utterances, repeated from the start."""
        return self._take(torch.arange(utterances) % len(self.texts))

    def _take(self, rows: torch.Tensor) -> Task:
        lengths, chosen = self.lengths[rows], rows.tolist()
        if chosen == list(range(len(self.texts))):
            return self
        return replace(
            self, inputs=self.inputs[rows, : int(lengths.max())].contiguous(), lengths=lengths,
            texts=[self.texts[row] for row in chosen], tokens=[self.tokens[row] for row in chosen],
        )  # fmt: skip

    def on(self, device: torch.device | str) -> Task:
        """The task with its inputs on a device."""
        return replace(self, inputs=self.inputs.to(device), lengths=self.lengths.to(device))

    def phrases(self, count: int) -> list[str]:
        """`count` phrases to boost: half of them rare words of the references, the others not in the references.

        If the references have too few long words, or the lexicon too few others, words and pairs of words outside the
        references fill the list.
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


def transducer_of(weights: Mapping[str, torch.Tensor], durations: tuple[int, ...], kind: str) -> Transducer:
    """Networks of one LSTM layer and a ReLU joint, from their weights: "lstm.bias_hh_l0" and so on."""

    def module(name: str) -> Any:
        own = {k.partition(".")[2]: w.float() for k, w in weights.items() if k.startswith(f"{name}.")}
        kind = {"embedding": nn.Embedding, "lstm": nn.LSTM}.get(name, nn.Linear)
        rows, columns = own["weight_ih_l0" if name == "lstm" else "weight"].shape
        made = kind(*{nn.Embedding: (rows, columns), nn.LSTM: (columns, columns), nn.Linear: (columns, rows)}[kind])
        made.load_state_dict(own)
        return made

    def ours() -> LSTMNetworks:
        embedding, lstm, encoder, prediction, output = map(module, PARTS)
        joint = nn.Sequential(nn.ReLU(), output).eval()
        return LSTMNetworks(embedding, lstm, encoder, prediction, joint, durations=durations)

    def nemo() -> tuple[Any, Any]:
        from benchmarks.peers.nemo import nemo_modules

        return nemo_modules(ours())

    return Transducer(kind, durations, ours, nemo)


def read_lexicon(path: str | Path | None, pieces: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """The first spelling of each word of a lexicon file."""
    assert path is not None
    return {word: spellings[0] for word, spellings in Lexicon.from_file(path, pieces).spellings.items()}


def unigrams(arpa: Path) -> dict[str, float]:
    """log10 probabilities of an ARPA's words."""
    words = read_arpa(arpa, max_order=1)
    return dict(zip(words.symbols, words.orders[0].log10_probs.tolist(), strict=True))


def spelling_vocabulary(pieces: Sequence[str], lexicon: Mapping[str, tuple[int, ...]]) -> Vocabulary:
    """Pieces that spell words as a lexicon does."""
    return Vocabulary(tuple(pieces), "bpe", spelled_by(lexicon))


def spelled_by(lexicon: Mapping[str, tuple[int, ...]]) -> Callable[[str], list[int]]:
    """A tokenizer for `Vocabulary.encode` that knows the words of a lexicon."""

    def encode(text: str) -> list[int]:
        return [token for word in text.split() for token in lexicon[word]]

    return encode
