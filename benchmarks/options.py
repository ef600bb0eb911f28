"""Options of `python -m benchmarks`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from pathlib import Path

from nemo_gpu_decoding.checks import FieldError, check_choice, check_int, check_number
from nemo_gpu_decoding.graph.csr import NEMO_NAMES

STRATEGIES = ("flexctc_beam", "alsd_pp", "aes_pp", "cuda_wfst", "paged_biglm")
TRANSDUCER_STRATEGIES, GRAPH_STRATEGIES = STRATEGIES[1:3], STRATEGIES[3:]
PEERS = ("nemo", "flashlight", "pyctcdecode", "kaldi_decoder", "riva", "small_lm", "eager")
ASKED_PEERS = (
    "large_lm",
    "let",
    "two_pass",
    "bounded_eager",
    "eager_groups",
    "greedy_fusion",
    "topologies",
    "word_graph",
    "unbatched",
    "one_thread",
    "flashlight_words",
    "on_cpu",
)  # measured only if `peers` has them
TASKS = ("peaked", "hard")
TRANSDUCERS = ("rnnt", "tdt")
MODES = ("batch", "live", "scale", "cluster")
PRECISIONS = ("bfloat16", "float16", "float32")
GRAPH_TOPOLOGIES = ("compact", "normal", "minimal")
LEAST_NGRAMS = 1000  # a smaller synthetic LM has no 3-grams
GPU_BATCHES = (1, 8, 32, 128)
LIVE_UTTERANCES = 32  # number of different utterances of the streams
MANY = 10**9
_CHOICES = {
    "peers": PEERS + ASKED_PEERS, "tasks": TASKS, "transducers": TRANSDUCERS
}  # fmt: skip
_LEAST = {
    "threads": 1, "repeats": 1, "utterances": 1, "phrases": 0, "many_phrases": 0, "check_utterances": 1,
    "encoder_layers": 1, "encoder_width": 8, "prediction_width": 8, "max_symbols": 1, "max_active": 1, "cache_mb": 1,
    "vocab_size": 8, "min_frames": 1, "max_frames": 1, "sentences": 1, "lm_order": 1,
    "ngrams": LEAST_NGRAMS, "continuations": 0, "partitions": 10, "partition_size": 1,
}  # fmt: skip
_ABOVE_ZERO = ("pair_seconds", "chunk_ms", "live_seconds")


@dataclass(frozen=True)
class Weights:
    """Weights in natural log, for all decoders. A small grid on the task itself gave the weights of each decoder."""

    lm_weight: float = 0.2
    beam_beta: float = 0.5
    boosting_weight: float = 0.2
    flashlight_lm_weight: float = 0.15
    pyctcdecode_lm_weight: float = 0.2
    pyctcdecode_beta: float = 0.5
    hotword_weight: float = 5.0
    # of log-probs against the costs of a word graph; its beams are in units of the scaled score
    acoustic_scale: float = 8.0
    # n-grams of the small LM / those of the word LM that it is pruned from; all words stay, so that it may be more
    small_share: float = 0.02
    graph_beams: tuple[int, ...] = (10, 13, 17, 25)


SYNTHETIC_WEIGHTS, SPEECH_WEIGHTS = Weights(), Weights(
    lm_weight=0.7, beam_beta=1.0, flashlight_lm_weight=0.7, pyctcdecode_lm_weight=0.7,
    pyctcdecode_beta=1.0, acoustic_scale=1.5, small_share=0.3, graph_beams=(8, 12, 17),
)  # fmt: skip


@dataclass
class BenchOptions:
    """Options of one benchmark run.

    Raises:
        ValueError: a value is out of range or two options contradict each other.
    """

    # The strategy under test: flexctc_beam (beside NeMo's beam_batch and greedy_batch, flashlight and
    # pyctcdecode), alsd_pp or aes_pp (beside NeMo's malsd_batch or maes_batch, and greedy_batch),
    # cuda_wfst (beside kaldi_decoder and Riva's decoder, on the same graph), paged_biglm (beside the
    # search of its small LM alone and eager composition; if peers names them, also beside large_lm, the
    # graph of the large LM; let, the other composition [LET]; two_pass, lattices of the small LM that the
    # large LM rescores; bounded_eager, eager composition with the bounds of lazy; eager_groups, that with
    # token groups). If peers names them, flexctc_beam, alsd_pp and aes_pp are also measured beside greedy_fusion
    # (NeMo's greedy_batch with the same LM and phrases), alsd_pp and aes_pp beside unbatched (NeMo's alsd and maes,
    # one utterance after the other), flexctc_beam beside word_graph (cuda_wfst with the word LM, compact and normal),
    # cuda_wfst beside its other CTC topologies and beside flashlight_words (flashlight with the same word LM),
    # paged_biglm with several threads beside one_thread, and on a GPU all beside on_cpu (the same search on the CPU).
    strategy: str = "flexctc_beam"
    # batch: whole utterances, compared with peers. live: latency and streams per core, with utterances that begin at
    # random times and share one decoder, see `streams`; compared with a call per stream and with NeMo's greedy
    # decoding. scale: time, memory and disk space of paged_biglm with an LM of any size, see `ngrams`. cluster: the
    # cost of Ray in `transcribe` per utterance, see `partitions`.
    mode: str = "batch"
    # cpu, cuda or cuda:N. A GPU is measured with several batch sizes, for decoders alone and after an encoder.
    device: str = "cpu"
    # Inputs: peaked (peaked emissions of an artificial language, drawn from `seed`), hard (flat emissions of a small
    # checkpoint for read English). For other inputs see `data` and `model`.
    tasks: list[str] = field(default_factory=lambda: list(TASKS))
    # Decoders to compare with. A decoder that is not installed gets a row with this note.
    peers: list[str] = field(default_factory=lambda: list(PEERS))
    # Output file: header and rows as JSON. In a folder the file is <strategy>-<device>-<date>.json.
    out: str | None = None
    # Notes about the run, copied into the header of the result.
    note: str | None = None

    # Beam sizes K.
    beams: list[int] = field(default_factory=lambda: [4, 8])
    # For word graphs in place of `beams`: beams by which a hypothesis may exceed the best cost, natural log. []:
    # values that suit the task.
    graph_beams: list[int] = field(default_factory=list)
    # CPU threads of every decoder that can use more than one.
    threads: int = 1
    # Number of alternating measurements of a peer and the strategy; medians are reported.
    repeats: int = 3
    # Maximum seconds of the repetitions of a pair; a peer may take a minute for one pass.
    pair_seconds: float = 3.0
    # Maximum number of utterances; `data`, `manifest` and speech may have fewer. null: 8, transducers 2, mode=live 32.
    utterances: int | None = None
    # Number of phrases in the rows with boosting; the first half occurs in the references, if possible.
    phrases: int = 200
    # Number of phrases in the scaling row; 0 omits this row.
    many_phrases: int = 20_000
    # Measure memory growth with K, compile time and start time of flexctc_beam, each in a fresh process.
    probes: bool = False
    # For word graphs: maximum number of hypotheses per frame.
    max_active: int = 10_000
    # For paged_biglm: limits of the LM contexts that are expanded per graph state, 0 = no limit; each gives a row
    # with the largest beam, compared with the search with the default limit, 16.
    group_sizes: list[int] = field(default_factory=lambda: [1, 4])
    # For paged_biglm on a GPU: MB of GPU memory for the arcs of an LM in host memory. The row has the largest beam,
    # and is compared with the same LM in GPU memory. LMs with more than 62,500 arcs per MB exceed this memory.
    cache_mb: int = 1
    # For word graphs: CTC topology; compact, normal or minimal.
    topology: str = "compact"
    # For transducers: maximum number of tokens per frame, max_symbols of alsd_pp and NeMo's malsd_batch.
    max_symbols: int = 10
    # Kinds of transducers to measure, rnnt and tdt.
    transducers: list[str] = field(default_factory=lambda: list(TRANSDUCERS))

    # Batch sizes B; a batch of B is the first B utterances. []: on a GPU 1, 8, 32 and 128, on a CPU all utterances.
    batches: list[int] = field(default_factory=list)
    # On a GPU: utterances that are compared with a peer, which decodes each of them alone.
    check_utterances: int = 32
    # Also measure encoder and decoder together. null: on a GPU.
    end_to_end: bool | None = None
    # The encoder's arithmetic: bfloat16, float16 (autocast) or float32.
    encoder_precision: str = "bfloat16"
    # Without `model`: layers of the encoder, which has random weights. Its output is discarded; the decoders read the
    # task's log-probs. 17 and 512 are a FastConformer "large".
    encoder_layers: int = 17
    # Without `model`: its width. For transducers of peaked also D, the size of the encoder's output.
    encoder_width: int = 512
    # For transducers of peaked: H, the size of the LSTM prediction network and of the joint.
    prediction_width: int = 640

    # In place of `tasks`: .npz with log_probs [B, T, V+1], lengths [B], tokens [B, L] (-1 = padding),
    # texts [B] and frame_seconds.
    data: str | None = None
    # With `data`: SentencePiece model, or a text file with one piece per line.
    tokenizer: str | None = None
    # In place of `tasks`: a model (.nemo) that encodes the speech of `manifest`: transducer or hybrid for alsd_pp and
    # aes_pp, else CTC or hybrid.
    model: str | None = None
    # With `model`: a NeMo manifest with references.
    manifest: str | None = None
    # With `data` or `model`: token-level n-gram LM, ARPA or ARPA.gz in NeMo's encoding (chr(id + 100)).
    lm: str | None = None
    # With `data` or `model`: word-level ARPA or ARPA.gz, for peers that read words, for phrases, and for
    # word graphs.
    word_lm: str | None = None
    # With `data`: lines "word<TAB>piece piece ...", for phrases, for peers that read words, and for word
    # graphs, which otherwise spell words with the tokenizer.
    lexicon: str | None = None

    # Synthetic: number of tokens V, without the blank.
    vocab_size: int = 1024
    # Synthetic: shortest utterance, in frames of 80 ms.
    min_frames: int = 125
    # Synthetic: longest utterance.
    max_frames: int = 375
    # Synthetic: number of sentences from which the LMs are estimated. null: 12,000; for word graphs 100,000, which
    # give a graph of 500,000 n-grams.
    sentences: int | None = None
    # Synthetic and speech: n of the token n-gram LM.
    lm_order: int = 6
    # Synthetic: the seed of the language.
    seed: int = 1

    # For mode=live: mean numbers of simultaneous utterances; each gives rows with the largest beam.
    streams: list[int] = field(default_factory=lambda: [256])
    # For mode=live: length of a chunk in milliseconds; a whole number of frames.
    chunk_ms: float = 400.0
    # For mode=live: seconds of simulated time.
    live_seconds: float = 10.0

    # For mode=scale: approximate number of n-grams of the artificial LM; it needs 80 bytes of disk per n-gram.
    ngrams: int = 100_000_000
    # For mode=scale: maximum number of 3-grams that go on from a 2-gram. 0: as many as there are. With 4 the
    # default size has 18 contexts per 100 n-grams, about as many as LMs of text; else 1.4.
    continuations: int = 0
    # For mode=scale and mode=cluster: folder of temporary files, which are deleted at the end. null: the system's
    # folder for temporary files.
    folder: str | None = None

    # For mode=cluster: partitions of a run. It is decoded without Ray, by one worker, by two workers, and by an
    # encoding and a searching worker. Each run is repeated `repeats` times; the fastest one counts.
    partitions: int = 60
    # For mode=cluster: utterances in a partition.
    partition_size: int = 100

    # Weights in place of the tuned ones, such as weights.lm_weight=0.3: lm_weight, boosting_weight (of the strategy,
    # and NeMo's ngram_lm_alpha and boosting_tree_alpha), beam_beta (both, per token, with an LM);
    # flashlight_lm_weight; pyctcdecode_lm_weight, pyctcdecode_beta (per word), hotword_weight; acoustic_scale (of word
    # graphs); small_share (of paged_biglm).
    weights: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("strategy", self.strategy, STRATEGIES)
        check_choice("mode", self.mode, MODES)
        check_choice("encoder_precision", self.encoder_precision, PRECISIONS)
        for name, choices in _CHOICES.items():
            values = getattr(self, name)
            unknown = [value for value in values if value not in choices]
            if unknown or not (values or name == "peers"):
                seen = ", ".join(unknown) or "nothing"
                raise ValueError(f"{name} holds {seen}, expected any of {', '.join(choices)}")
        for name in ("beams", "graph_beams", "group_sizes", "batches", "streams"):
            values, may_be_empty = getattr(self, name), name in ("graph_beams", "group_sizes", "batches")
            least = 0 if name == "group_sizes" else 1
            if not (values or may_be_empty) or min(values, default=1) < least:
                expected = f"integers >= {least}"
                raise FieldError(name, values, expected if may_be_empty else f"one or more {expected}")
        for name, low in _LEAST.items():
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), low, MANY)
        check_int("max_frames", self.max_frames, self.min_frames, MANY)
        for name in _ABOVE_ZERO:
            check_number(name, getattr(self, name), above_zero=True)
        for name, value in self.weights.items():
            check_choice("weights", name, [field.name for field in fields(Weights) if field.name != "graph_beams"])
            is_factor = name in ("acoustic_scale", "small_share")
            check_number(f"weights.{name}", value, above_zero=is_factor, negative=not is_factor)
        if self.weights.get("small_share", 1) > 1:
            raise FieldError("weights.small_share", self.weights["small_share"], "a number in (0, 1]")
        check_choice("topology", NEMO_NAMES.get(self.topology, self.topology), GRAPH_TOPOLOGIES)
        if self.encoder_width % 8:
            raise FieldError("encoder_width", self.encoder_width, "a multiple of 8")
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise FieldError("device", self.device, "cpu, cuda or cuda:N")
        self._check_combinations()
        self._check_files()

    @property
    def batch_sizes(self) -> list[int]:
        """`batches`, or those of a GPU; []: all utterances are one batch."""
        return self.batches or (list(GPU_BATCHES) if self.device != "cpu" else [])

    @property
    def most_utterances(self) -> int:
        """Maximum number of utterances of a task."""
        some = 2 if self.strategy in TRANSDUCER_STRATEGIES else 8
        wanted = self.utterances or (LIVE_UTTERANCES if self.mode == "live" else some)
        return max(wanted, *self.batch_sizes, 0)

    def _check_combinations(self) -> None:
        if self.mode == "scale":
            if self.strategy != "paged_biglm":
                raise FieldError("strategy", self.strategy, "paged_biglm with mode=scale")
            for name in ("data", "model"):
                if getattr(self, name):
                    expected = "none: its LM is made up"
                    raise FieldError(name, getattr(self, name), expected, "with mode=scale")
        if self.mode == "cluster" and (self.strategy, self.device, len(self.tasks)) != ("flexctc_beam", "cpu", 1):
            raise FieldError("mode", self.mode, "strategy=flexctc_beam, device=cpu and one of tasks with it")
        if self.strategy in TRANSDUCER_STRATEGIES and self.data:
            raise FieldError("data", self.data, "model= and manifest=", f"with strategy={self.strategy}")
        if self.model and self.data:
            raise FieldError("model", self.model, "one of both", "with data=")
        for name in ("tokenizer", "lexicon"):
            if self.model and getattr(self, name):
                raise FieldError(name, getattr(self, name), "none: it brings its own", "with model=")
        if (self.model is None) != (self.manifest is None):
            raise ValueError("model and manifest go together, expected both or neither")

    def _check_files(self) -> None:
        for name in ("data", "tokenizer", "lm", "word_lm", "lexicon", "model", "manifest"):
            path = getattr(self, name)
            if path is not None and self.data is None and self.model is None:
                raise FieldError(name, path, "none: tasks bring their own", "without data= or model=")
            if path is not None and not Path(path).is_file():
                raise FieldError(name, path, "an existing file")
        if self.out is not None and not Path(self.out).absolute().parent.is_dir():
            raise FieldError("out", self.out, "a file in an existing folder")
        if self.folder is not None and not Path(self.folder).is_dir():
            raise FieldError("folder", self.folder, "an existing folder")
