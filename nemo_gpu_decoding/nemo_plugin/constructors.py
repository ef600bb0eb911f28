"""Wrappers of the constructors of NeMo's decoding objects, for strategies of this package.

NeMo's constructor runs first, with strategy `greedy_batch` in a copy of the config. It prepares text,
timestamps and confidence. Then the wrapper replaces the inner decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import is_dataclass
from functools import partial
from inspect import BoundArguments
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_gpu_decoding.checks import did_you_mean
from nemo_gpu_decoding.nemo_plugin.adapters import adapted
from nemo_gpu_decoding.nemo_plugin.infer import FusedInfer
from nemo_gpu_decoding.nemo_plugin.register import STRATEGIES, StrategySpec, find_strategy, possible_strategies
from nemo_gpu_decoding.presets import check_sections

FAMILY_NAMES = {"ctc": "CTC", "rnnt": "RNN-T and TDT"}

# options of NeMo's greedy decoders that must be off, because another strategy is used
GREEDY_EXTRAS = (
    "ngram_lm_model",
    "boosting_tree",
    "enable_per_stream_biasing",
    "preserve_alignments",
    "compute_timestamps",
    "preserve_frame_confidence",
)


def _construct(family: str, wrapped: Callable[..., None], instance: Any, call: BoundArguments) -> None:
    """Replaces `Abstract{CTC,RNNT}Decoding.__init__`; `wrapped` is the original, bound.

    Raises:
        ValueError: the strategy decodes another family of models, or its options are invalid. In
            `change_decoding_strategy` also: the LM, graph or phrases do not fit the model.
    """
    cfg = _as_config(call.arguments["decoding_cfg"])
    spec = find_strategy(cfg)
    if spec is None:
        try:
            wrapped(*call.args, **call.kwargs)
        except ValueError as error:
            strategy = str(cfg.get("strategy"))
            if strategy in possible_strategies(family):
                raise
            raise ValueError(f"{error}{_other_strategies(strategy, family)}") from error
        return
    if spec.family != family:
        raise ValueError(_wrong_family(spec, family))
    check_sections(cfg, "")
    call.arguments["decoding_cfg"] = _host_config(cfg, spec)
    wrapped(*call.args, **call.kwargs)
    instance.cfg = _unstructured(cfg)
    instance.cfg.strategy = spec.name  # also for an alias: NeMo treats some names ("wfst") specially later on
    instance.__class__ = adapted(instance.__class__, family, spec.section)
    networks = {name: call.arguments[name] for name in ("decoder", "joint") if name in call.arguments}
    instance.decoding = spec.build(instance, instance.cfg, **networks)
    if _changing.get() and isinstance(instance.decoding, FusedInfer):
        instance.decoding.decoder()


_changing: ContextVar[bool] = ContextVar("changing_strategy", default=False)


def change(wrapped: Callable[..., None], instance: Any, call: BoundArguments) -> None:
    """Replaces `change_decoding_strategy` and loads LM, graph and phrases at once.

    So a file that does not fit the model raises here, and the model keeps its strategy. Restoring a model does
    not load them, because NeMo then creates the decoding object more than once.
    """
    token = _changing.set(True)
    try:
        wrapped(*call.args, **call.kwargs)
    finally:
        _changing.reset(token)


construct_ctc = partial(_construct, "ctc")
construct_rnnt = partial(_construct, "rnnt")


def _as_config(cfg: Any) -> DictConfig:
    if is_dataclass(cfg):
        return OmegaConf.structured(cfg)
    return cfg if isinstance(cfg, DictConfig) else OmegaConf.create(cfg)


def _unstructured(cfg: DictConfig) -> DictConfig:
    """A copy that accepts any key, with interpolations resolved where they still can be."""
    values: Any = OmegaConf.to_container(cfg, resolve=True)
    return OmegaConf.create(values)


def _host_config(cfg: DictConfig, spec: StrategySpec) -> DictConfig:
    """The config for NeMo's constructor: greedy, with nothing to load, flags taken from our section."""
    host = _unstructured(cfg)
    host.strategy = "greedy_batch"
    greedy = host.get("greedy") or {}
    host.greedy = {key: value for key, value in greedy.items() if key not in GREEDY_EXTRAS}
    options = host.get(spec.section) or {}
    for flag in ("preserve_alignments", "compute_timestamps"):
        if host.get(flag) is None:
            host[flag] = bool(options.get(flag, False))
    return host


def _other_strategies(strategy: str, family: str) -> str:
    """Text after NeMo's message about an unknown strategy: this package's strategies, and a similar name."""
    ours = ", ".join(spec.name for spec in STRATEGIES.values() if spec.family == family)
    hint = did_you_mean(strategy, possible_strategies(family), " Did you mean '{}'?")
    return f". nemo-gpu-decoding adds for {FAMILY_NAMES[family]}: {ours}.{hint}"


def _wrong_family(spec: StrategySpec, family: str) -> str:
    head = {"ctc": "CTC", "rnnt": "transducer"}[spec.family]
    hint = f"; for the {head} head of a hybrid model: change_decoding_strategy(cfg, decoder_type='{spec.family}')"
    return (
        f"strategy is '{spec.name}', which decodes {FAMILY_NAMES[spec.family]} models, but this decoder "
        f"is for {FAMILY_NAMES[family]}; possible here: {', '.join(possible_strategies(family))}{hint}"
    )
