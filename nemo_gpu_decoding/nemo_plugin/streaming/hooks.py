"""Wrap NeMo's streaming methods, which `register.py` lists, so that they decode with a strategy of this package.

For CTC, NeMo's pipelines and `conformer_stream_step` take the best label of each frame and ignore the decoding config.
For transducers, the pipelines assume that tokens never change. With this package's strategies, the same calls use a
beam search. `docs/streaming.md` explains options and outputs. In `conformer_stream_step`, `previous_pred_out` carries
the running search, and the texts are results for audio that ends with this chunk. Without `asr.decoding`, a CTC
pipeline uses the strategy in its model's config if it is a strategy of this package.
"""

from collections.abc import Callable
from inspect import BoundArguments
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from nemo.collections.asr.parts.submodules.ctc_decoding import CTCDecodingConfig
from nemo.utils import logging
from omegaconf import OmegaConf
from torch import Tensor

from nemo_gpu_decoding.checks import FieldError, check_int, having
from nemo_gpu_decoding.live.endpointing import read_rules
from nemo_gpu_decoding.live.interface import MAX_N_BEST
from nemo_gpu_decoding.nemo_plugin.adapters import adapted
from nemo_gpu_decoding.nemo_plugin.ctc import CTCInfer, continued_streams
from nemo_gpu_decoding.nemo_plugin.register import GREEDY, STRATEGIES, find_strategy
from nemo_gpu_decoding.nemo_plugin.requests import decoding_of
from nemo_gpu_decoding.nemo_plugin.restore import model_config
from nemo_gpu_decoding.nemo_plugin.streaming import searching_pipelines as pipelines
from nemo_gpu_decoding.nemo_plugin.streaming.stream_texts import divide_words
from nemo_gpu_decoding.nemo_plugin.transducer import TransducerInfer


def search_of(model: Any, kind: Any) -> Any:
    """Return the search of class `kind` that a head of the model has, or None if the strategy is one of NeMo's."""
    heads = (getattr(model, name, None) for name in ("ctc_decoding", "decoding"))
    searches = (getattr(decoding, "decoding", None) for decoding in heads)
    return next((infer for infer in searches if isinstance(infer, kind)), None)


def stream_step(wrapped: Callable[..., Any], model: Any, call: BoundArguments) -> Any:
    """Decode one chunk with the model's search, in place of NeMo's `ASRModuleMixin.conformer_stream_step`."""
    call.apply_defaults()
    decoding = decoding_of(model)
    infer = getattr(decoding, "decoding", None)
    if not isinstance(infer, CTCInfer) or not call.arguments["return_transcription"]:
        return wrapped(*call.args, **call.kwargs)
    previous = call.arguments["previous_pred_out"]
    call.arguments["return_transcription"] = False  # NeMo would transcribe the greedy labels
    outputs: list[Tensor] = []
    head = model.decoder if decoding is model.decoding else model.ctc_decoder
    hook = head.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        labels, _, *others = wrapped(*call.args, **call.kwargs)
    finally:
        hook.remove()
    states: list[Any] = [None] * len(labels)
    lengths = torch.tensor([len(row) for row in labels])
    if previous is not None:
        lengths -= torch.tensor([len(row) for row in previous])
        if (b := next((b for b, row in enumerate(previous) if not hasattr(row, "search_state")), None)) is not None:
            raise ValueError(
                f"previous_pred_out[{b}] has no running search, expected what the last step with {infer.strategy} "
                "returned, the same tensor"
            )
        states = [row.search_state for row in previous]
    with having(continued_streams, states):
        texts = decoding.ctc_decoder_predictions_tensor(outputs[0], lengths)
    for row, state in zip(labels, states, strict=True):
        row.search_state = state
    return (labels, texts, *others)


def transcribe_labels(wrapped: Callable[..., Any], batcher: Any, call: BoundArguments) -> Any:
    """Warn if the config names a search, then call `FrameBatchASR.transcribe`, which merges greedy labels."""
    infer = search_of(batcher.asr_model, CTCInfer)
    if infer is not None:
        logging.warning(
            f"the model decodes with strategy {infer.strategy}, but {type(batcher).__name__} takes the best label of "
            "every frame: the text is greedy. FrameBatchChunkedCTC and the buffered pipeline of "
            "nemo.collections.asr.inference search."
        )
    return wrapped(*call.args, **call.kwargs)


