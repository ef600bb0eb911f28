"""`Task`: what is decoded, with the references, LMs, words, phrases and weights that belong to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from nemo_gpu_decoding import LSTMNetworks, Vocabulary

SHORTEST_PHRASE = 5  # letters; shorter words are no use as phrases
PADDED = -30.0  # log-prob of what is not blank in padded frames


@dataclass(frozen=True)
class Weights:
    """Tuned for each decoder by a small grid on the task itself; see `BenchOptions`. Natural log."""

    lm_weight: float = 0.2
    beam_beta: float = 0.5
    boosting_weight: float = 0.2
    flashlight_lm_weight: float = 0.15
    pyctcdecode_lm_weight: float = 0.2
    pyctcdecode_beta: float = 0.5
    hotword_weight: float = 5.0
    acoustic_scale: float = 8.0
    small_share: float = 0.02
    graph_beams: tuple[int, ...] = (10, 13, 17, 25)


SPEECH_WEIGHTS = Weights(
    lm_weight=0.7, beam_beta=1.0, flashlight_lm_weight=0.7, pyctcdecode_lm_weight=0.7,
    pyctcdecode_beta=1.0, acoustic_scale=1.5, small_share=0.3, graph_beams=(8, 12, 17),
)  # fmt: skip


class Transducer(NamedTuple):
    """Prediction network and joint that belong to a task; made anew for every device."""

    kind: str  # rnnt or tdt
    durations: tuple[int, ...]  # frames, of TDT
    ours: Callable[[], Any]  # -> `TransducerNetworks`
    nemo: Callable[[], tuple[Any, Any]]  # the same as NeMo's decoders take them


@dataclass(frozen=True, eq=False)
class Task:
    """B utterances of up to T frames over V tokens. For CTC the blank is token V."""

    name: str
    inputs: torch.Tensor  # [B, T, V + 1] float32 log-probs, natural log; transducers: encoder output [B, T, D]
    lengths: torch.Tensor  # [B] int64, valid frames
    frame_seconds: float
    texts: list[str]  # [B] what was said
    tokens: list[list[int]]  # [B] the same as token ids
    vocabulary: Vocabulary  # the V tokens
    lexicon: Mapping[str, tuple[int, ...]]  # word -> its tokens
    lm: Path | None = None  # token ARPA, plain text
    word_lm: Path | None = None  # word ARPA, plain text
    weights: Weights = Weights()
    transducer: Transducer | None = None

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
        if utterances >= len(self.texts):
            return self
        lengths = self.lengths[:utterances]
        inputs = self.inputs[:utterances, : int(lengths.max())].contiguous()
        texts, tokens = self.texts[:utterances], self.tokens[:utterances]
        return replace(self, inputs=inputs, lengths=lengths, texts=texts, tokens=tokens)

    def repeated(self, utterances: int) -> Task:
        """The task with so many utterances, the same again and again."""
        rows = torch.arange(utterances) % len(self.texts)
        texts = [self.texts[row] for row in rows.tolist()]
        tokens = [self.tokens[row] for row in rows.tolist()]
        inputs, lengths = self.inputs[rows], self.lengths[rows]
        return replace(self, inputs=inputs, lengths=lengths, texts=texts, tokens=tokens)

    def on(self, device: torch.device | str) -> Task:
        """The task with what decoders read on a device."""
        return replace(self, inputs=self.inputs.to(device), lengths=self.lengths.to(device))

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


def transducer_of(weights: Mapping[str, torch.Tensor], durations: tuple[int, ...], kind: str) -> Transducer:
    """Networks of one LSTM layer and a ReLU joint, from their weights: "lstm.bias_hh_l0" and so on."""

    def ours() -> LSTMNetworks:
        def linear(name: str) -> nn.Linear:
            rows, columns = weights[f"{name}.weight"].shape
            return nn.Linear(columns, rows)

        labels, hidden = weights["embedding.weight"].shape
        output = linear("output")
        parts: dict[str, Any] = {
            "embedding": nn.Embedding(labels, hidden), "lstm": nn.LSTM(hidden, hidden),
            "encoder": linear("encoder"), "prediction": linear("prediction"), "output": output,
        }  # fmt: skip
        for name, module in parts.items():
            own = {k.partition(".")[2]: w.float() for k, w in weights.items() if k.startswith(f"{name}.")}
            module.load_state_dict(own)
        joint = nn.Sequential(nn.ReLU(), output).eval()
        return LSTMNetworks(
            parts["embedding"], parts["lstm"], parts["encoder"], parts["prediction"], joint,
            durations=durations,
        )  # fmt: skip

    def nemo() -> tuple[Any, Any]:
        from nemo_gpu_decoding.bench.peers.nemo_transducer import nemo_modules

        return nemo_modules(ours())

    return Transducer(kind, durations, ours, nemo)


def padded(rows: Sequence[torch.Tensor], *, log_probs: bool) -> torch.Tensor:
    """[B, T, ...] of B utterances; padded frames of log-probs say blank, others are 0."""
    batch = nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=PADDED * log_probs)
    for row, frames in zip(batch, rows, strict=True):
        row[len(frames) :, -1] = 0.0
    return batch


def read_lexicon(path: str | Path | None, pieces: Iterable[str]) -> dict[str, tuple[int, ...]]:
    assert path is not None
    ids = {piece: i for i, piece in enumerate(pieces)}
    lexicon = {}
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        word, tab, spelling = line.partition("\t")
        if not tab or any(piece not in ids for piece in spelling.split()):
            expected = "word<TAB>piece piece ... with pieces of the tokenizer"
            raise ValueError(f"lexicon is {path!r}, line {number} is {line!r}, expected {expected}")
        lexicon[word] = tuple(ids[piece] for piece in spelling.split())
    return lexicon


def unigrams(arpa: Path) -> dict[str, float]:
    """log10 probabilities of an ARPA's words."""
    log_probs: dict[str, float] = {}
    with arpa.open(encoding="utf-8") as file:
        for line in file:
            if line.startswith("\\2-grams") or line.startswith("\\end"):
                break
            columns = line.split()
            if len(columns) >= 2 and not line.startswith(("\\", "ngram")):
                log_probs[columns[1]] = float(columns[0])
    return log_probs


def spelled_by(lexicon: Mapping[str, tuple[int, ...]]) -> Callable[[str], list[int]]:
    """A tokenizer for `Vocabulary.encode` that knows the words of a lexicon."""

    def encode(text: str) -> list[int]:
        return [token for word in text.split() for token in lexicon[word]]

    return encode
