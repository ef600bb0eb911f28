"""What happens when NeMo makes a decoding object whose config names one of our strategies.

NeMo's own constructor runs first, on a copy of the config that says `greedy_batch`: it sets up
everything that text, timestamps and confidence need. Then the inner decoder is replaced by ours.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_gpu_decoding.nemo_plugin.adapters import adapted
from nemo_gpu_decoding.nemo_plugin.register import StrategySpec, find_strategy, possible_strategies

FAMILY_NAMES = {"ctc": "CTC", "rnnt": "RNN-T and TDT"}

# what NeMo's greedy decoders would load or switch on, though the user wants another strategy
GREEDY_EXTRAS = (
    "ngram_lm_model",
    "boosting_tree",
    "enable_per_stream_biasing",
    "preserve_alignments",
    "compute_timestamps",
    "preserve_frame_confidence",
)


def _construct(
    family: str, wrapped: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Stands in for `Abstract{CTC,RNNT}Decoding.__init__`; `wrapped` is the original, bound.

    Raises:
        ValueError: the strategy decodes another family of models, or its options are wrong.
    """
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    cfg = _as_config(call.arguments["decoding_cfg"])
    spec = find_strategy(cfg)
    if spec is None:
        wrapped(*args, **kwargs)
        return
    if spec.family != family:
        raise ValueError(_wrong_family(spec, family))
    call.arguments["decoding_cfg"] = _host_config(cfg, spec)
    wrapped(*call.args, **call.kwargs)
    instance.cfg = _own_config(cfg, spec)
    instance.__class__ = adapted(instance.__class__, family, spec.section)
    networks = {name: call.arguments[name] for name in ("decoder", "joint") if name in call.arguments}
    instance.decoding = spec.build(instance, instance.cfg, **networks)


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


def _own_config(cfg: DictConfig, spec: StrategySpec) -> DictConfig:
    own = _unstructured(cfg)
    own.strategy = spec.name  # an alias too: NeMo treats some names ("wfst") in a special way later on
    return own


def _wrong_family(spec: StrategySpec, family: str) -> str:
    head = {"ctc": "CTC", "rnnt": "transducer"}[spec.family]
    hint = f"; for the {head} head of a hybrid model: change_decoding_strategy(cfg, decoder_type='{spec.family}')"
    return (
        f"strategy is '{spec.name}', which decodes {FAMILY_NAMES[spec.family]} models, but this decoder "
        f"is for {FAMILY_NAMES[family]}; possible here: {', '.join(possible_strategies(family))}{hint}"
    )
