"""Presets: a strategy and its options in NeMo's own keys, as YAML (a model's `decoding` section)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_gpu_decoding import conf
from nemo_gpu_decoding.cli.options import UsageError
from nemo_gpu_decoding.conf import preset_names

DEFAULT_STRATEGY = "flexctc_beam"
# option of the command line -> NeMo's key in the `decoding` section
DECODING_KEYS = {
    "beam_size": "beam.beam_size",
    "lm": "beam.ngram_lm_model",
    "lm_weight": "beam.ngram_lm_alpha",
    "beam_beta": "beam.beam_beta",
    "blank_scoring": "beam.blank_lm_score_mode",
    "phrases": "beam.boosting_tree.key_phrases_file",
    "boosting_weight": "beam.boosting_tree_alpha",
}
# paths in presets are relative to the preset, so that a folder with preset and LM can be moved
PATH_KEYS = (
    "beam.ngram_lm_model",
    "beam.boosting_tree.key_phrases_file",
    "beam.boosting_tree.model_path",
)


def load_preset(name: str) -> DictConfig:
    """Read a preset by its name in the package or by its path; file names in it become absolute.

    Raises:
        UsageError: there is no such preset, or it is no mapping with a `strategy`.
    """
    file = Path(name)
    if not file.is_file():
        if name in preset_names():
            return conf.load_preset(name)
        ours = ", ".join(preset_names())
        raise UsageError(f"preset={name} is no file here and none of the shipped ones ({ours})")
    try:
        config = OmegaConf.create(yaml.safe_load(file.read_text(encoding="utf-8")))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise UsageError(f"preset={name} is not valid YAML: {error}") from error
    if not isinstance(config, DictConfig) or "strategy" not in config:
        raise UsageError(f"preset={name}: expected a mapping with the key `strategy`")
    for key in PATH_KEYS:
        value = OmegaConf.select(config, key)
        if value:
            OmegaConf.update(config, key, str((file.parent / value).resolve()))
    return config


def default_preset(strategy: str, options: Mapping[str, Any]) -> str | None:
    """The shipped preset for a strategy with or without LM and phrases, if there is one."""
    name = strategy + "_lm" * bool(options.get("lm")) + "_boosting" * bool(options.get("phrases"))
    return name if name in preset_names() else None


def decoding_config(strategy: str | None, preset: str | None, options: Mapping[str, Any]) -> DictConfig:
    """NeMo's `decoding` section: the preset, and over it the options that were given (not None).

    Without a preset the shipped one is the base that fits to the strategy and to what is given;
    without a strategy it is that of the preset, or flexctc_beam.

    Raises:
        UsageError: the preset cannot be read, or a file that an option names does not exist.
    """
    if preset is None:
        preset = default_preset(strategy or DEFAULT_STRATEGY, options)
    config = load_preset(preset) if preset else OmegaConf.create({})
    if strategy is not None:
        config.strategy = strategy
    for name, key in DECODING_KEYS.items():
        value = options.get(name)
        if value is None:
            continue
        if name in ("lm", "phrases"):
            value = existing_file(name, str(value))
        OmegaConf.update(config, key, value, force_add=True)
    return config


def existing_file(option: str, value: str) -> str:
    """The absolute path of a file that an option names."""
    path = Path(value).expanduser()
    if not path.is_file():
        raise UsageError(f"{option}={value} is no file here")
    return str(path.resolve())


def write_preset(file: Path, config: Mapping[str, Any], comment: str) -> None:
    """Write a preset that `load_preset` reads back; files in it become relative where that is short."""
    config = OmegaConf.create(dict(config))
    for key in PATH_KEYS:
        value = OmegaConf.select(config, key)
        if value:
            OmegaConf.update(config, key, _relative(Path(value).resolve(), file.resolve().parent))
    header = "".join(f"# {line}\n" for line in comment.splitlines())
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(header + OmegaConf.to_yaml(config), encoding="utf-8")


def _relative(path: Path, folder: Path) -> str:
    """Relative within the folder or its parent, else absolute: long `../..` chains break easily."""
    for up, base in (("", folder), ("../", folder.parent)):
        if path.is_relative_to(base):
            return up + path.relative_to(base).as_posix()
    return str(path)
