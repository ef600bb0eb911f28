"""From NeMo's CTC decoding config to the options of flexctc_beam.

NeMo's own keys select everything; keys of ours stand beside them in the same section:

    strategy: flexctc_beam
    beam:
      beam_size: 8
      beam_beta: 1.0
      ngram_lm_model: lm.arpa
      ngram_lm_alpha: 0.7
      boosting_tree: {key_phrases_list: [acme, gdansk], ignore_case: true}
      boosting_tree_alpha: 1.0
      merge: prefix          # ours

NeMo's configs are structured in scripts, where Hydra accepts a new key with a plus:
`+ctc_decoding.beam.merge=prefix`. `change_decoding_strategy` takes a dict or DictConfig with any keys,
as in `OmegaConf.create({"strategy": "flexctc_beam", "beam": {"merge": "prefix"}})`.
"""

from __future__ import annotations

import functools
from typing import Any

from nemo.collections.asr.parts.submodules.ctc_decoding import CTCDecodingConfig
from nemo.utils import logging
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
from nemo_gpu_decoding.nemo_plugin.strict import (
    check_keys,
    check_untouched,
    read_bool,
    read_choice,
    read_number,
)
from nemo_gpu_decoding.search.config import BACKENDS
from nemo_gpu_decoding.search.flexctc_beam.config import MERGE_MODES, FlexCTCConfig

OWN_KEYS = ("merge", *SHARED_KEYS)  # what we add to NeMo's `beam`


@functools.lru_cache(maxsize=1)
def _nemo_defaults() -> dict[str, Any]:
    """NeMo's `beam` section as `change_decoding_strategy` fills it up."""
    defaults: Any = OmegaConf.to_container(OmegaConf.structured(CTCDecodingConfig), resolve=True)
    return defaults["beam"]


def ctc_beam_keys() -> dict[str, tuple[str, ...]]:
    """The valid keys of `beam` and of the sections in it: NeMo's, then ours."""
    defaults = _nemo_defaults()
    return {
        "beam": (*defaults, *OWN_KEYS),
        "beam.boosting_tree": boosting_keys(),
        "beam.flashlight_cfg": tuple(defaults["flashlight_cfg"]),
        "beam.pyctcdecode_cfg": tuple(defaults["pyctcdecode_cfg"]),
    }


def read_ctc_options(cfg: DictConfig) -> BeamOptions[FlexCTCConfig]:
    """Read NeMo's decoding config, checking every key that it has.

    Raises:
        ValueError: a key of `beam` is unknown, cannot apply to flexctc_beam or has a wrong value; the
            message names the key and the valid ones.
        FileNotFoundError: `beam.ngram_lm_model` or the phrase file is no file.
    """
    check_top_level(cfg, OWN_KEYS)
    given = given_options(cfg)
    check_keys("beam", given, ctc_beam_keys()["beam"])
    beam: dict[str, Any] = _nemo_defaults() | given
    check_search_type(beam["search_type"], "flexctc_beam")
    _check_foreign_sections(beam)
    _apply_deprecated(beam)
    return_best = read_bool("beam.return_best_hypothesis", beam["return_best_hypothesis"])
    read_bool("beam.compute_timestamps", beam["compute_timestamps"])
    read_bool("beam.allow_cuda_graphs", beam["allow_cuda_graphs"])
    fusion = read_fusion_options(beam)
    return BeamOptions(
        _search_config(beam, return_best, wants_alignments(cfg, beam)), return_best, fusion
    )


def _search_config(beam: Config, return_best: bool, alignments: bool) -> FlexCTCConfig:
    merge = read_choice("beam.merge", beam.get("merge", FlexCTCConfig.merge), MERGE_MODES)
    if alignments and merge == "prefix":
        raise ValueError(
            "preserve_alignments is true with beam.merge=prefix, which sums over alignments and has "
            "none of its own; expected beam.merge=max or sum"
        )
    n_best = read_n_best(beam, return_best)
    try:
        return FlexCTCConfig(
            beam_size=beam["beam_size"],
            beam_beta=read_number("beam_beta", beam["beam_beta"]),
            beam_threshold=read_number("beam_threshold", beam["beam_threshold"]),
            merge=merge,
            n_best=n_best,
            backend=read_choice("backend", beam.get("backend", FlexCTCConfig.backend), BACKENDS),
            threads=beam.get("threads", FlexCTCConfig.threads),
        )
    except ValueError as error:  # the messages begin with the name of the field
        raise ValueError(f"beam.{error}") from None


def _check_foreign_sections(beam: Config) -> None:
    """Options of NeMo's other strategies: at their defaults they mean nothing, else the user does."""
    defaults = _nemo_defaults()
    for section, owner in (("flashlight_cfg", "flashlight"), ("pyctcdecode_cfg", "pyctcdecode")):
        reason = f"is an option of strategy '{owner}' and has no effect with 'flexctc_beam'"
        check_untouched(f"beam.{section}", beam[section], defaults[section], reason)


def _apply_deprecated(beam: dict[str, Any]) -> None:
    """Old names win over new ones, as in NeMo."""
    for old, new in (("beam_alpha", "ngram_lm_alpha"), ("kenlm_path", "ngram_lm_model")):
        if beam[old] is not None:
            logging.warning(f"`beam.{old}` is deprecated, please use `beam.{new}` instead.")
            beam[new] = beam[old]
