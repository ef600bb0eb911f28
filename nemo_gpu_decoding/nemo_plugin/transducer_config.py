"""From NeMo's RNN-T decoding config to the options of alsd_pp and aes_pp.

The keys are those of NeMo's `malsd_batch` and `maes_batch`; keys of ours stand beside them:

    strategy: alsd_pp
    beam:
      beam_size: 6
      max_symbols: 10
      ngram_lm_model: lm.arpa
      ngram_lm_alpha: 0.3
      blank_lm_score_mode: lm_weighted_full
      n_best: 3              # ours

NeMo's section also holds options of strategies that search in another way. At the values that NeMo and
the configs of its models give them they say nothing; anything else is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from nemo.collections.asr.parts.submodules.rnnt_decoding import RNNTDecodingConfig
from omegaconf import DictConfig, OmegaConf

from nemo_gpu_decoding.nemo_plugin.beam_options import (
    SHARED_KEYS,
    BeamOptions,
    Config,
    boosting_keys,
    check_search_type,
    check_top_level,
    given_options,
    read_fusion_options,
    read_n_best,
    wants_alignments,
)
from nemo_gpu_decoding.nemo_plugin.strict import check_keys, read_bool, read_choice, read_number
from nemo_gpu_decoding.search.aes_pp.config import AESConfig
from nemo_gpu_decoding.search.alsd_pp.config import ALSDConfig
from nemo_gpu_decoding.search.config import BACKENDS
from nemo_gpu_decoding.search.transducer.blank_scoring import BLANK_LM_SCORE_MODES
from nemo_gpu_decoding.search.transducer.config import PRUNING_MODES, TransducerConfig

OWN_KEYS = SHARED_KEYS  # what we add to NeMo's `beam`

# NeMo's decoders read these, but its dataclass does not have them
UNDECLARED_KEYS = ("max_symbols", "tsd_max_sym_exp", "compute_timestamps")

# Options that our searches have no use for, with the values that may stand there: NeMo's defaults,
# those of its model configs, and zeros, which eval_beamsearch_ngram_transducer.py writes for "unused".
_UNUSED: dict[str, tuple[Any, ...]] = {
    "tsd_max_sym_exp_per_step": (50,),
    "tsd_max_sym_exp": (10, 50),
    "alsd_max_target_len": (1.0, 2.0),
    "nsc_max_timesteps_expansion": (1,),
    "nsc_prefix_alpha": (1,),
    "language_model": (None,),
    "maes_prefix_alpha": (1, 0),
    "hat_subtract_ilm": (False,),
    "hat_ilm_weight": (0.0,),
}
UNUSED: dict[str, Mapping[str, tuple[Any, ...]]] = {
    "alsd_pp": {
        **_UNUSED,
        "maes_num_steps": (2,),
        "maes_expansion_beta": (2,),
        "maes_expansion_gamma": (2.3, 0),
    },
    "aes_pp": {**_UNUSED, "max_symbols": (None, 10), "max_symbols_per_step": (None, 10)},
}


@functools.lru_cache(maxsize=1)
def _nemo_defaults() -> dict[str, Any]:
    """NeMo's `beam` section as `change_decoding_strategy` fills it up."""
    defaults: Any = OmegaConf.to_container(OmegaConf.structured(RNNTDecodingConfig), resolve=True)
    return defaults["beam"]


def transducer_beam_keys(strategy: str) -> dict[str, tuple[str, ...]]:
    """The keys of `beam`, and of the section in it, that mean something to a strategy."""
    known = (*_nemo_defaults(), *UNDECLARED_KEYS, *OWN_KEYS)
    return {
        "beam": tuple(key for key in known if key not in UNUSED[strategy]),
        "beam.boosting_tree": boosting_keys(),
    }


