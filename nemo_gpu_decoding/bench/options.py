"""What `nemo-gpu-decoding bench` can be told."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from nemo_gpu_decoding.graph.topology import NEMO_NAMES

PEER_FAMILIES = ("nemo", "flashlight", "pyctcdecode", "kaldi_decoder", "riva", "small_lm", "eager")
MODES = ("batch", "stream", "scale")
TEXTS = ("none", "own", "all")
TRANSDUCERS = ("rnnt", "tdt")
PRECISIONS = ("bfloat16", "float16", "float32")
GRAPH_TOPOLOGIES = ("compact", "normal", "minimal")
LEAST_NGRAMS = 1000  # below it a synthetic LM would have no 3-grams
AT_LEAST_ONE = (
    "threads",
    "repeats",
    "batch",
    "sentences",
    "graph_sentences",
    "max_active",
    "lm_order",
    "min_frames",
)
FINITE = (
    "acoustic_scale",
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

    # The strategy under test: flexctc_beam, or of transducers alsd_pp or aes_pp, which are measured on
    # CPUs, without an encoder, beside NeMo's malsd_batch or maes_batch and greedy_batch. Of word graphs
    # cuda_wfst, on the same graph as kaldi_decoder's FasterDecoder, and paged_biglm (on CPUs) beside the
    # search of its small LM alone and eager composition.
    strategy: str = "flexctc_beam"
    # batch: whole utterances, beside peers. stream: the latency of our strategy alone when many live
    # streams share one decoder; see `streams` and what follows it. scale: time, memory and disk space
    # that paged_biglm takes with an LM of any size; see `ngrams`.
    mode: str = "batch"
    # cpu, cuda or cuda:N. On a GPU our kernels are measured for several batch sizes, alone and behind an
    # encoder: flexctc_beam beside NeMo's decoders with CUDA graphs; cuda_wfst beside Riva's decoder and
    # kaldi_decoder (on the CPU), behind an encoder beside NeMo's greedy_batch. mode=stream: there too.
    device: str = "cpu"
    # Decoders to measure beside it: any of nemo (its beam_batch and greedy_batch), flashlight,
    # pyctcdecode; for cuda_wfst kaldi_decoder, and on a GPU riva and nemo. One that is not installed
    # gets a row that says so.
    peers: list[str] = field(default_factory=lambda: list(PEER_FAMILIES))
    # Write rows and header here as JSON; a folder gets a file <strategy>-<cpu>-<date>.json.
    out: str | None = None
    # Draw WER against RTFx here (.png, .svg or .pdf).
    plot: str | None = None

    # Beam sizes K.
    beams: list[int] = field(default_factory=lambda: [4, 8, 16])
    # For word graphs in place of `beams`: how far above the best a hypothesis may cost, natural log.
    graph_beams: list[int] = field(default_factory=lambda: [10, 13, 17, 25])
    # For word graphs: hypotheses per frame at most.
    max_active: int = 10_000
    # For word graphs: CTC topology; compact, normal or minimal.
    topology: str = "compact"
    # For word graphs: factor of the log-probs against the graph's costs, tuned on dev_v1024.npz; beams
    # are in units of the scaled score.
    acoustic_scale: float = 8.0
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
    # For flexctc_beam: measure memory growth with K, compile time and start time, each in a fresh
    # process.
    probes: bool = True

    # On a GPU: batch sizes B; a batch of B is the first B utterances.
    batches: list[int] = field(default_factory=lambda: [1, 8, 32, 128])
    # On a GPU: so many utterances are compared with the peer's, which decodes each of them alone.
    check_utterances: int = 32
    # On a GPU: measure encoder and decoder together, too.
    end_to_end: bool = True
    # With alsd_pp or aes_pp: a transducer or hybrid model (.nemo) that hears the speech of `manifest`.
    # On a GPU: a CTC or hybrid model that makes the log-probs, from the speech of `manifest`.
    # null: the encoder of the end-to-end rows is a FastConformer with random weights; what it says
    # means nothing, so that the decoders go on with the task's log-probs.
    model: str | None = None
    # With `model`: a NeMo manifest with references.
    manifest: str | None = None
    # Without `model`: layers of the encoder. 17 and 512 are a FastConformer "large".
    encoder_layers: int = 17
    # Without `model`: its width. For transducers D, the size of the encoder's output, on a CPU as well.
    encoder_width: int = 512
    # For transducers without `model`: H, the size of the LSTM prediction network and of the joint.
    prediction_width: int = 640
    # For transducers: tokens per frame at most, max_symbols of alsd_pp and NeMo's malsd_batch.
    max_symbols: int = 10
    # For alsd_pp and aes_pp without `model`: kinds of transducers to measure, rnnt and tdt.
    transducers: list[str] = field(default_factory=lambda: list(TRANSDUCERS))
    # The encoder's arithmetic: bfloat16, float16 (autocast) or float32.
    encoder_precision: str = "bfloat16"

    # .npz with log_probs [B, T, V+1], lengths [B], tokens [B, L] (-1 = padding), texts [B] and
    # frame_seconds. null: synthetic emissions of a synthetic language, made here from `seed`.
    data: str | None = None
    # With `data`: SentencePiece model, or a text file with one piece per line.
    tokenizer: str | None = None
    # With `data` or `model`: token-level n-gram LM, ARPA or ARPA.gz in NeMo's encoding (chr(id + 100)).
    lm: str | None = None
    # With `data` or `model`: word-level ARPA or ARPA.gz, for peers that read words, for phrases, and for
    # the graph of cuda_wfst.
    word_lm: str | None = None
    # With `data`: lines "word<TAB>piece piece ...", for phrases, for peers that read words, and for the
    # graph of cuda_wfst, which otherwise spells words with the tokenizer.
    lexicon: str | None = None

    # Without `data`: number of tokens V, the blank not counted.
    vocab_size: int = 1024
    # Without `data`: number of utterances; on a GPU at least the largest of `batches`.
    batch: int = 32
    # Without `data`: shortest utterance, in frames of 80 ms.
    min_frames: int = 125
    # Without `data`: longest utterance.
    max_frames: int = 375
    # Without `data`: sentences of text that the LMs are estimated from.
    sentences: int = 36_000
    # Without `data`, for word graphs in place of `sentences`: 100,000 make a graph of 500,000 n-grams.
    graph_sentences: int = 100_000
    # For paged_biglm: n-grams of the small LM / those of the word LM that it is pruned from, in (0, 1].
    # All words stay, so that the share may come out larger.
    small_share: float = 0.02
    # Without `data`: n of the token n-gram LM.
    lm_order: int = 6
    # Without `data`: another seed, another language.
    seed: int = 1

    # For mode=stream: so many live streams at once, a row for each number, with the largest of `beams`
    # or `graph_beams`.
    streams: list[int] = field(default_factory=lambda: [16, 64, 128, 256])
    # For mode=stream: audio in a chunk, milliseconds; a whole number of frames.
    chunk_ms: float = 400.0
    # For mode=stream: audio of each stream, seconds.
    stream_seconds: float = 20.0
    # For mode=stream: chunks that are decoded together at most. null: all that wait.
    max_batch: int | None = None
    # For mode=stream: of which streams partial results are asked after each batch, a row for each. none:
    # batches are only read. all: of all streams. own: of those that heard something; where a decoder can
    # only tell the texts of all streams that were opened together, these are opened, and pushed, one by
    # one.
    texts: list[str] = field(default_factory=lambda: ["none", "own"])

    # For mode=scale: n-grams of the synthetic LM, about; it takes 80 bytes per n-gram on the disk.
    ngrams: int = 100_000_000
    # For mode=scale: where these files go; they are deleted at the end. null: the system's folder for
    # temporary files.
    folder: str | None = None
    # What should be known about the run; goes into the header of the result as it is.
    note: str | None = None

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
        for name in ("beams", "graph_beams", "streams"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise ValueError(f"{name} is {values}, expected one or more integers >= 1")
        for name in AT_LEAST_ONE:
            _check_at_least(name, getattr(self, name), 1)
        _check_at_least("phrases", self.phrases, 0)
        _check_at_least("many_phrases", self.many_phrases, 0)
        _check_at_least("vocab_size", self.vocab_size, 8)
        _check_at_least("max_frames", self.max_frames, self.min_frames)
        self._check_gpu_options()
        self._check_stream_options()
        self._check_scale_options()
        for name in FINITE:
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)}, expected a finite number")
        if not 0 < self.small_share <= 1:
            raise ValueError(f"small_share is {self.small_share}, expected a number in (0, 1]")
        if not self.acoustic_scale > 0:
            raise ValueError(f"acoustic_scale is {self.acoustic_scale}, expected a number > 0")
        if NEMO_NAMES.get(self.topology, self.topology) not in GRAPH_TOPOLOGIES:
            expected = ", ".join(GRAPH_TOPOLOGIES)
            raise ValueError(f"topology is {self.topology!r}, expected {expected}")
        for name in ("utterances", "max_batch"):
            if getattr(self, name) is not None:
                _check_at_least(name, getattr(self, name), 1)
        self._check_files()

    def _check_gpu_options(self) -> None:
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device is {self.device!r}, expected cpu, cuda or cuda:N")
        if not self.batches or min(self.batches) < 1:
            raise ValueError(f"batches is {self.batches}, expected one or more integers >= 1")
        for name in ("check_utterances", "encoder_layers"):
            _check_at_least(name, getattr(self, name), 1)
        if self.encoder_width < 8 or self.encoder_width % 8:
            raise ValueError(f"encoder_width is {self.encoder_width}, expected a multiple of 8")
        if self.encoder_precision not in PRECISIONS:
            expected = ", ".join(PRECISIONS)
            raise ValueError(f"encoder_precision is {self.encoder_precision!r}, expected {expected}")
        unknown = [kind for kind in self.transducers if kind not in TRANSDUCERS]
        if unknown or not self.transducers:
            raise ValueError(f"transducers is {self.transducers}, expected any of {TRANSDUCERS}")
        _check_at_least("prediction_width", self.prediction_width, 8)
        _check_at_least("max_symbols", self.max_symbols, 1)
        ctc = ("flexctc_beam", "cuda_wfst", "paged_biglm")
        ctc_on_cpu = self.device == "cpu" and self.strategy in ctc
        if self.model and (self.data or ctc_on_cpu):
            seen = "with data=" if self.data else "with device=cpu"
            raise ValueError(f"model is {self.model!r} {seen}, expected device=cuda and no data=")
        for name in ("tokenizer", "lexicon"):
            if self.model and getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)!r} with model=, which brings its own")
        if (self.model is None) != (self.manifest is None):
            raise ValueError("model and manifest go together, expected both or neither")

    def _check_stream_options(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode is {self.mode!r}, expected {' or '.join(MODES)}")
        unknown = [kind for kind in self.texts if kind not in TEXTS]
        if unknown or not self.texts:
            raise ValueError(f"texts is {self.texts}, expected any of {', '.join(TEXTS)}")
        for name in ("chunk_ms", "stream_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}, expected a number > 0")

    def _check_scale_options(self) -> None:
        _check_at_least("ngrams", self.ngrams, LEAST_NGRAMS)
        if self.mode == "scale" and self.strategy != "paged_biglm":
            raise ValueError(f"strategy is {self.strategy!r}, expected paged_biglm with mode=scale")
        for name in ("data", "model", "plot"):
            if self.mode == "scale" and getattr(self, name):
                raise ValueError(
                    f"{name} is {getattr(self, name)!r} with mode=scale, expected none: its task is "
                    "synthetic, and its rows have no plot"
                )
        if self.folder is not None and not Path(self.folder).is_dir():
            raise ValueError(f"folder is {self.folder!r}, expected an existing folder")

    def _check_files(self) -> None:
        for name in ("data", "tokenizer", "lm", "word_lm", "lexicon", "model", "manifest"):
            path = getattr(self, name)
            if path is None:
                continue
            if self.data is None and self.model is None:
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
