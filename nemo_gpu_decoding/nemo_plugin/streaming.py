"""NeMo's streaming: `conformer_stream_step`, and the pipelines of `nemo.collections.asr.inference`.

For CTC models NeMo takes the best label of every frame there, whatever the decoding config says; of
transducers it takes it that tokens, once found, stay. With one of our strategies the same calls search:

    conformer_stream_step   for a CTC model that decodes with our strategy; the running search travels with
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
from typing import Any, NamedTuple

import torch
from nemo.collections.asr.parts.submodules.ctc_decoding import CTCDecodingConfig
from nemo.collections.asr.parts.utils.rnnt_utils import Hypothesis
from nemo.utils import logging
from omegaconf import OmegaConf
from torch import Tensor

from nemo_gpu_decoding.nemo_plugin.ctc import CTCInfer, continued_streams
from nemo_gpu_decoding.nemo_plugin.register import STRATEGIES, find_strategy
from nemo_gpu_decoding.nemo_plugin.requests import biasing_request
from nemo_gpu_decoding.nemo_plugin.transducer import TransducerInfer
from nemo_gpu_decoding.search.decoder import Streams
from nemo_gpu_decoding.search.result import Path

GREEDY = ("greedy", "greedy_batch")


def ctc_search(model: Any) -> CTCInfer | None:
    """Our decoder of a model's CTC head; None if it decodes with a strategy of NeMo's."""
    decoding = model.ctc_decoding if hasattr(model, "ctc_decoder") else getattr(model, "decoding", None)
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


def transcribe_labels(wrapped: Callable[..., Any], batcher: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Stands in for `FrameBatchASR.transcribe`, which merges labels: says so where a search is asked for."""
    infer = ctc_search(batcher.asr_model)
    if infer is not None:
        logging.warning(
            f"the model decodes with strategy {infer.strategy}, but {type(batcher).__name__} takes the best label of "
            "every frame: the text is greedy. FrameBatchChunkedCTC and the buffered pipeline of "
            "nemo.collections.asr.inference search."
        )
    return wrapped(*args, **kwargs)


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
        ours = ", ".join(spec.name for spec in STRATEGIES.values() if spec.family == "ctc")
        logging.warning(
            f"asr.decoding.strategy is '{given.strategy}', which NeMo's {cfg.pipeline_type} CTC pipeline does not "
            f"run: it decodes greedily. Strategies that it runs: {ours}."
        )
    return wrapped(*call.args, **call.kwargs)