def read_transducer_options(
    cfg: DictConfig, strategy: str
) -> BeamOptions[ALSDConfig] | BeamOptions[AESConfig]:
    """Read NeMo's decoding config, checking every key that it has.

    Args:
        cfg: NeMo's decoding config.
        strategy: "alsd_pp" or "aes_pp".

    Raises:
        ValueError: a key of `beam` is unknown, cannot apply to the strategy or has a wrong value; the
            message names the key and the valid ones. The model is a multi-blank one.
        FileNotFoundError: `beam.ngram_lm_model` or the phrase file is no file.
    """
    check_top_level(cfg, OWN_KEYS)
    if cfg.get("big_blank_durations"):
        raise ValueError(
            f"big_blank_durations is {list(cfg.big_blank_durations)}, expected none: {strategy} decodes "
            "RNN-T and TDT models, not multi-blank ones"
        )
    given = given_options(cfg)
    valid = transducer_beam_keys(strategy)["beam"]
    check_keys("beam", [key for key in given if key not in UNUSED[strategy]], valid)
    beam = _nemo_defaults() | given
    check_search_type(beam["search_type"], strategy)
    _check_unused(beam, strategy, valid)
    return_best = read_bool("beam.return_best_hypothesis", beam["return_best_hypothesis"])
    wants_alignments(cfg, beam)
    read_bool("beam.compute_timestamps", beam.get("compute_timestamps", False))
    fusion = read_fusion_options(beam)
    try:
        shared = _shared_options(beam, read_n_best(beam, return_best))
        if strategy == "alsd_pp":
            alsd = ALSDConfig(**shared, max_symbols=_max_symbols(beam))
            return BeamOptions(alsd, return_best, fusion)
        aes = AESConfig(
            **shared,
            maes_num_steps=beam["maes_num_steps"],
            maes_expansion_beta=beam["maes_expansion_beta"],
            maes_expansion_gamma=read_number("maes_expansion_gamma", beam["maes_expansion_gamma"]),
        )
        return BeamOptions(aes, return_best, fusion)
    except ValueError as error:  # the messages begin with the name of the field
        text = str(error)
        raise ValueError(text if text.startswith("beam.") else f"beam.{text}") from None


def _shared_options(beam: Config, n_best: Any) -> dict[str, Any]:
    default = TransducerConfig
    graphs = beam["allow_cuda_graphs"]
    return {
        "beam_size": beam["beam_size"],
        "score_norm": read_bool("score_norm", beam["score_norm"]),
        "softmax_temperature": read_number("softmax_temperature", beam["softmax_temperature"]),
        "blank_lm_score_mode": _choice(beam, "blank_lm_score_mode", tuple(BLANK_LM_SCORE_MODES)),
        "pruning_mode": _choice(beam, "pruning_mode", PRUNING_MODES),
        "n_best": n_best,
        "backend": read_choice("backend", beam.get("backend", default.backend), BACKENDS),
        "threads": beam.get("threads", default.threads),
        # NeMo's default is None: as the strategy likes
        "allow_cuda_graphs": (
            default.allow_cuda_graphs if graphs is None else read_bool("allow_cuda_graphs", graphs)
        ),
    }


def _choice(beam: Config, key: str, choices: tuple[str, ...]) -> str:
    value = beam[key]
    if value is None:  # NeMo's dataclass allows it
        value = _nemo_defaults()[key]
    return read_choice(key, value, choices)


def _max_symbols(beam: Config) -> Any:
    """NeMo's dataclass says `max_symbols_per_step`, its decoders read `max_symbols`: both are fine."""
    default, declared, read = (
        ALSDConfig.max_symbols,
        beam["max_symbols_per_step"],
        beam.get("max_symbols"),
    )
    if read is None:
        return default if declared is None else declared
    if declared not in (None, default, read):
        raise ValueError(
            f"max_symbols is {read} and beam.max_symbols_per_step is {declared}, expected one of them, "
            "or equal values"
        )
    return read


def _check_unused(beam: Config, strategy: str, valid: tuple[str, ...]) -> None:
    for key, neutral in UNUSED[strategy].items():
        if key in beam and beam[key] not in neutral:
            listed = ", ".join(sorted(valid))
            raise ValueError(
                f"'beam.{key}' is {beam[key]!r}, which has no effect with '{strategy}'; remove it "
                f"(default {neutral[0]!r}); valid keys: {listed}"
            )
