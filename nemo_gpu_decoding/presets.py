"""Read and write presets, which are NeMo `decoding` sections in YAML files.

The shipped presets are in `conf/ctc_decoding/` and, for RNN-T and TDT, in `conf/rnnt_decoding/`: one per strategy, one
for open vocabulary (`_open`), some with values that suit an LM and phrases (`_lm`; word graphs, which hold an LM:
`_phrases`), and the settings of papers (`_paper`). Use a preset by name in a Hydra application:

    transcribe_speech.py ... +ctc_decoding=flexctc_beam ctc_decoding.beam.ngram_lm_model=lm.arpa
    transcribe_speech.py ... +rnnt_decoding=alsd_pp rnnt_decoding.beam.ngram_lm_model=lm.arpa

in configs with the section at another place, such as NeMo's training configs:

    ... +ctc_decoding@model.decoding=flexctc_beam

and in Python:

    cfg = load_preset("flexctc_beam")
    cfg.beam.ngram_lm_model = "lm.arpa"
    model.change_decoding_strategy(cfg)
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_gpu_decoding.container import write_text
from nemo_gpu_decoding.plain_text import path_of, read_lines

GROUPS = ("ctc_decoding", "rnnt_decoding")  # as NeMo's scripts name their sections
SECTIONS = ("beam", "wfst", "greedy", "confidence_cfg", "beam.boosting_tree", "wfst.boosting_tree")
# paths in preset files are relative to the file, so that a folder with preset and LM can be moved
PATH_KEYS = (
    *("beam.ngram_lm_model", "beam.source_lm_model", "beam.allowed_text"),
    *("beam.boosting_tree.key_phrases_file", "beam.boosting_tree.model_path"),
    *("wfst.arpa_lm_path", "wfst.wfst_lm_path", "wfst.words_path", "wfst.large_lm_path", "wfst.small_lm_path"),
    "wfst.boosting_tree.key_phrases_file",
)


def conf_folder() -> Path:
    """Return the folder `conf/`: inside the package in a wheel, beside it in a clone or editable install."""
    package = Path(__file__).parent
    is_inside = (package / "conf" / GROUPS[0]).is_dir()
    return (package if is_inside else package.parent) / "conf"


def preset_names(*groups: str) -> list[str]:
    """Return the names of the shipped presets in the given `GROUPS`, by default in all groups."""
    return sorted(file.stem for group in groups or GROUPS for file in (conf_folder() / group).glob("*.yaml"))


def load_preset(name: str) -> DictConfig:
    """Return a preset as a config for `change_decoding_strategy`.

    Args:
        name: name of a file or of a preset in this package. Relative paths in a file become absolute.

    Raises:
        ValueError: there is no such preset, or it is no mapping with a `strategy`.
    """
    file = path_of(name, "preset")
    if not file.is_file():
        if name not in preset_names():
            ours = ", ".join(preset_names())
            raise ValueError(f"preset={name} is no file here and none of the shipped ones ({ours})")
        (file,) = conf_folder().glob(f"*/{name}.yaml")
    text = "\n".join(read_lines(file, f"preset={name}"))
    try:
        config = OmegaConf.create(yaml.safe_load(text))
    # ValueError: a number with too many digits; RecursionError: a list that contains itself
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise ValueError(f"preset={name} is not valid YAML: {error}") from error
    if not isinstance(config, DictConfig) or not config or "strategy" not in config:
        raise ValueError(f"preset={name}: expected a mapping with the key `strategy`")
    if file.parent.parent == conf_folder():
        for base in config.pop("defaults", ()):  # as in Hydra; entries that are no texts name types
            if isinstance(base, str) and base != "_self_":
                config = DictConfig(OmegaConf.merge(load_preset(str(file.with_name(f"{base}.yaml"))), config))
    check_sections(config, f"preset={name}: ")
    for key in _path_keys(config):
        try:
            value = OmegaConf.select(config, key)
        except OmegaConfBaseException as error:
            raise ValueError(f"preset={name}: {key} cannot be read: {error}") from error
        if not isinstance(value, str | None):
            raise ValueError(f"preset={name}: {key} is {value!r}, expected a path")
        if value:
            OmegaConf.update(config, key, str((file.parent / path_of(value)).resolve()))
    return config


def check_sections(config: Mapping[str, Any], where: str) -> None:
    """Raise a ValueError that begins with `where` if a section of a `decoding` config is no mapping."""
    for key in SECTIONS:
        value: Any = config
        try:
            for part in key.split("."):
                value = None if value is None else value.get(part)
        except OmegaConfBaseException as error:
            raise ValueError(f"{where}{key} cannot be read: {error}") from error
        if not isinstance(value, Mapping | None):
            raise ValueError(f"{where}{key} is {value!r}, expected a mapping of keys to values")


def write_preset(file: Path, config: Mapping[str, Any], comment: str) -> None:
    """Write a preset that `load_preset` reads; a path below the parent of the preset's folder becomes relative."""
    config = OmegaConf.create(dict(config))
    for key in _path_keys(config):
        value = OmegaConf.select(config, key)
        if value:
            OmegaConf.update(config, key, _relative(Path(value).resolve(), file.resolve().parent))
    header = "".join(f"# {line}\n" for line in comment.splitlines())
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, header + OmegaConf.to_yaml(config))


def _path_keys(config: Any) -> list[str]:
    """Return the keys of a `decoding` config whose values are paths of files."""
    keys = list(PATH_KEYS)
    if isinstance(OmegaConf.select(config, "beam.grammar", throw_on_resolution_failure=False), str):
        keys.append("beam.grammar")  # a file, not a list of sentences
    pool = OmegaConf.select(config, "beam.lm_pool", throw_on_resolution_failure=False)
    return keys + [f"beam.lm_pool[{name!s}]" for name in pool] if isinstance(pool, DictConfig) else keys


def _relative(path: Path, folder: Path) -> str:
    """Return a path relative to `folder` if it is below the parent of `folder`, else the absolute path."""
    for up, base in (("", folder), ("../", folder.parent)):
        if path.is_relative_to(base):
            return up + path.relative_to(base).as_posix()
    return str(path)