def construct(wrapped: Callable[..., None], pipeline: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Stands in for `__init__` of NeMo's pipelines; one whose model decodes with our strategy searches.

    Raises:
        ValueError: an option of the pipeline cannot be had with the strategy; the message names it.
    """
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    cls: Any = type(pipeline)
    (kind,) = [KINDS[base.__name__] for base in cls.__mro__ if base.__name__ in KINDS]
    infer = kind.search(call.arguments["asr_model"].asr_model)
    if infer is None:
        wrapped(*args, **kwargs)
        return
    if kind.refused and OmegaConf.select(call.arguments["cfg"], kind.refused):
        raise ValueError(f"{kind.refused} is true, expected false with strategy {infer.strategy}: {kind.reason}")
    if not infer.return_best_hypothesis:
        key = f"asr.decoding.{infer.section}.return_best_hypothesis"
        raise ValueError(f"{key} is false, expected true: a stream has one transcript")
    wrapped(*args, **kwargs)
    pipeline.__class__ = _adapted(cls, kind.adapt)


def transducer_search(model: Any) -> TransducerInfer | None:
    """Our decoder of a model's transducer head; None if it decodes with a strategy of NeMo's."""
    infer = getattr(model.decoding, "decoding", None)
    return infer if isinstance(infer, TransducerInfer) else None


@cache
def _adapted(cls: Any, adapt: Callable[[Any], type]) -> type:
    """The subclass of a pipeline's class, the same one every time."""
    subclass = adapt(cls)
    subclass.__name__, subclass.__qualname__ = cls.__name__, cls.__qualname__
    return subclass


# They are made within functions and have one base each, since Python lets an object change its class only
# where the memory layouts agree.


def _searching_ctc(base: Any) -> type:
    """A CTC pipeline whose transcripts come from the search of the model's decoding config."""
    is_buffered = hasattr(base, "get_cut_off_range")

    class Adapted(base):
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

    return Adapted


def _buffered_transducer(base: Any) -> type:
    """A transducer pipeline that decodes every buffer anew, with the phrases of its stream."""

    class Adapted(base):
        def stateless_transcribe_step(
            self, requests: list[Any], encs: Tensor, enc_lens: Tensor, ready_state_ids: set[int]
        ) -> None:
            states = [self.get_state(request.stream_id) for request in requests]
            begin = [_beginning(getattr(state.options, "biasing_cfg", None)) for state in states]
            hypotheses = self.asr_model.decode(encs, enc_lens, partial_hypotheses=begin)
            ready_state_ids.update(self.decode_step(hypotheses, requests, states))

    return Adapted


def _cache_aware_transducer(base: Any) -> type:
    """A transducer pipeline that lets the search go on from chunk to chunk until the utterance ends."""

    class Adapted(base):
        def create_state(self, options: Any) -> Any:
            state = super().create_state(options)
            state.phrases = getattr(state.options, "biasing_cfg", None)
            if state.phrases is not None:
                state.options.biasing_cfg = None  # or else NeMo would say that they are left out
            self._begin(state, 0)
            return state

        def run_greedy_decoder(self, state: Any, request: Any, hyp: Any) -> bool:
            """Let NeMo see the tokens of this step's frames, and put the best hypothesis in place of what earlier
            steps took for it; NeMo decides whether the utterance ends here."""
            known = len(state.current_step_tokens)
            old = sum(frame < state.frames_read for frame in hyp.token_frames)
            state.set_offset(old)
            is_end = super().run_greedy_decoder(state, request, hyp)
            state.tokens = hyp.y_sequence.tolist()
            state.timesteps = [state.global_offset + frame for frame in hyp.token_frames]
            state.confidences = list(hyp.step_confidence) or [0.0] * len(state.tokens)
            state.current_step_tokens[known:] = state.tokens[old:]
            state.frames_read = int(hyp.length)
            if is_end:
                self._begin(state, state.global_offset + state.frames_read)
            return is_end

        def _begin(self, state: Any, frame: int) -> None:
            """Begin an utterance at a frame of the stream."""
            state.frames_read = 0
            state.set_offset(0)
            state.set_global_offset(frame)
            state.set_previous_hypothesis(_beginning(state.phrases))

    return Adapted


def _beginning(phrases: Any) -> Hypothesis | None:
    """The partial hypothesis that begins an utterance with the phrases of its stream."""
    if phrases is None or phrases.is_empty():
        return None
    return Hypothesis.empty_with_biasing_cfg(phrases)


class Kind(NamedTuple):
    """What becomes of a pipeline of NeMo's."""

    search: Callable[[Any], CTCInfer | TransducerInfer | None]  # of its model
    adapt: Callable[[Any], type]
    refused: str = ""  # an option of the pipeline that must be off
    reason: str = ""


_TAIL = "return_tail_result", "what lies beyond the chunk is not searched"
KINDS = {
    "BufferedCTCPipeline": Kind(ctc_search, _searching_ctc, *_TAIL),
    "CacheAwareCTCPipeline": Kind(ctc_search, _searching_ctc, *_TAIL),
    "BufferedRNNTPipeline": Kind(
        transducer_search, _buffered_transducer, "streaming.stateful", "NeMo's stateful decoding is greedy_batch's"
    ),
    "CacheAwareRNNTPipeline": Kind(transducer_search, _cache_aware_transducer),
}


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
