"""The encoder of end-to-end rows; only its time matters.

Its output is discarded, and the decoders read the task's inputs. Rows with and without it therefore decode the same
input, and random weights serve as well as trained ones.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.clock import Hardware
from benchmarks.options import TRANSDUCER_STRATEGIES, BenchOptions
from benchmarks.peers.base import Batch
from benchmarks.tasks import Task

MEL_BANDS = 80
SUBSAMPLING = 8  # feature frames per encoder frame


class Encoder(NamedTuple):
    name: str
    encode: Callable[[torch.Tensor, torch.Tensor], object]  # inputs [B, ..., N] and lengths [B]
    inputs_per_frame: int  # N of an encoder frame
    bands: tuple[int, ...] = ()  # of features

    def prepare(self, task: Task, hardware: Hardware, precision: str) -> Callable[[], Batch]:
        """A function to time: it encodes noise of the length of the task's audio, and returns the task's batch."""
        dtype, generator = getattr(torch, precision), torch.Generator().manual_seed(0)
        lengths = (task.lengths * self.inputs_per_frame).to(hardware.device)
        noise = torch.randn(len(task.texts), *self.bands, int(lengths.max()), generator=generator).to(hardware.device)
        is_lower = dtype != torch.float32

        def encode() -> Batch:
            lower = torch.autocast(hardware.device.type, dtype if is_lower else torch.bfloat16, is_lower)
            with torch.inference_mode(), lower:
                self.encode(noise, lengths)
            return task.inputs, task.lengths

        return encode


def make_encoder(options: BenchOptions, hardware: Hardware, vocab_size: int) -> Encoder:
    """The encoder of `model`, which reads samples; else a FastConformer with random weights, which reads features.

    For CTC its head follows, which makes log-probs.
    """
    has_head = options.strategy not in TRANSDUCER_STRATEGIES
    if not options.model:
        from benchmarks.peers.nemo import random_conformer

        layers, width = options.encoder_layers, options.encoder_width
        size = vocab_size if has_head else None
        network = random_conformer(layers, width, size, MEL_BANDS, SUBSAMPLING, hardware.device)
        name = f"FastConformer, {layers} layers x {width}, {options.encoder_precision}, random weights"
        return Encoder(name, network, SUBSAMPLING, (MEL_BANDS,))
    from nemo_gpu_decoding.nemo_plugin.model import Model

    loaded = Model.load(options.model, device=options.device)
    model: Any = loaded.model
    head = None if not has_head else model.ctc_decoder if loaded.is_hybrid else model.decoder
    samples_per_frame = round(loaded.frame_seconds * model.cfg.preprocessor.sample_rate)

    def encode(samples: torch.Tensor, lengths: torch.Tensor) -> None:
        features, frames = model.preprocessor(input_signal=samples, length=lengths)
        encoded = model.encoder(audio_signal=features, length=frames)[0]
        if head is not None:
            head(encoder_output=encoded)

    return Encoder(f"{Path(options.model).stem}, {options.encoder_precision}", encode, samples_per_frame)
