"""CTC in NeMo's streaming: `conformer_stream_step`, and the pipelines of `nemo.collections.asr.inference`.

There NeMo takes the best label of every frame, whatever the decoding config says. With one of our strategies
the same calls search the log-probs:

    conformer_stream_step   for a model that decodes with our strategy; the running search travels with
                            `previous_pred_out`. Texts are what the search would return if the audio ended.
    pipelines               asr.decoding of the pipeline's config names the strategy, as it does for RNN-T:
                            +asr.decoding.strategy=flexctc_beam +asr.decoding.beam.beam_size=8
                            Partial transcripts are the best hypothesis so far; at the end of an utterance, which
                            NeMo's endpointing finds as for greedy, the best hypothesis is committed and
                            the next utterance begins. `ASRRequestOptions.biasing_cfg` has phrases of a stream.

`register.py` lists the methods of NeMo's that are wrapped.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from nemo.collections.asr.parts.submodules.ctc_decoding import CTCDecodingConfig
from nemo.utils import logging
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from nemo_gpu_decoding.nemo_plugin.ctc import CTCInfer, continued_streams
from nemo_gpu_decoding.nemo_plugin.register import find_strategy, possible_strategies
from nemo_gpu_decoding.nemo_plugin.requests import biasing_request
from nemo_gpu_decoding.search.decoder import Streams
from nemo_gpu_decoding.search.result import Path

GREEDY = ("greedy", "greedy_batch")


def ctc_search(model: Any) -> CTCInfer | None:
    """Our decoder of a model's CTC head; None if it decodes with a strategy of NeMo's."""
    decoding = model.ctc_decoding if hasattr(model, "ctc_decoder") else model.decoding
    infer = getattr(decoding, "decoding", None)
    return infer if isinstance(infer, CTCInfer) else None


# ------------------------------------------------------------------------------ conformer_stream_step


def stream_step(wrapped: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Stands in for `ASRModuleMixin.conformer_stream_step`.

    Raises:
        ValueError: `previous_pred_out` is not what the last step returned.
    """
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    call.apply_defaults()
    is_ctc_head = hasattr(model, "ctc_decoder") and getattr(model, "cur_decoder", "ctc") == "ctc"
    is_ctc = is_ctc_head or hasattr(model.decoding, "ctc_decoder_predictions_tensor")
    infer = ctc_search(model) if is_ctc else None
    if infer is None or not call.arguments["return_transcription"]:
        return wrapped(*args, **kwargs)
    previous = call.arguments["previous_pred_out"]
    call.arguments["return_transcription"] = False  # it would be that of the labels
    outputs: list[Tensor] = []
    head = model.ctc_decoder if is_ctc_head else model.decoder
    hook = head.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        labels, _, *others = wrapped(*call.args, **call.kwargs)
    finally:
        hook.remove()
    known = [0 if previous is None else len(row) for row in previous or labels]
    lengths = torch.tensor([len(row) - before for row, before in zip(labels, known, strict=True)])
    states = [None] * len(labels)
    if previous is not None:
        states = [_state_of(row, b, infer.strategy) for b, row in enumerate(previous)]
    decoding = model.ctc_decoding if is_ctc_head else model.decoding
    with continued_streams(states) as streams:
        texts = decoding.ctc_decoder_predictions_tensor(outputs[0], lengths)
    for row, state in zip(labels, streams.states, strict=True):
        row.search_state = state
    return (labels, texts, *others)


def _state_of(row: Tensor, b: int, strategy: str) -> Any:
    if not hasattr(row, "search_state"):
        raise ValueError(
            f"previous_pred_out[{b}] has no running search, expected what the last step with {strategy} "
            "returned, the same tensor"
        )
    return row.search_state


# ---------------------------------------------------------------------------------------- pipelines


