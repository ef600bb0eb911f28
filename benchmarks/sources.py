"""Sources of tasks: two built-in tasks, or the user's files.

`peaked` has peaked posteriors of an artificial language, drawn from a seed. `hard` has flat posteriors of a small
checkpoint for read English (`assets/hard_speech`).
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.files import cached, content_key, plain_file
from benchmarks.language import FRAME_SECONDS, SUCCESSORS, EmissionModel, Language, draw_confusions, make_language
from benchmarks.options import GRAPH_STRATEGIES, SPEECH_WEIGHTS, TRANSDUCER_STRATEGIES, BenchOptions
from benchmarks.synthetic_transducer import as_transducer
from benchmarks.tasks import Task, Transducer, read_lexicon, spelled_by, spelling_vocabulary, transducer_of, unigrams
from nemo_gpu_decoding import Vocabulary, estimate_ngram_lm, write_arpa
from nemo_gpu_decoding.checks import FieldError
from nemo_gpu_decoding.fusion.ngram import nemo_symbol

ARRAYS = ("log_probs", "lengths", "tokens", "texts", "frame_seconds")
FRAMES_PER_WORD = 5.5  # of the artificial language, on average
MOST_DRAWS = 100  # batches drawn before giving up on utterances of the wanted length
GENERATOR_VERSION = 3  # part of the names of cached LMs; raise it when another text is drawn
SPEECH = Path(__file__).resolve().parents[1] / "assets" / "hard_speech"


def make_tasks(options: BenchOptions) -> list[Task]:
    """The tasks of the options; for transducers one of each kind, unless `model` is given.

    Raises:
        ValueError: files lack something or do not fit each other, or the model has no such head.
    """
    most = options.most_utterances
    if options.data:
        tasks = [read_task(options)]
    elif options.model:
        tasks = [model_task(options)]
    else:
        kinds = options.transducers if options.strategy in TRANSDUCER_STRATEGIES else [None]
        make = {"peaked": peaked_task, "hard": hard_task}
        tasks = [make[name](options, kind) for name in options.tasks for kind in kinds]
        if options.device != "cpu":
            tasks = [task.repeated(max(most, len(task.texts))) for task in tasks]
    chosen: dict[str, Any] = {**options.weights}
    if options.graph_beams:
        chosen["graph_beams"] = tuple(options.graph_beams)
    return [replace(t.first(most), weights=replace(t.weights, **chosen)) for t in tasks]


# --------------------------------------------------------------------------------------------- hard


def hard_task(options: BenchOptions, kind: str | None) -> Task:
    """Posteriors of a small checkpoint for read English; they are flat, and greedy decoding has a WER of 51 %."""
    tensors, metadata = read_speech("emissions" if kind is None else "transducers")
    rows = tensors["log_probs" if kind is None else "encoder_output"].float()
    (pieces, lexicon), transducer, weights = speech_lexicon(), None, SPEECH_WEIGHTS
    if kind is not None:
        own = {key.partition(".")[2]: t for key, t in tensors.items() if key.startswith(f"{kind}.")}
        transducer = transducer_of(own, tuple(json.loads(metadata[f"{kind}.durations"])), kind)
        weights = replace(weights, lm_weight=0.4)
    task = Task.of(
        "hard" if kind is None else f"hard-{kind}", rows.split(tensors["lengths"].tolist()),
        json.loads(metadata["texts"]), spelling_vocabulary(pieces, lexicon), lexicon=lexicon,
        frame_seconds=json.loads(metadata["frame_seconds"]), weights=weights, transducer=transducer,
    )  # fmt: skip
    return _with_lms(task, options, f"speech-{content_key(SPEECH / 'lm_text.txt.gz')}", speech_text)


def read_speech(name: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and metadata of a file of `assets/hard_speech`."""
    from safetensors import safe_open

    with safe_open(SPEECH / f"{name}.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118


def speech_text() -> list[list[str]]:
    """Sentences of the speech's books that are not among its utterances."""
    text = gzip.decompress((SPEECH / "lm_text.txt.gz").read_bytes()).decode()
    return [line.split() for line in text.splitlines()]


def speech_lexicon() -> tuple[list[str], dict[str, tuple[int, ...]]]:
    """Pieces, and the words that they spell."""
    pieces = json.loads(read_speech("emissions")[1]["pieces"])
    return pieces, read_lexicon(plain_file(SPEECH / "lexicon.txt.gz"), pieces)


def speech_language(rng: np.random.Generator) -> Language:
    """The words of the speech's books, by frequency, with the words that follow them most often."""
    counts: Counter[str] = Counter()
    after: dict[str, Counter[str]] = defaultdict(Counter)
    for sentence in speech_text():
        counts.update(sentence)
        for word, successor in itertools.pairwise(sentence):
            after[word][successor] += 1
    words = [word for word, _ in counts.most_common()]
    index = {word: i for i, word in enumerate(words)}
    probabilities = np.array([counts[word] for word in words]) / counts.total()
    successors = rng.choice(len(words), (len(words), SUCCESSORS), p=probabilities)
    for i, word in enumerate(words):
        likely = [index[successor] for successor, _ in after[word].most_common(SUCCESSORS)]
        successors[i, : len(likely)] = likely
    pieces, lexicon = speech_lexicon()
    return Language(pieces, {word: lexicon[word] for word in words}, probabilities, successors)


# ------------------------------------------------------------------------------------------- peaked


def peaked_task(options: BenchOptions, kind: str | None) -> Task:
    """Utterances of an artificial language (`language.py`), their posteriors, and LMs of other sentences."""
    rng = np.random.default_rng(options.seed)
    language = make_language(options.vocab_size, rng)
    task = spoken_task(language, options, rng)
    count = options.sentences or (100_000 if options.strategy in GRAPH_STRATEGIES else 12_000)

    def text() -> list[list[str]]:
        return language.sentences(count, np.random.default_rng(options.seed + 1), (5, 40))

    key = f"synthetic-v{GENERATOR_VERSION}-{options.vocab_size}-{options.seed}-{count}"
    task = _with_lms(task, options, key, text)
    return task if kind is None else as_transducer(task, confusions(language, options), options, kind)


def confusions(language: Language, options: BenchOptions) -> list[np.ndarray]:
    return draw_confusions(language.pieces, np.random.default_rng(options.seed + 3))


def spoken_task(language: Language, options: BenchOptions, rng: np.random.Generator) -> Task:
    """Utterances of a language and their posteriors, without LMs.

    Raises:
        ValueError: utterances are hardly ever as long as the options want them.
    """
    emissions = EmissionModel(confusions(language, options), rng)
    wanted = options.most_utterances
    spoken: list[list[str]] = []
    rows: list[torch.Tensor] = []
    words = tuple(
        max(least, int(frames / FRAMES_PER_WORD))
        for least, frames in ((1, options.min_frames), (2, options.max_frames))
    )
    for _ in range(MOST_DRAWS):
        for sentence in language.sentences(wanted, rng, (words[0], words[1])):
            posteriors = emissions.emit(language.spell(sentence))
            if options.min_frames <= len(posteriors) <= options.max_frames and len(rows) < wanted:
                spoken.append(sentence)
                rows.append(torch.from_numpy(posteriors))
        if len(rows) == wanted:
            break
    else:
        raise ValueError(
            f"min_frames is {options.min_frames} and max_frames {options.max_frames}: hardly any "
            "utterance has such a length, expected a wider range"
        )
    texts, vocabulary = map(" ".join, spoken), spelling_vocabulary(language.pieces, language.lexicon)
    return Task.of(
        "peaked", rows, list(texts), vocabulary, lexicon=language.lexicon, frame_seconds=FRAME_SECONDS
    )  # fmt: skip


def _with_lms(task: Task, options: BenchOptions, key: str, text: Callable[[], list[list[str]]]) -> Task:
    """The task with a word trigram and, for token-level strategies, a token LM; each is estimated once."""

    least = (1, 1, 2)  # n-grams of order 3 and up that were seen once are left out

    def tokens(path: Path) -> None:
        spelled = ([nemo_symbol(token) for word in sentence for token in task.lexicon[word]] for sentence in text())
        everything = [nemo_symbol(token) for token in range(task.vocab_size)]
        order = options.lm_order
        write_arpa(estimate_ngram_lm(spelled, order, symbols=everything, min_counts=least[:order]), path)

    def words(path: Path) -> None:
        write_arpa(estimate_ngram_lm(text(), 3, symbols=task.lexicon, min_counts=least), path)

    lm = None
    if options.strategy not in GRAPH_STRATEGIES:
        lm = cached(f"{key}-tok{options.lm_order}.arpa", tokens)
    return replace(task, lm=lm, word_lm=cached(f"{key}-word3.arpa", words))


# ------------------------------------------------------------------------------------ the user's own


def read_task(options: BenchOptions) -> Task:
    """The task of the files that the options name.

    Raises:
        ValueError: files lack something or do not fit each other.
    """
    assert options.data is not None
    with np.load(options.data) as file:
        missing = ", ".join(sorted(set(ARRAYS) - set(file)))
        if missing:
            raise ValueError(f"data is {options.data!r}, which lacks the arrays {missing}")
        arrays = {name: file[name] for name in file}
    vocab_size = arrays["log_probs"].shape[-1] - 1
    if options.tokenizer is None:
        raise FieldError("tokenizer", None, "the model that spells the tokens of data=")
    if Path(options.tokenizer).suffix == ".model":
        vocabulary = Vocabulary.from_sentencepiece(options.tokenizer)
    else:
        lines = Path(options.tokenizer).read_text(encoding="utf-8").splitlines()
        vocabulary = Vocabulary.from_pieces(lines)
    if len(vocabulary) != vocab_size:
        raise ValueError(f"tokenizer has {len(vocabulary)} pieces, expected {vocab_size} as in data=")
    lexicon = read_lexicon(options.lexicon, vocabulary.pieces) if options.lexicon else {}
    if lexicon:
        vocabulary = replace(vocabulary, encode=spelled_by(lexicon))
    return Task(
        name=Path(options.data).stem,
        inputs=torch.from_numpy(arrays["log_probs"].astype(np.float32)),
        lengths=torch.from_numpy(arrays["lengths"].astype(np.int64)),
        texts=[str(text) for text in arrays["texts"]],
        tokens=[row[row >= 0].tolist() for row in arrays["tokens"]],
        vocabulary=vocabulary,
        lexicon=lexicon,
        frame_seconds=float(arrays["frame_seconds"]),
        lm=plain_file(options.lm),
        word_lm=plain_file(options.word_lm),
    )


def model_task(options: BenchOptions) -> Task:
    """The speech of a manifest, encoded once by a model."""
    from nemo_gpu_decoding.manifest import read_manifest, references_of
    from nemo_gpu_decoding.nemo_plugin.model import Model, TransducerHead

    assert options.model
    assert options.manifest
    utterances = read_manifest(Path(options.manifest))
    texts, files = references_of(utterances), [utterance.audio for utterance in utterances]
    model = Model.load(options.model, device=options.device)
    head = model.head("rnnt" if options.strategy in TRANSDUCER_STRATEGIES else "ctc")
    rows, vocabulary = [encoded.inputs for encoded in head.encoded(files)], head.vocabulary()
    transducer = None
    if isinstance(head, TransducerHead):
        networks, nemo = head.networks(), model.model
        transducer = Transducer(
            "tdt" if networks.durations else "rnnt", networks.durations, lambda: networks,
            lambda: (nemo.decoder, nemo.joint),
        )  # fmt: skip
    word_lm = plain_file(options.word_lm)
    words = {word for text in texts for word in text.split()}
    words |= {word for word in unigrams(word_lm) if not word.startswith("<")} if word_lm else set()
    return Task.of(
        Path(options.model).stem, [torch.from_numpy(row) for row in rows], texts, vocabulary,
        lexicon={word: tuple(vocabulary.tokenize(word)) for word in sorted(words)}, frame_seconds=model.frame_seconds,
        lm=plain_file(options.lm), word_lm=word_lm, transducer=transducer,
    )  # fmt: skip
