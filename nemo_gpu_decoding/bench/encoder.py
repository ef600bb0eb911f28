"""What stands before the decoders in end-to-end rows: from features or samples to log-probs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nemo_gpu_decoding.bench.clock import Place
from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.peers.base import Batch
from nemo_gpu_decoding.bench.tasks import Task

MEL_BANDS = 80
SUBSAMPLING = 8  # feature frames per encoder frame


class Encoder(NamedTuple):
    name: str
    # Given the utterances of a batch, what makes their log-probs, again and again; this is what gets
    # timed.
    prepare: Callable[[Task], Callable[[], Batch]]


def make_encoder(options: BenchOptions, place: Place, vocab_size: int) -> Encoder:
    """That of `model`, with the speech of `manifest`; else one with random weights."""
    wanted = getattr(torch, options.encoder_precision)
    on = wanted != torch.float32

    def precision() -> torch.autocast:
        dtype = wanted if on else torch.bfloat16
        return torch.autocast(place.device.type, dtype=dtype, enabled=on)

    if options.model:
        return model_encoder(options, place, precision)
    return random_encoder(options, place, precision, vocab_size)


def random_encoder(
    options: BenchOptions, place: Place, precision: Callable[[], torch.autocast], vocab_size: int
) -> Encoder:
    """A FastConformer with random weights: it takes the time of a trained one, and says nothing.

    So its output is thrown away, and the decoders go on with the task's log-probs.
    """
    from nemo_gpu_decoding.bench.peers.nemo import random_conformer

    layers, width = options.encoder_layers, options.encoder_width
    network = random_conformer(layers, width, vocab_size, MEL_BANDS, SUBSAMPLING).to(place.device)

    def prepare(task: Task) -> Callable[[], Batch]:
        frames = int(task.lengths.max()) * SUBSAMPLING
        generator = torch.Generator().manual_seed(0)
        features = torch.randn(len(task.texts), MEL_BANDS, frames, generator=generator).to(place.device)
        lengths = task.lengths.to(place.device) * SUBSAMPLING

        def encode() -> Batch:
            with torch.inference_mode(), precision():
                network(features, lengths)
            return task.inputs, task.lengths

        return encode

    size = f"{layers} layers x {width}"
    return Encoder(f"FastConformer, {size}, {options.encoder_precision}, random weights", prepare)


def model_encoder(options: BenchOptions, place: Place, precision: Callable[[], torch.autocast]) -> Encoder:
    """A trained model: the decoders get its log-probs of real speech.

    Raises:
        ValueError: a file of the manifest has another sample rate or several channels.
    """
    import soundfile

    from nemo_gpu_decoding.manifest import read_manifest
    from nemo_gpu_decoding.nemo_plugin.model import Model

    assert options.model
    loaded = Model.load(options.model, device=options.device)
    model: Any = loaded.model
    head = model.ctc_decoder if loaded.is_hybrid else model.decoder
    model.preprocessor.featurizer.dither = 0.0  # as NeMo's `transcribe`
    model.preprocessor.featurizer.pad_to = 0
    expected = int(model.cfg.preprocessor.sample_rate)
    signals = []
    for utterance in read_manifest(Path(options.manifest or "")):
        signal, rate = soundfile.read(utterance.path, dtype="float32")
        if rate != expected or signal.ndim != 1:
            raise ValueError(
                f"manifest is {options.manifest!r}, whose {utterance.name} has {rate} Hz and "
                f"{signal.ndim} channel(s), expected {expected} Hz and one"
            )
        signals.append(torch.from_numpy(signal))

    def prepare(task: Task) -> Callable[[], Batch]:
        own = signals[: len(task.texts)]
        samples = torch.nn.utils.rnn.pad_sequence(own, batch_first=True).to(place.device)
        lengths = torch.tensor([len(signal) for signal in own], device=place.device)

        def encode() -> Batch:
            with torch.inference_mode(), precision():
                features, frames = model.preprocessor(input_signal=samples, length=lengths)
                encoded, encoded_lengths = model.encoder(audio_signal=features, length=frames)
                return head(encoder_output=encoded).float(), encoded_lengths.long()

        return encode

    return Encoder(Path(options.model).stem, prepare)
