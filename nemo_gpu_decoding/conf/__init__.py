"""Presets: NeMo `decoding` sections for our strategies, as YAML files in `ctc_decoding/`.

In a Hydra application, NeMo's scripts among them, by name:

    transcribe_speech.py ... +ctc_decoding=flexctc_beam_lm ctc_decoding.beam.ngram_lm_model=lm.arpa

where the config keeps the section elsewhere, as in NeMo's training configs:

    ... +ctc_decoding@model.decoding=flexctc_beam

and in Python:

    cfg = load_preset("flexctc_beam_lm")
    cfg.beam.ngram_lm_model = "lm.arpa"
    model.change_decoding_strategy(cfg)
"""

from __future__ import annotations

from importlib.resources import files

from omegaconf import DictConfig, OmegaConf


def preset_names() -> list[str]:
    names = [file.name for file in (files(__name__) / "ctc_decoding").iterdir()]
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def load_preset(name: str) -> DictConfig:
    """A preset as a config for `change_decoding_strategy`.

    Raises:
        ValueError: there is no such preset.
    """
    if name not in preset_names():
        raise ValueError(f"name is {name!r}, expected one of {', '.join(preset_names())}")
    text = (files(__name__) / "ctc_decoding" / f"{name}.yaml").read_text(encoding="utf-8")
    config = OmegaConf.create(text)
    assert isinstance(config, DictConfig)
    return config
