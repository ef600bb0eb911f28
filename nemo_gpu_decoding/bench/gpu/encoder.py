"""What stands before the decoders in end-to-end rows, and the task that goes with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from nemo_gpu_decoding.bench.cache import plain_file
from nemo_gpu_decoding.bench.gpu.place import Place
from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.sources import make_task
from nemo_gpu_decoding.bench.task import Task, phrase_lexicon
from nemo_gpu_decoding.bench.word_graph.sources import word_graph_task
from nemo_gpu_decoding.bench.word_graph.strategies import WORD_GRAPH_STRATEGIES

if TYPE_CHECKING:
    from nemo_gpu_decoding.bench.peers.nemo_encoder import SpeechModel

MEL_BANDS = 80
SUBSAMPLING = 8  # feature frames per encoder frame
AT_ONCE = 32  # utterances that a model reads together before anything is measured

Batch = tuple[torch.Tensor, torch.Tensor]  # log-probs [B, T, V + 1] and lengths [B]


class Encoder(Protocol):
    """Makes the log-probs of a batch, again and again."""

    name: str

    def prepare(self, task: Task) -> None:
        """Get ready for the utterances of a task; not timed."""
        ...

    def encode(self) -> Batch:
        """From features or samples, which lie on the GPU, to log-probs. This is what gets timed."""
        ...


def encoder_and_task(options: BenchOptions, place: Place) -> tuple[Encoder | None, Task]:
    """The encoder of the end-to-end rows, if there are any, and the task.

    Raises:
        ValueError: the model has no CTC head, or its speech has another sample rate.
    """
    if options.model:
        return _model_and_task(options, place)
    if not options.data:
        options = replace(options, batch=max(options.batch, *options.batches))
    encoder = RandomEncoder(options, place) if options.end_to_end else None
    reads_words = options.strategy in WORD_GRAPH_STRATEGIES
    return encoder, word_graph_task(options) if reads_words else make_task(options)


class RandomEncoder:
    """A FastConformer with random weights: it takes the time of a trained one, and says nothing.

    So its output is thrown away, and the decoders go on with the task's log-probs.
    """

    def __init__(self, options: BenchOptions, place: Place) -> None:
        size = f"{options.encoder_layers} layers x {options.encoder_width}"
        self.name = f"FastConformer, {size}, {options.encoder_precision}, random weights"
        self._options = options
        self._device = place.device
        self._network: torch.nn.Module | None = None

    def prepare(self, task: Task) -> None:
        from nemo_gpu_decoding.bench.peers.nemo_encoder import random_conformer

        if self._network is None:
            options = self._options
            network = random_conformer(
                options.encoder_layers, options.encoder_width, task.vocab_size, MEL_BANDS, SUBSAMPLING
            )
            self._network = network.to(self._device)
        frames = int(task.lengths.max()) * SUBSAMPLING
        generator = torch.Generator().manual_seed(0)
        features = torch.randn(len(task.texts), MEL_BANDS, frames, generator=generator)
        self._features = features.to(self._device)
        self._feature_lengths = (task.lengths * SUBSAMPLING).to(self._device)
        self._batch = task.log_probs, task.lengths

    def encode(self) -> Batch:
        assert self._network is not None
        with torch.inference_mode(), precision(self._options, self._device):
            self._network(self._features, self._feature_lengths)
        return self._batch


class ModelEncoder:
    """A trained model: the decoders get its log-probs of real speech."""

    def __init__(self, model: SpeechModel, samples: torch.Tensor, sample_lengths: torch.Tensor) -> None:
        self.name = model.name
        self._model = model
        self._all = samples, sample_lengths

    def prepare(self, task: Task) -> None:
        samples, lengths = (values[: len(task.texts)] for values in self._all)
        self._given = samples[:, : int(lengths.max())].contiguous(), lengths

    def encode(self) -> Batch:
        return self._model.log_probs(*self._given)


def precision(options: BenchOptions, device: torch.device) -> torch.autocast:
    """The encoder's arithmetic, as a context."""
    wanted = getattr(torch, options.encoder_precision)
    on = wanted != torch.float32
    return torch.autocast(device.type, dtype=wanted if on else torch.bfloat16, enabled=on)


def _model_and_task(options: BenchOptions, place: Place) -> tuple[ModelEncoder, Task]:
    """Read model and speech; the log-probs are made once, for all rows that measure decoders alone."""
    from nemo_gpu_decoding.bench.peers.nemo_encoder import SpeechModel, load_speech

    assert options.model
    assert options.manifest
    model = SpeechModel(options.model, place.device, lambda: precision(options, place.device))
    samples, sample_lengths, texts = load_speech(options.manifest, model.sample_rate, place.device)
    kept = slice(options.utterances)
    samples, sample_lengths, texts = samples[kept], sample_lengths[kept], texts[kept]
    log_probs, lengths = _in_parts(model, samples, sample_lengths)
    word_lm = plain_file(options.word_lm) if options.word_lm else None
    task = Task(
        name=Path(options.model).stem,
        log_probs=log_probs,
        lengths=lengths,
        frame_seconds=model.frame_seconds,
        texts=texts,
        tokens=[model.vocabulary.tokenize(text) if text.strip() else [] for text in texts],
        vocabulary=model.vocabulary,
        lexicon=phrase_lexicon(texts, word_lm, model.vocabulary),
        lm=plain_file(options.lm) if options.lm else None,
        word_lm=word_lm,
    )
    return ModelEncoder(model, samples, sample_lengths), task


def _in_parts(model: SpeechModel, samples: torch.Tensor, lengths: torch.Tensor) -> Batch:
    parts = [
        model.log_probs(samples[i : i + AT_ONCE], lengths[i : i + AT_ONCE])
        for i in range(0, len(samples), AT_ONCE)
    ]
    frames = max(log_probs.shape[1] for log_probs, _ in parts)
    padded = [
        torch.nn.functional.pad(log_probs, (0, 0, 0, frames - log_probs.shape[1]))
        for log_probs, _ in parts
    ]
    return torch.cat(padded), torch.cat([part_lengths for _, part_lengths in parts])
