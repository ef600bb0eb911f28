"""The task that needs no files: everything is drawn from a seed, so that anybody can repeat a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from nemo_gpu_decoding.bench.cache import cached
from nemo_gpu_decoding.bench.emissions import FRAME_SECONDS, EmissionModel, draw_confusions, draw_groups
from nemo_gpu_decoding.bench.estimate import write_witten_bell
from nemo_gpu_decoding.bench.language import Language, make_language
from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.task import TOKEN_OFFSET, Task, spelled_by
from nemo_gpu_decoding.vocabulary import WORD_START, Vocabulary

GENERATOR_VERSION = 2  # part of the names of cached LMs; raise it when another text is drawn
FRAMES_PER_WORD = 5.5  # on average
MOST_DRAWS = 100  # batches drawn before giving up on utterances of the wanted length


def synthetic_task(
    options: BenchOptions, *, mutual: bool = False, graph_sentences: int | None = None
) -> Task:
    """Utterances of a made-up language (see `language.py`), posteriors (`emissions.py`) and LMs.

    Args:
        mutual: tokens are mistaken for each other, in groups; else in one direction.
        graph_sentences: estimate the word LM from so many sentences, and leave out the token LM.
    """
    rng = np.random.default_rng(options.seed)
    language, confusions = draw_language(options, rng, mutual=mutual)
    task = spoken_task(language, confusions, options, rng)
    sentences = options.sentences if graph_sentences is None else graph_sentences
    lm = _token_lm(language, options) if graph_sentences is None else None
    return replace(task, lm=lm, word_lm=_word_lm(language, options, sentences))


def spoken_task(
    language: Language,
    confusions: list[np.ndarray],
    options: BenchOptions,
    rng: np.random.Generator,
) -> Task:
    """Utterances of a language and their posteriors, without LMs."""
    spoken, utterances = _utterances(language, EmissionModel(confusions, rng), options, rng)
    log_probs, lengths = _pad(utterances)
    return Task(
        name=f"synthetic-v{options.vocab_size}-b{options.batch}-seed{options.seed}",
        log_probs=log_probs,
        lengths=lengths,
        frame_seconds=FRAME_SECONDS,
        texts=[" ".join(sentence) for sentence in spoken],
        tokens=[language.spell(sentence) for sentence in spoken],
        vocabulary=Vocabulary(tuple(language.pieces), "bpe", spelled_by(language.lexicon)),
        lexicon=language.lexicon,
        lm=None,
        word_lm=None,
    )


def draw_language(
    options: BenchOptions,
    rng: np.random.Generator,
    *,
    mutual: bool = False,
    words: int | None = None,
) -> tuple[Language, list[np.ndarray]]:
    """The language, of so many words (None: see `make_language`), and per piece those that it is
    mistaken for."""
    language = make_language(options.vocab_size, rng, words=words)
    starts_word = np.array([piece.startswith(WORD_START) for piece in language.pieces])
    draw = draw_groups if mutual else draw_confusions
    return language, draw(starts_word, rng)


def _utterances(
    language: Language, emissions: EmissionModel, options: BenchOptions, rng: np.random.Generator
) -> tuple[list[list[str]], list[np.ndarray]]:
    """Sentences and their posteriors, as many as `batch`, of the lengths that the options allow."""
    spoken: list[list[str]] = []
    utterances: list[np.ndarray] = []
    words = (
        max(1, int(options.min_frames / FRAMES_PER_WORD)),
        max(2, int(options.max_frames / FRAMES_PER_WORD)),
    )
    for _ in range(MOST_DRAWS):
        for sentence in language.sentences(options.batch, rng, words):
            posteriors = emissions.emit(language.spell(sentence))
            if options.min_frames <= len(posteriors) <= options.max_frames:
                spoken.append(sentence)
                utterances.append(posteriors)
            if len(spoken) == options.batch:
                return spoken, utterances
    raise ValueError(
        f"min_frames is {options.min_frames} and max_frames {options.max_frames}: hardly any utterance "
        "has such a length, expected a wider range"
    )


def _pad(utterances: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack [T, V+1] matrices to [B, T, V+1]; padded frames say blank."""
    lengths = [len(utterance) for utterance in utterances]
    batch = np.full((len(utterances), max(lengths), utterances[0].shape[1]), -30.0, np.float32)
    batch[:, :, -1] = 0.0
    for row, utterance in zip(batch, utterances, strict=True):
        row[: len(utterance)] = utterance
    return torch.from_numpy(batch), torch.tensor(lengths)


def _token_lm(language: Language, options: BenchOptions) -> Path:
    """Token ARPA of the language, estimated once from sentences that are not in the task."""

    def estimate(path: Path) -> None:
        text = _lm_text(language, options, options.sentences)
        spelled = ([chr(t + TOKEN_OFFSET) for t in language.spell(s)] for s in text)
        everything = (chr(t + TOKEN_OFFSET) for t in range(options.vocab_size))
        write_witten_bell(spelled, options.lm_order, path, words=everything)

    return cached(f"{_lm_key(options, options.sentences)}-tok{options.lm_order}.arpa", estimate)


def _word_lm(language: Language, options: BenchOptions, sentences: int) -> Path:
    """Word ARPA of the language, likewise."""

    def estimate(path: Path) -> None:
        text = _lm_text(language, options, sentences)
        write_witten_bell(text, 3, path, words=language.lexicon)

    return cached(f"{_lm_key(options, sentences)}-word3.arpa", estimate)


def _lm_text(language: Language, options: BenchOptions, sentences: int) -> list[list[str]]:
    return language.sentences(sentences, np.random.default_rng(options.seed + 1), (5, 40))


def _lm_key(options: BenchOptions, sentences: int) -> str:
    return f"synthetic-v{GENERATOR_VERSION}-{options.vocab_size}-{options.seed}-{sentences}"
