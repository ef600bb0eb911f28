"""Search in NeMo's streaming by `conformer_stream_step`; `pipelines.py` has the inference pipelines.

For CTC models, NeMo takes the best label of each frame and ignores the decoding config. With a strategy of this
package, the same call searches: `previous_pred_out` carries the running search, and texts are the result if the audio
ended here. `register.py` lists the wrapped methods of NeMo.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import BoundArguments
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from nemo.utils import logging
from torch import Tensor

from nemo_gpu_decoding.nemo_plugin.ctc import CTCInfer, continued_streams
from nemo_gpu_decoding.nemo_plugin.register import STRATEGIES
from nemo_gpu_decoding.nemo_plugin.transducer import TransducerInfer


def ctc_search(model: Any) -> CTCInfer | None:
    """The decoder of a model's CTC head; None if its strategy is NeMo's."""
    decoding = model.ctc_decoding if hasattr(model, "ctc_decoder") else getattr(model, "decoding", None)
    infer = getattr(decoding, "decoding", None)
    return infer if isinstance(infer, CTCInfer) else None


def transducer_search(model: Any) -> TransducerInfer | None:
    """The decoder of a model's transducer head; None if its strategy is NeMo's."""
    infer = getattr(model.decoding, "decoding", None)
    return infer if isinstance(infer, TransducerInfer) else None


def stream_step(wrapped: Callable[..., Any], model: Any, call: BoundArguments) -> Any:
    """Replaces `ASRModuleMixin.conformer_stream_step`."""
    call.apply_defaults()
    is_ctc_head = hasattr(model, "ctc_decoder") and getattr(model, "cur_decoder", "ctc") == "ctc"
    is_ctc = is_ctc_head or hasattr(model.decoding, "ctc_decoder_predictions_tensor")
    infer = ctc_search(model) if is_ctc else None
    if infer is None or not call.arguments["return_transcription"]:
        return wrapped(*call.args, **call.kwargs)
    previous = call.arguments["previous_pred_out"]
    call.arguments["return_transcription"] = False  # NeMo would transcribe the greedy labels
    outputs: list[Tensor] = []
    head = model.ctc_decoder if is_ctc_head else model.decoder
    hook = head.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        labels, _, *others = wrapped(*call.args, **call.kwargs)
    finally:
        hook.remove()
    states: list[Any] = [None] * len(labels)
    lengths = torch.tensor([len(row) for row in labels])
    if previous is not None:
        lengths -= torch.tensor([len(row) for row in previous])
        states = [_state_of(row, b, infer.strategy) for b, row in enumerate(previous)]
    decoding = model.ctc_decoding if is_ctc_head else model.decoding
    with continued_streams(states):
        texts = decoding.ctc_decoder_predictions_tensor(outputs[0], lengths)
    for row, state in zip(labels, states, strict=True):
        row.search_state = state
    return (labels, texts, *others)


def _state_of(row: Tensor, b: int, strategy: str) -> Any:
    if not hasattr(row, "search_state"):
        raise ValueError(
            f"previous_pred_out[{b}] has no running search, expected what the last step with {strategy} "
            "returned, the same tensor"
        )
    return row.search_state


def transcribe_labels(wrapped: Callable[..., Any], batcher: Any, call: BoundArguments) -> Any:
    """Replaces `FrameBatchASR.transcribe`, which merges greedy labels; warns if the config has a search."""
    infer = ctc_search(batcher.asr_model)
    if infer is not None:
        logging.warning(
            f"the model decodes with strategy {infer.strategy}, but {type(batcher).__name__} takes the best label of "
            "every frame: the text is greedy. FrameBatchChunkedCTC and the buffered pipeline of "
            "nemo.collections.asr.inference search."
        )
    return wrapped(*call.args, **call.kwargs)


def construct_merging(wrapped: Callable[..., Any], batcher: Any, call: BoundArguments) -> None:
    """Replaces `BatchedFrameASRRNNT.__init__`, which merges texts from the alignments of a greedy search.

    A strategy of this package raises a ValueError. NeMo's script sets its own strategy, so that only the command line
    shows the strategy that the user has chosen.
    """
    wrapped(*call.args, **call.kwargs)
    infer = transducer_search(batcher.asr_model)
    strategy = _strategy_on_the_command_line() if infer is None else infer.strategy
    if strategy is not None:
        raise ValueError(
            f"strategy is {strategy}, but {type(batcher).__name__} merges the alignments of a greedy search; "
            f"asr_streaming_infer.py searches (++asr.decoding.strategy={strategy})"
        )


def _strategy_on_the_command_line() -> str | None:
    words = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    named = [word.partition("=")[2] for word in words if word.partition("=")[0].endswith(("strategy", "search_type"))]
    return next((value for value in named if value in STRATEGIES), None)
