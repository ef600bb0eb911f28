"""Presets: NeMo `decoding` sections for our strategies, as YAML files in `ctc_decoding/` and, for RNN-T
and TDT, in `rnnt_decoding/`.

In a Hydra application, NeMo's scripts among them, by name:

    transcribe_speech.py ... +ctc_decoding=flexctc_beam_lm ctc_decoding.beam.ngram_lm_model=lm.arpa
    transcribe_speech.py ... +rnnt_decoding=alsd_pp_lm rnnt_decoding.beam.ngram_lm_model=lm.arpa

where the config keeps the section elsewhere, as in NeMo's training configs:

    ... +ctc_decoding@model.decoding=flexctc_beam

and in Python:

    cfg = load_preset("flexctc_beam_lm")
    cfg.beam.ngram_lm_model = "lm.arpa"
    model.change_decoding_strategy(cfg)
"""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable


GROUPS = ("ctc_decoding", "rnnt_decoding")  # as NeMo's scripts name their sections


def preset_names(*groups: str) -> list[str]:
    """Names of the presets in some of `GROUPS`, by default in all."""
    return sorted(name for group in groups or GROUPS for name in _files(group))


def load_preset(name: str) -> DictConfig:
    """A preset as a config for `change_decoding_strategy`.

    Raises:
        ValueError: there is no such preset.
    """
    found = [file for group in GROUPS for own, file in _files(group).items() if own == name]
    if not found:
        raise ValueError(f"name is {name!r}, expected one of {', '.join(preset_names())}")
    config = OmegaConf.create(found[0].read_text(encoding="utf-8"))
    assert isinstance(config, DictConfig)
    return config


def _files(group: str) -> dict[str, Traversable]:
    """The presets of a group by their names."""
    files_of_group = (files(__name__) / group).iterdir()
    return {
        file.name.removesuffix(".yaml"): file for file in files_of_group if file.name.endswith(".yaml")
    }
