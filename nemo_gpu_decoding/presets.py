"""Presets: NeMo `decoding` sections for our strategies, as YAML files in `conf/ctc_decoding/` and, for
RNN-T and TDT, in `conf/rnnt_decoding/`.

In a Hydra application, NeMo's scripts among them, by name:

    transcribe_speech.py ... +ctc_decoding=flexctc_beam ctc_decoding.beam.ngram_lm_model=lm.arpa
    transcribe_speech.py ... +rnnt_decoding=alsd_pp rnnt_decoding.beam.ngram_lm_model=lm.arpa

where the config keeps the section elsewhere, as in NeMo's training configs:

    ... +ctc_decoding@model.decoding=flexctc_beam

and in Python:

    cfg = load_preset("flexctc_beam")
    cfg.beam.ngram_lm_model = "lm.arpa"
    model.change_decoding_strategy(cfg)
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

GROUPS = ("ctc_decoding", "rnnt_decoding")  # as NeMo's scripts name their sections


def conf_folder() -> Path:
    """The folder `conf/`: inside of the package in a wheel, beside it in a clone or editable install."""
    package = Path(__file__).parent
    is_inside = (package / "conf" / GROUPS[0]).is_dir()
    return (package if is_inside else package.parent) / "conf"


def preset_names(*groups: str) -> list[str]:
    """Names of the presets in some of `GROUPS`, by default in all."""
    return sorted(
        file.stem for group in groups or GROUPS for file in (conf_folder() / group).glob("*.yaml")
    )


def load_preset(name: str) -> DictConfig:
    """A preset as a config for `change_decoding_strategy`.

    Raises:
        ValueError: there is no such preset.
    """
    if name not in preset_names():
        raise ValueError(f"name is {name!r}, expected one of {', '.join(preset_names())}")
    (file,) = conf_folder().glob(f"*/{name}.yaml")
    config = OmegaConf.create(file.read_text(encoding="utf-8"))
    assert isinstance(config, DictConfig)
    return config
