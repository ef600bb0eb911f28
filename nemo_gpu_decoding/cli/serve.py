"""`nemo-gpu-decoding serve`: live streams through one model, over WebSockets."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from nemo_gpu_decoding.cli import decoding
from nemo_gpu_decoding.live.interface import Address, Limits

if TYPE_CHECKING:
    from nemo_gpu_decoding.live.server import LiveServer

TOKEN_VARIABLE = "NEMO_GPU_DECODING_TOKEN"
EXAMPLES = (
    "model=model.nemo",
    "model=model.nemo lm=lm.arpa phrases=names.txt port=9000",
    "model=cache_aware.nemo strategy=alsd_pp max_streams=200 end_silence=0.6",
    "model=model.nemo host=0.0.0.0 token=...",
)
T = TypeVar("T")


@dataclass
class ServeOptions(Limits, Address, decoding.DecodingOptions):
    """Options of `serve`."""

    # Maximum number of streams in one step of encoder and decoder, >= 1.
    batch_size: int = 64
    # NeMo's pipeline: buffered for offline checkpoints, cache_aware for streaming checkpoints; auto: chosen by the
    # encoder's config.
    pipeline: str = "auto"
    # Buffered pipeline: seconds of new audio per step.
    chunk_seconds: float = 0.4
    # Buffered pipeline: seconds of past audio that the encoder reads again in each step.
    left_seconds: float = 1.6
    # Buffered pipeline: seconds of future audio that each step waits for. Less is faster and less accurate.
    right_seconds: float = 0.8
    # Seconds of silence that end an utterance, at most 60; below 0: utterances end only with the stream.
    end_silence: float = 0.8
    # Kaldi's endpointing rules, in place of end_silence: kaldi for the defaults, or single values, such as
    # {rule2: {min_trailing_silence: 0.8}}.
    rules: Any = None
    # Seconds that a step waits for chunks of other streams.
    tick_seconds: float = 0.02
    # Maximum n_best of a stream. null: 5 for beam searches, 1 for word graphs, which keep lattices if it is more.
    max_n_best: int | None = None

    def __post_init__(self) -> None:
        decoding.check_counts(self, "batch_size")


OPTIONS = ServeOptions


def run(options: ServeOptions) -> int:
    """Serve until interrupted; the address on stdout."""
    server = build_server(options)
    asyncio.run(_serve(server))
    return 0


def build_server(options: ServeOptions) -> LiveServer:
    """The server, with its model loaded and warmed up."""
    from nemo_gpu_decoding.live.batcher import Batcher
    from nemo_gpu_decoding.live.interface import warm_up
    from nemo_gpu_decoding.live.server import LiveServer

    token = options.token or os.environ.get(TOKEN_VARIABLE)
    address, limits = _fields_of(Address, replace(options, token=token)), _fields_of(Limits, options)
    recognizer = build_recognizer(options)
    print("warming up: compiling the code that is not in the cache", file=sys.stderr)
    warm_up(recognizer)
    gc.collect()  # the server freezes all objects that exist when it starts
    batcher = Batcher(recognizer, limits, batch_size=options.batch_size, tick_seconds=options.tick_seconds)
    return LiveServer(batcher, address)


def build_recognizer(options: ServeOptions) -> Any:
    """The model in NeMo's pipeline, with the strategy."""
    from nemo_gpu_decoding.nemo_plugin.restore import default_head
    from nemo_gpu_decoding.nemo_plugin.streaming.recognizer import PipelineOptions, PipelineRecognizer

    strategy = options.strategy
    if strategy is None and options.preset is None:
        strategy = decoding.DEFAULT_STRATEGY[default_head(options.model, verbose=options.verbose)]
    preset = decoding.decoding_config(strategy, options.preset, vars(options))
    config = decoding.with_decoding(preset, options)
    decoding.check_weights(config, options, has_own_phrases=True)
    return PipelineRecognizer.build(
        options.model, config, _fields_of(PipelineOptions, options), device=options.device, verbose=options.verbose
    )


def _fields_of(cls: type[T], options: ServeOptions) -> T:
    """A dataclass whose fields get the values of the options of the same names."""
    return cls(**{field.name: getattr(options, field.name) for field in fields(cast(Any, cls))})


async def _serve(server: LiveServer) -> None:
    serving = asyncio.create_task(server.serve())
    while not server.started and not serving.done():
        await asyncio.sleep(0.05)
    if server.started:
        print(f"serving {server.batcher.recognizer.strategy} on {server.url}", flush=True)
        print("stop it with Ctrl+C; open utterances are finished", file=sys.stderr)
    await serving
