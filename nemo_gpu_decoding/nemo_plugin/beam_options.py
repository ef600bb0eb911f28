"""What the sections of all our strategies have in common: LM, boosting and n-best lists.

`ctc_config.py`, `transducer_config.py` and `wfst_config.py` read whole sections with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from nemo.utils import logging
from omegaconf import DictConfig, OmegaConf

from nemo_gpu_decoding.fusion.boosting import REFUNDS, BoostingConfig
from nemo_gpu_decoding.fusion.ngram import ENCODINGS
from nemo_gpu_decoding.nemo_plugin.strict import check_keys, read_bool, read_choice, read_number

SHARED_KEYS = ("n_best", "backend", "threads", "lm_encoding")  # what we add to every `beam` of NeMo

Config = Mapping[str, Any]
S = TypeVar("S")


@dataclass(frozen=True)
class FusionOptions:
    """LM and boosting tree, not loaded yet."""

    lm_path: Path | None
    lm_weight: float
    lm_encoding: str
    boosting: BoostingConfig
    boosting_weight: float


@dataclass(frozen=True)
class BeamOptions(Generic[S]):
    """Everything that a `beam` section says."""

    search: S  # config of the decoder; `alignments` is left to NeMo's decoding object
    return_best: bool  # False: NeMo gets n-best lists
    fusion: FusionOptions

    @property
    def boosting(self) -> BoostingConfig:
        return self.fusion.boosting

    @property
    def boosting_weight(self) -> float:
        return self.fusion.boosting_weight


def given_options(cfg: DictConfig, section: str = "beam") -> dict[str, Any]:
    """A section of a decoding config, interpolations resolved."""
    given: Any = OmegaConf.to_container(cfg.get(section) or OmegaConf.create({}), resolve=True)
    return given


def boosting_keys() -> tuple[str, ...]:
    """The valid keys of `boosting_tree`: NeMo's and ours."""
    return tuple(field.name for field in fields(BoostingConfig))


def read_fusion_options(beam: Config) -> FusionOptions:
    """LM and boosting of a section in which all keys are set.

    Raises:
        ValueError: a value is wrong; the message names the key.
        FileNotFoundError: `beam.ngram_lm_model` or the phrase file is no file.
    """
    boosting, boosting_weight = read_boosting(beam)
    has_lm = beam["ngram_lm_model"] is not None
    return FusionOptions(
        lm_path=existing_file("beam.ngram_lm_model", beam["ngram_lm_model"]),
        lm_weight=_weight("beam", beam, "ngram_lm_alpha", "ngram_lm_model", has_lm),
        lm_encoding=read_choice("beam.lm_encoding", beam.get("lm_encoding", "auto"), ENCODINGS),
        boosting=boosting,
        boosting_weight=boosting_weight,
    )


def read_boosting(options: Config, section: str = "beam") -> tuple[BoostingConfig, float]:
    """The phrases of a section in which all keys are set, and their weight.

    Raises:
        ValueError, FileNotFoundError: as `read_fusion_options`.
    """
    boosting = _boosting_config(section, options["boosting_tree"])
    is_used = not boosting.is_empty
    return boosting, _weight(section, options, "boosting_tree_alpha", "boosting_tree", is_used)


def read_n_best(options: Config, return_best: bool, section: str = "beam") -> Any:
    """The number of hypotheses to return: 1, or what `n_best` says, or `beam_size`."""
    n_best = options.get("n_best")
    if n_best is None:
        return 1 if return_best else options["beam_size"]
    if return_best and n_best != 1:
        raise ValueError(
            f"{section}.n_best is {n_best}, but {section}.return_best_hypothesis is true; "
            "set it to false for n-best lists"
        )
    return n_best


def check_top_level(cfg: DictConfig, own_keys: tuple[str, ...], section: str = "beam") -> None:
    """Keys of ours belong into the section where all others are."""
    for key in own_keys:
        if key in cfg:
            raise ValueError(f"'{key}' stands beside `{section}`, expected it in there: {section}.{key}")


def check_search_type(search_type: Any, strategy: str) -> None:
    """`beam.search_type` may name the strategy (see `register.py`), but not another one."""
    if search_type not in ("default", strategy):
        raise ValueError(
            f"beam.search_type is {search_type!r} with strategy {strategy}, expected 'default' or "
            f"'{strategy}'"
        )


def wants_alignments(cfg: DictConfig, options: Config, section: str = "beam") -> bool:
    """`preserve_alignments` beside the section wins over the one in it, as in NeMo."""
    flag = cfg.get("preserve_alignments")
    if flag is None:
        flag = read_bool(f"{section}.preserve_alignments", options["preserve_alignments"])
    return bool(flag)


def _boosting_config(section: str, given: Config | None) -> BoostingConfig:
    options, name = dict(given or {}), f"{section}.boosting_tree"
    check_keys(name, options, boosting_keys())
    for field in fields(BoostingConfig):
        if isinstance(field.default, bool) and options.get(field.name) is not None:
            read_bool(f"{name}.{field.name}", options[field.name])
    for key in ("key_phrases_file", "model_path"):
        existing_file(f"{name}.{key}", options.get(key))
    if "refund" in options:
        options["refund"] = read_choice(f"{name}.refund", options["refund"], REFUNDS)
    try:
        return BoostingConfig(**options)
    except (TypeError, ValueError) as error:  # the messages begin with the name of the field
        raise ValueError(f"{name}.{error}") from None


def existing_file(key: str, value: Any) -> Path | None:
    """The file that a key names, None if it names none.

    Raises:
        ValueError: the value is no path.
        FileNotFoundError: there is no such file.
    """
    if value is None:
        return None
    if not isinstance(value, str):
        raise ValueError(f"{key} is {value!r}, expected the path of a file")
    path = Path(value).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"{key} is '{value}', which is no file")
    return path


def _weight(section: str, options: Config, key: str, of: str, is_used: bool) -> float:
    """The weight of a fusion model. It is checked even where there is no model to be weighted."""
    value, name = options[key], f"{section}.{key}"
    if value is None:
        if is_used:
            raise ValueError(f"{name} is not set, expected the weight of {section}.{of}, a number >= 0")
        return 0.0
    weight = read_number(name, value)
    if not 0.0 <= weight < float("inf"):
        raise ValueError(f"{name} is {weight}, expected a finite number >= 0")
    if is_used and weight == 0.0:
        logging.warning(f"`{section}.{of}` is set, but has no effect: `{name}` is 0.")
    return weight