def construct_merging(wrapped: Callable[..., Any], batcher: Any, call: BoundArguments) -> None:
    """Call `BatchedFrameASRRNNT.__init__` and check the strategy, as this class merges alignments of greedy decoding.

    A strategy of this package raises a ValueError. NeMo's script replaces the user's strategy in the config, so that
    only the command line shows the strategy that the user has chosen.
    """
    wrapped(*call.args, **call.kwargs)
    infer = search_of(batcher.asr_model, TransducerInfer)
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


# ------------------------------------------------------------------------------------- inference pipelines


def build_asr(wrapped: Callable[..., Any], builder: Any, call: BoundArguments) -> Any:
    """Build a CTC model with the strategy of `asr.decoding`, in place of NeMo's `BaseBuilder._build_asr`."""
    cfg = call.arguments["cfg"]
    if str(cfg.asr_decoding_type).lower() != "ctc":
        return wrapped(*call.args, **call.kwargs)
    given = OmegaConf.select(cfg, "asr.decoding")
    if given is None:
        given = _saved_decoding(str(cfg.asr.model_name))
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


def _saved_decoding(model_name: str) -> Any:
    """Return the decoding config in a CTC model's file if it names a strategy of this package, else {}."""
    config = model_config(model_name)
    saved = OmegaConf.select(config, "aux_ctc.decoding" if "aux_ctc" in config else "decoding")
    if saved is None or find_strategy(saved) is None:
        return OmegaConf.create({})
    logging.info(f"{model_name} was saved with strategy {saved.strategy}; the pipeline decodes with it")
    return saved


def construct(wrapped: Callable[..., None], pipeline: Any, call: BoundArguments) -> None:
    """Construct a NeMo pipeline; if its model has a strategy of this package, let the pipeline use this strategy."""
    cls: Any = type(pipeline)
    (adapter,) = [ADAPTERS[base.__name__] for base in cls.__mro__ if base.__name__ in ADAPTERS]
    infer, cfg = search_of(call.arguments["asr_model"].asr_model, adapter.search_type), call.arguments["cfg"]
    if infer is None:
        wrapped(*call.args, **call.kwargs)
        return
    if cfg.return_tail_result and not adapter.reads_tail(cfg):
        raise ValueError(
            f"return_tail_result is true, expected false with strategy {infer.strategy}: what lies beyond the chunk "
            "is not searched"
        )
    if not infer.return_best_hypothesis:
        key = f"asr.decoding.{infer.section}.return_best_hypothesis"
        raise ValueError(f"{key} is false, expected true: a stream has one transcript")
    n_best = OmegaConf.select(cfg, "streaming.n_best", default=1)
    check_int("streaming.n_best", n_best, 1, MAX_N_BEST)
    if n_best > 1 and (reason := adapter.why_one_best(cfg) or infer.why_one_best):
        raise FieldError("streaming.n_best", n_best, f"1 with strategy {infer.strategy}", f"({reason})")
    rules = OmegaConf.select(cfg, "endpointing.rules")
    if OmegaConf.is_config(rules):
        rules = OmegaConf.to_container(rules, resolve=True)
    rules = None if rules is None else read_rules(rules, "endpointing.rules")
    pipeline.__class__ = adapted(cls, adapter)
    pipeline.infer, pipeline.rules, pipeline.n_best = infer, rules, n_best
    wrapped(*call.args, **call.kwargs)
    divide_words(pipeline)
    pipeline.reset_session()


ADAPTERS = {
    "BufferedCTCPipeline": pipelines.SearchingCTC,
    "CacheAwareCTCPipeline": pipelines.SearchingCTC,
    "BufferedRNNTPipeline": pipelines.BufferedTransducer,
    "CacheAwareRNNTPipeline": pipelines.CacheAwareTransducer,
}
