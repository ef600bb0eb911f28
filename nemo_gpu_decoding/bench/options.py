"""What `nemo-gpu-decoding bench` can be told."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

PEER_FAMILIES = ("nemo", "flashlight", "pyctcdecode")
FINITE = (
    "pair_seconds",
    "lm_weight",
    "beam_beta",
    "boosting_weight",
    "flashlight_lm_weight",
    "pyctcdecode_lm_weight",
    "pyctcdecode_beta",
    "hotword_weight",
)


@dataclass
class BenchOptions:
    """Options of one benchmark run.

    Raises:
        ValueError: a value is out of range or two options contradict each other.
    """

    # The strategy under test.
    strategy: str = "flexctc_beam"
    # Decoders to measure beside it: any of nemo (its beam_batch and greedy_batch), flashlight,
    # pyctcdecode. One that is not installed gets a row that says so.
    peers: list[str] = field(default_factory=lambda: list(PEER_FAMILIES))
    # Write rows and header here as JSON; a folder gets a file <strategy>-<cpu>-<date>.json.
    out: str | None = None
    # Draw WER against RTFx here (.png, .svg or .pdf).
    plot: str | None = None

    # Beam sizes K.
    beams: list[int] = field(default_factory=lambda: [4, 8, 16])
    # CPU threads of every decoder that can use more than one.
    threads: int = 1
    # How often a peer and ours are timed in turn; medians are reported.
    repeats: int = 3
    # Stop repeating a pair after so many seconds: a peer may take a minute for one pass.
    pair_seconds: float = 30.0
    # Use the first so many utterances only; for a quick look. null: all.
    utterances: int | None = None
    # Phrases boosted in the rows with boosting; the first half occurs in the references, where possible.
    phrases: int = 200
    # Phrases in the large list of the scaling row; 0 leaves this row out.
    many_phrases: int = 20_000
    # Measure memory growth with K, compile time and start time, each in a fresh process.
    probes: bool = True

    # .npz with log_probs [B, T, V+1], lengths [B], tokens [B, L] (-1 = padding), texts [B] and
    # frame_seconds. null: synthetic emissions of a synthetic language, made here from `seed`.
    data: str | None = None
    # With `data`: SentencePiece model, or a text file with one piece per line.
    tokenizer: str | None = None
    # With `data`: token-level n-gram LM, ARPA or ARPA.gz in NeMo's encoding (chr(id + 100)).
    lm: str | None = None
    # With `data`: word-level ARPA or ARPA.gz, for peers that read words.
    word_lm: str | None = None
    # With `data`: lines "word<TAB>piece piece ...", for phrases and for peers that read words.
    lexicon: str | None = None

    # Without `data`: number of tokens V, the blank not counted.
    vocab_size: int = 1024
    # Without `data`: number of utterances B.
    batch: int = 32
    # Without `data`: shortest utterance, in frames of 80 ms.
    min_frames: int = 125
    # Without `data`: longest utterance.
    max_frames: int = 375
    # Without `data`: sentences of text that the LMs are estimated from.
    sentences: int = 36_000
    # Without `data`: n of the token n-gram LM.
    lm_order: int = 6
    # Without `data`: another seed, another language.
    seed: int = 1

    # Our LM weight, and NeMo's ngram_lm_alpha. This and the weights below were tuned for each decoder by
    # a small grid on dev_v1024.npz; LM weights are in natural log, whatever unit the peer takes.
    lm_weight: float = 0.2
    # Ours and NeMo's, per token; applied where an LM is.
    beam_beta: float = 0.5
    # Ours, and NeMo's boosting_tree_alpha.
    boosting_weight: float = 0.2
    # Of flashlight's token LM.
    flashlight_lm_weight: float = 0.15
    # Of pyctcdecode's word LM.
    pyctcdecode_lm_weight: float = 0.2
    # pyctcdecode's, per word.
    pyctcdecode_beta: float = 0.5
    # pyctcdecode's.
    hotword_weight: float = 5.0

    def __post_init__(self) -> None:
        unknown = [peer for peer in self.peers if peer not in PEER_FAMILIES]
        if unknown:
            expected = ", ".join(PEER_FAMILIES)
            raise ValueError(f"peers holds {', '.join(unknown)}, expected any of {expected}")
        if not self.beams or min(self.beams) < 1:
            raise ValueError(f"beams is {self.beams}, expected one or more integers >= 1")
        for name in ("threads", "repeats", "batch", "sentences", "lm_order", "min_frames"):
            _check_at_least(name, getattr(self, name), 1)
        _check_at_least("phrases", self.phrases, 0)
        _check_at_least("many_phrases", self.many_phrases, 0)
        _check_at_least("vocab_size", self.vocab_size, 8)
        _check_at_least("max_frames", self.max_frames, self.min_frames)
        for name in FINITE:
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)}, expected a finite number")
        if self.utterances is not None:
            _check_at_least("utterances", self.utterances, 1)
        self._check_files()

    def _check_files(self) -> None:
        for name in ("data", "tokenizer", "lm", "word_lm", "lexicon"):
            path = getattr(self, name)
            if path is None:
                continue
            if self.data is None:
                raise ValueError(
                    f"{name} is {path!r} without data=, expected none: it is synthetic then"
                )
            if not Path(path).is_file():
                raise ValueError(f"{name} is {path!r}, expected an existing file")
        for name in ("out", "plot"):
            path = getattr(self, name)
            if path is not None and not Path(path).absolute().parent.is_dir():
                raise ValueError(f"{name} is {path!r}, expected a file in an existing folder")


def _check_at_least(name: str, value: int, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} is {value!r}, expected an integer >= {low}")
