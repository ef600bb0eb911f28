"""From NeMo's decoding config to the options of our strategies.

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
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from nemo.collections.asr.parts.submodules.ctc_decoding import CTCDecodingConfig
from nemo.utils import logging
from omegaconf import DictConfig, OmegaConf

from nemo_gpu_decoding.fusion.boosting import REFUNDS, BoostingConfig
from nemo_gpu_decoding.fusion.ngram import ENCODINGS
from nemo_gpu_decoding.nemo_plugin.strict import (
    check_keys,
    check_untouched,
    read_bool,
    read_choice,
    read_number,
)
from nemo_gpu_decoding.search.flexctc_beam.config import BACKENDS, MERGE_MODES, FlexCTCConfig

OWN_KEYS = ("merge", "n_best", "backend", "threads", "lm_encoding")  # what we add to NeMo's `beam`

Config = Mapping[str, Any]


@dataclass(frozen=True)
class BeamOptions:
    """Everything that the `beam` section says to a CTC beam search."""

    search: FlexCTCConfig  # `alignments` is left to the decoding object, which may change its mind
    return_best: bool  # False: NeMo gets n-best lists
    lm_path: Path | None
    lm_weight: float
    lm_encoding: str
    boosting: BoostingConfig
    boosting_weight: float


@functools.lru_cache(maxsize=1)
def _nemo_defaults() -> dict[str, Any]:
    """NeMo's `beam` section as `change_decoding_strategy` fills it up."""
    defaults: Any = OmegaConf.to_container(OmegaConf.structured(CTCDecodingConfig), resolve=True)
    return defaults["beam"]


def beam_keys() -> dict[str, tuple[str, ...]]:
    """The valid keys of `beam` and of the sections in it: NeMo's, then ours."""
    defaults = _nemo_defaults()
    return {
        "beam": (*defaults, *OWN_KEYS),
        "beam.boosting_tree": tuple(field.name for field in fields(BoostingConfig)),
        "beam.flashlight_cfg": tuple(defaults["flashlight_cfg"]),
        "beam.pyctcdecode_cfg": tuple(defaults["pyctcdecode_cfg"]),
    }


def read_beam_options(cfg: DictConfig) -> BeamOptions:
    """Read NeMo's decoding config, checking every key that it has.

    Raises:
        ValueError: a key of `beam` is unknown, cannot apply to flexctc_beam or has a wrong value; the
            message names the key and the valid ones.
        FileNotFoundError: `beam.ngram_lm_model` or the phrase file is no file.
    """
    _check_top_level(cfg)
    given: Any = OmegaConf.to_container(cfg.get("beam") or OmegaConf.create({}), resolve=True)
    check_keys("beam", given, beam_keys()["beam"])
    beam: dict[str, Any] = _nemo_defaults() | given
    _check_foreign_sections(beam)
    _apply_deprecated(beam)
    return_best = read_bool("beam.return_best_hypothesis", beam["return_best_hypothesis"])
    alignments = cfg.get("preserve_alignments")
    if alignments is None:
        alignments = read_bool("beam.preserve_alignments", beam["preserve_alignments"])
    read_bool("beam.compute_timestamps", beam["compute_timestamps"])
    read_bool("beam.allow_cuda_graphs", beam["allow_cuda_graphs"])
    boosting = _boosting_config(beam["boosting_tree"])
    return BeamOptions(
        search=_search_config(beam, return_best, bool(alignments)),
        return_best=return_best,
        lm_path=_existing_file("beam.ngram_lm_model", beam["ngram_lm_model"]),
        lm_weight=_weight(beam, "ngram_lm_alpha", "ngram_lm_model", beam["ngram_lm_model"] is not None),
        lm_encoding=read_choice("beam.lm_encoding", beam.get("lm_encoding", "auto"), ENCODINGS),
        boosting=boosting,
        boosting_weight=_weight(beam, "boosting_tree_alpha", "boosting_tree", not boosting.is_empty),
    )


def _search_config(beam: Config, return_best: bool, alignments: bool) -> FlexCTCConfig:
    n_best = beam.get("n_best")
    if n_best is None:
        n_best = 1 if return_best else beam["beam_size"]
    elif return_best and n_best != 1:
        raise ValueError(
            f"beam.n_best is {n_best}, but beam.return_best_hypothesis is true; "
            "set it to false for n-best lists"
        )
    merge = read_choice("beam.merge", beam.get("merge", FlexCTCConfig.merge), MERGE_MODES)
    if alignments and merge == "prefix":
        raise ValueError(
            "preserve_alignments is true with beam.merge=prefix, which sums over alignments and has "
            "none of its own; expected beam.merge=max or sum"
        )
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


def _boosting_config(section: Config | None) -> BoostingConfig:
    section = dict(section or {})
    check_keys("beam.boosting_tree", section, beam_keys()["beam.boosting_tree"])
    for field in fields(BoostingConfig):
        if field.name in section and isinstance(field.default, bool) and section[field.name] is not None:
            read_bool(f"beam.boosting_tree.{field.name}", section[field.name])
    for name in ("key_phrases_file", "model_path"):
        _existing_file(f"beam.boosting_tree.{name}", section.get(name))
    if "refund" in section:
        section["refund"] = read_choice("beam.boosting_tree.refund", section["refund"], REFUNDS)
    try:
        return BoostingConfig(**section)
    except (TypeError, ValueError) as error:  # the messages begin with the name of the field
        raise ValueError(f"beam.boosting_tree.{error}") from None


def _check_top_level(cfg: DictConfig) -> None:
    for key in OWN_KEYS:
        if key in cfg:
            raise ValueError(f"'{key}' stands beside `beam`, expected it in there: beam.{key}")


def _check_foreign_sections(beam: Config) -> None:
    """Options of NeMo's other strategies: at their defaults they mean nothing, else the user does."""
    search_type = beam["search_type"]
    if search_type not in ("default", "flexctc_beam"):
        raise ValueError(
            f"beam.search_type is {search_type!r} with strategy flexctc_beam, expected 'default' or "
            "'flexctc_beam'"
        )
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


def _existing_file(key: str, value: Any) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise ValueError(f"{key} is {value!r}, expected the path of a file")
    path = Path(value).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"{key} is '{value}', which is no file")
    return path


def _weight(beam: Config, key: str, of: str, is_used: bool) -> float:
    """The weight of a fusion model. It is checked even where there is no model to be weighted."""
    value = beam[key]
    if value is None:
        if is_used:
            raise ValueError(f"beam.{key} is not set, expected the weight of beam.{of}, a number >= 0")
        return 0.0
    weight = read_number(f"beam.{key}", value)
    if not 0.0 <= weight < float("inf"):
        raise ValueError(f"beam.{key} is {weight}, expected a finite number >= 0")
    if is_used and weight == 0.0:
        logging.warning(f"`beam.{of}` is set, but has no effect: `beam.{key}` is 0.")
    return weight
