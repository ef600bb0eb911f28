"""`nemo-gpu-decoding serve` decodes live audio streams from WebSockets with one model."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_gpu_decoding.cli import decoding
from nemo_gpu_decoding.live.interface import Address, Limits, PipelineOptions
from nemo_gpu_decoding.schema import checked_options, option

if TYPE_CHECKING:
    from nemo_gpu_decoding.live.server import LiveServer

TOKEN_VARIABLE = "NEMO_GPU_DECODING_TOKEN"
EXAMPLES = (
    "model=model.nemo",
    "model=model.nemo lm=lm.arpa phrases=names.txt port=9000",
    "model=cache_aware.nemo strategy=alsd_pp max_streams=200 end_silence=0.6",
    "model=model.nemo host=0.0.0.0 token=...",
)
FIRST = ("model", "host", "port", "token", "preset", "lm", "lm_weight", "phrases", "boosting_weight", "max_streams")


@checked_options
@dataclass
class ServeOptions(PipelineOptions, Limits, Address, decoding.DecodingOptions):
    """Options of `serve`."""

    # Maximum number of streams in one step of encoder and decoder, >= 1.
    batch_size: int = option(64, low=1)
    # Seconds that a step waits for chunks of other streams.
    tick_seconds: float = 0.02

    def check_rules(self) -> None:
        self.token = self.token or os.environ.get(TOKEN_VARIABLE)
        Address.check_rules(self)


OPTIONS = ServeOptions


def run(options: ServeOptions) -> int:
    """Run the live server until it is interrupted; print its URL to stdout."""
    server = build_server(options)
    asyncio.run(_serve(server))
    return 0


def build_server(options: ServeOptions) -> LiveServer:
    """Load the model, warm it up, and return the live server that uses it."""
    from nemo_gpu_decoding.live.batcher import Batcher
    from nemo_gpu_decoding.live.interface import warm_up
    from nemo_gpu_decoding.live.server import LiveServer

    address, limits = decoding.fields_of(Address, options), decoding.fields_of(Limits, options)
    recognizer = build_recognizer(options)
    print("warming up: compiling the code that is not in the cache", file=sys.stderr)
    warm_up(recognizer)
    gc.collect()  # the server freezes all objects that exist when it starts
    batcher = Batcher(recognizer, limits, batch_size=options.batch_size, tick_seconds=options.tick_seconds)
    return LiveServer(batcher, address)


def build_recognizer(options: ServeOptions) -> Any:
    """Load the model into a NeMo pipeline that decodes with the chosen strategy, and return its recognizer."""
    from nemo_gpu_decoding.nemo_plugin.restore import check_model_file, default_head, import_nemo, usable_device

    is_named = options.strategy is not None or options.preset is not None
    head = "ctc" if is_named else default_head(options.model, verbose=options.verbose)
    config = decoding.with_decoding(decoding.config_with_n_best(options, head, 1), options)
    decoding.check_weights(config, options, has_own_phrases=True)
    check_model_file(options.model)
    usable_device(options.device)
    import_nemo(options.verbose)  # hides messages of the next import
    from nemo_gpu_decoding.nemo_plugin.streaming.recognizer import PipelineRecognizer

    pipeline = decoding.fields_of(PipelineOptions, options)
    return PipelineRecognizer.build(options.model, config, pipeline, device=options.device, verbose=options.verbose)


async def _serve(server: LiveServer) -> None:
    serving = asyncio.create_task(server.serve())
    while not server.started and not serving.done():
        await asyncio.sleep(0.05)
    if server.started:
        print(f"serving {server.batcher.recognizer.strategy} on {server.url}", flush=True)
        print("stop it with Ctrl+C; open utterances are finished", file=sys.stderr)
    await serving