def build_asr(wrapped: Callable[..., Any], builder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Stands in for `BaseBuilder._build_asr`: a CTC model is built with the strategy of `asr.decoding`.

    Raises:
        ValueError: the strategy decodes another family of models, or its options are wrong.
    """
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    cfg = call.arguments["cfg"]
    given = OmegaConf.select(cfg, "asr.decoding")
    if given is None or str(cfg.asr_decoding_type).lower() != "ctc":
        return wrapped(*args, **kwargs)
    if find_strategy(given) is not None:
        defaults: Any = OmegaConf.to_container(OmegaConf.structured(CTCDecodingConfig))
        call.arguments["decoding_cfg"] = OmegaConf.merge(OmegaConf.create(defaults), given)
    elif given.get("strategy", "greedy") not in GREEDY:
        ours = ", ".join(name for name in possible_strategies("ctc") if find_strategy(_named(name)))
        logging.warning(
            f"asr.decoding.strategy is '{given.strategy}', which NeMo's {cfg.pipeline_type} CTC pipeline does not "
            f"run: it decodes greedily. Strategies that it runs: {ours}."
        )
    return wrapped(*call.args, **call.kwargs)


def _named(strategy: str) -> DictConfig:
    return OmegaConf.create({"strategy": strategy})


def construct(wrapped: Callable[..., None], pipeline: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Stands in for `__init__` of NeMo's CTC pipelines; one whose model decodes with our strategy searches.

    Raises:
        ValueError: the tails of partial transcripts are asked for.
    """
    wrapped(*args, **kwargs)
    infer = ctc_search(pipeline.asr_model.asr_model)
    if infer is None:
        return
    if pipeline.return_tail_result:
        raise ValueError(
            f"return_tail_result is true, expected false: what lies beyond the chunk is not searched by "
            f"{infer.strategy}"
        )
    cls: Any = type(pipeline)
    pipeline.__class__ = _searching(cls)


@cache
def _searching(base: Any) -> type:
    """The subclass of a CTC pipeline whose transcripts come from the search of the model's decoding config.

    Made within a function and with one base, since Python lets an object change its class only where the
    memory layouts agree.
    """
    is_buffered = base.__name__ == "BufferedCTCPipeline"

    class Searching(base):
        def run_greedy_decoder(self, state: Any, request: Any, log_probs: Tensor, *clip: int) -> bool:
            """Search the frames that NeMo reads in this step, and put the best hypothesis in place of the labels
            that it found; it decides whether the utterance ends here."""
            offset, known = state.global_offset, len(state.current_step_tokens)
            is_end = super().run_greedy_decoder(state, request, log_probs, *clip)
            begin, end = 0, len(log_probs)
            if is_buffered:  # buffers overlap; where strides do not divide chunks, so do NeMo's clips
                begin, end = state.decoder_start_idx, state.decoder_end_idx
                begin = max(begin, round(getattr(state, "frames_read", begin + offset) - offset))
                state.frames_read = offset + end
            search = getattr(state, "search", None)
            if search is None:
                infer: Any = ctc_search(self.asr_model.asr_model)
                phrases = biasing_request(infer, getattr(state.options, "biasing_cfg", None))
                state.search = search = Utterance(infer, offset + begin, phrases)
            before = search.push(log_probs[begin:end], self.conf_func)
            path = search.best(is_end=is_end)
            if is_end:
                state.search = None
            frames = path.frames.tolist()
            state.tokens = path.tokens.tolist()
            state.timesteps = [search.begin + frame for frame in frames]
            state.confidences = [search.confidences[frame] for frame in frames]
            new = sum(frame < before for frame in frames)
            state.current_step_tokens[known:] = state.tokens[new:]
            return is_end

    Searching.__name__, Searching.__qualname__ = base.__name__, base.__qualname__
    return Searching


class Utterance:
    """One utterance of a stream.

    Args:
        infer: our decoder.
        begin: number of its first frame in the stream.
        request: phrases of the stream.
    """

    def __init__(self, infer: CTCInfer, begin: float, request: Any) -> None:
        self.infer, self.begin = infer, begin
        self.confidences: list[float] = []  # of each frame
        self._decoder = infer.decoder()
        self._streams: Streams = self._decoder.open(1, [request])

    def push(self, log_probs: Tensor, confidence: Callable[..., Tensor]) -> int:
        """Read frames [T, V + 1]; returns how many there were before."""
        before = len(self.confidences)
        if len(log_probs):
            self._decoder.push(self._streams, log_probs[None], [len(log_probs)])
            self.confidences += confidence(log_probs, v=log_probs.shape[1]).tolist()
        return before

    def best(self, *, is_end: bool) -> Path:
        """The best hypothesis; at the end of the utterance with all final weights."""
        if not is_end:
            return self._decoder.partial(self._streams)[0].best
        (nbest,) = self._decoder.close(self._streams)
        for note in nbest.notes:
            logging.warning(note)
        return self.infer.chosen(nbest)[0]
