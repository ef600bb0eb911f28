"""Presets: a strategy and its options in NeMo's own keys, as YAML (a model's `decoding` section)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_gpu_decoding import presets as shipped
from nemo_gpu_decoding.cli.options import UsageError
from nemo_gpu_decoding.nemo_plugin.register import NATIVE, STRATEGIES, find_strategy
from nemo_gpu_decoding.presets import preset_names

DEFAULT_STRATEGY = "flexctc_beam"
LARGE_LM_STRATEGY = "paged_biglm"  # the one with a second LM
# by section of the options: option of the command line -> NeMo's key in that section
DECODING_KEYS = {
    "beam": {
        "beam_size": "beam_size",
        "lm": "ngram_lm_model",
        "lm_weight": "ngram_lm_alpha",
        "beam_beta": "beam_beta",
        "blank_scoring": "blank_lm_score_mode",
        "pruning_mode": "pruning_mode",
        "phrases": "boosting_tree.key_phrases_file",
        "boosting_weight": "boosting_tree_alpha",
    },
    "wfst": {
        "beam_width": "beam_width",
        "lm": "arpa_lm_path",  # or, for a graph, wfst_lm_path
        "lm_weight": "lm_weight",
        "phrases": "boosting_tree.key_phrases_file",
        "boosting_weight": "boosting_tree_alpha",
    },
}
LARGE_LM_KEYS = {
    "large_lm": "large_lm_path",
    "large_lm_weight": "large_lm_weight",
}  # besides those of "wfst"
# Values that suit an LM, phrases, or both better than those of the shipped presets, by strategy
_WORD_PHRASES = {"beam_width": 30.0, "lm_weight": 0.5, "boosting_tree_alpha": 15.0}
SUITED: dict[str, dict[str, dict[str, Any]]] = {
    "flexctc_beam": {"lm": {"beam_size": 16, "beam_beta": 1.0}, "phrases": {"beam_size": 16}},
    "cuda_wfst": {"phrases": _WORD_PHRASES},
    "paged_biglm": {"phrases": _WORD_PHRASES},
    "alsd_pp": {
        "lm": {"beam_size": 6},
        "phrases": {"beam_size": 6},
        "both": {"boosting_tree_alpha": 0.5},
    },
    "aes_pp": {
        "lm": {"beam_size": 6, "pruning_mode": "early"},
        "phrases": {"beam_size": 6},
        "both": {"boosting_tree_alpha": 0.5},
    },
}
# paths in presets are relative to the preset, so that a folder with preset and LM can be moved
PATH_KEYS = (
    "beam.ngram_lm_model",
    "beam.boosting_tree.key_phrases_file",
    "beam.boosting_tree.model_path",
    "wfst.arpa_lm_path",
    "wfst.wfst_lm_path",
    "wfst.words_path",
    "wfst.large_lm_path",
    "wfst.small_lm_path",
    "wfst.boosting_tree.key_phrases_file",
)


def load_preset(name: str) -> DictConfig:
    """Read a preset by its name in the package or by its path; file names in it become absolute.

    Raises:
        UsageError: there is no such preset, or it is no mapping with a `strategy`.
    """
    file = Path(name)
    if not file.is_file():
        if name in preset_names():
            return shipped.load_preset(name)
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


def section_of(strategy: str) -> str:
    """The section of NeMo's `decoding` that holds the options of a strategy: "beam" or "wfst"."""
    if strategy in STRATEGIES:
        return STRATEGIES[strategy].section
    return "wfst" if strategy in NATIVE["ctc"]["wfst"] else "beam"


def keys_of(config: DictConfig) -> dict[str, str]:
    """What `DECODING_KEYS` has for a config's strategy, under whichever name that stands there."""
    spec = find_strategy(config)
    keys = DECODING_KEYS[section_of(str(config.strategy))]
    return keys | LARGE_LM_KEYS if spec is not None and spec.name == LARGE_LM_STRATEGY else keys


def decoding_config(strategy: str | None, preset: str | None, options: Mapping[str, Any]) -> DictConfig:
    """NeMo's `decoding` section: the preset, and over it the options that were given (not None).

    Without a preset the strategy's shipped one is the base, with the values that suit an LM and phrases
    where they are given; without a strategy it is that of the preset, or flexctc_beam.

    Raises:
        UsageError: the preset cannot be read, a file that an option names does not exist, or an option
            has no effect with the strategy.
    """
    if preset is None:
        config = _shipped_config(strategy or DEFAULT_STRATEGY, options)
    else:
        config = load_preset(preset)
    if strategy is not None:
        config.strategy = strategy
    section = section_of(str(config.strategy))
    keys = keys_of(config)
    for name in dict.fromkeys(
        name for names in (*DECODING_KEYS.values(), LARGE_LM_KEYS) for name in names
    ):
        value = options.get(name)
        if value is None:
            continue
        if name not in keys:
            raise UsageError(
                f"{name}={value} has no effect with strategy {config.strategy}, whose options are "
                f"{', '.join(keys)}, and decoding.{section}.KEY=VALUE"
            )
        if name in ("lm", "large_lm", "phrases"):
            value = existing_file(name, str(value))
        if (section, name) == ("wfst", "lm"):
            _set_word_lm(config, value)
        else:
            OmegaConf.update(config, f"{section}.{keys[name]}", value, force_add=True)
    return config


def _shipped_config(strategy: str, options: Mapping[str, Any]) -> DictConfig:
    """The preset of a strategy, if there is one, with the values that suit what is given."""
    if strategy not in preset_names():
        return OmegaConf.create({})
    config = load_preset(strategy)
    has_lm, has_phrases = bool(options.get("lm")), bool(options.get("phrases"))
    given = {"lm": has_lm, "phrases": has_phrases, "both": has_lm and has_phrases}
    for what, values in SUITED.get(strategy, {}).items():
        if given[what]:
            config[section_of(strategy)].update(values)
    return config


def _set_word_lm(config: DictConfig, file: str) -> None:
    """Name a word LM, or the graph that was built from one; the other one of a preset goes."""
    from nemo_gpu_decoding.graph.store import is_word_graph

    keys = ("wfst_lm_path", "arpa_lm_path")
    named, other = keys if is_word_graph(file) else keys[::-1]
    OmegaConf.update(config, f"wfst.{named}", file, force_add=True)
    config.wfst.pop(other, None)
    if named == "arpa_lm_path":
        config.wfst.pop("small_lm_path", None)  # which is for ready-made graphs


def existing_file(option: str, value: str) -> str:
    """The absolute path of a file that an option names."""
    path = Path(value).expanduser()
    if not path.is_file():
        raise UsageError(f"{option}={value} is no file here")
    return str(path.resolve())


def load_phrase_file(option: str, path: str | None) -> list[str]:
    """Phrases of the list file that an option names; none if there is no such option."""
    if path is None:
        return []
    from nemo_gpu_decoding.fusion.boosting import read_phrases  # what the decoder itself reads them with

    return [phrase.text for phrase in read_phrases(existing_file(option, path))]


def writable_file(option: str, value: str) -> Path:
    """Where an option wants a file to be written.

    Raises:
        UsageError: its folder does not exist, or it is a folder itself.
    """
    path = Path(value).expanduser()
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{option}={value}: there is no folder {path.parent}")
    if path.is_dir():
        raise UsageError(f"{option}={value} is a folder, expected a file to write")
    return path


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
