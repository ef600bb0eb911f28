"""Read the sections `beam` and `wfst` of NeMo's decoding config; a key without effect is an error.

A `Section` describes the section of a strategy. Its keys are the fields of the search's dataclass, and keys that NeMo
lacks. NeMo's structured configs contain all options of NeMo, so a `Section` also lists NeMo keys without effect, with
their valid values. `beam_sections.py` and `word_graph_sections.py` define the sections.

NeMo's scripts take a new key with a plus: `+ctc_decoding.beam.merge=prefix`. `change_decoding_strategy`
takes a dict or DictConfig with any keys: `{"strategy": "flexctc_beam", "beam": {"merge": "prefix"}}`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from os import PathLike
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, cast

from nemo.collections.asr.parts.submodules.ctc_decoding import CTCDecodingConfig
from nemo.collections.asr.parts.submodules.rnnt_decoding import RNNTDecodingConfig
from nemo.utils import logging, logging_mode
from omegaconf import DictConfig, OmegaConf

from nemo_gpu_decoding.checks import FieldError, did_you_mean
from nemo_gpu_decoding.fusion.boosting import BoostingConfig
from nemo_gpu_decoding.fusion.fusion import check_lms
from nemo_gpu_decoding.fusion.ngram import ENCODINGS
from nemo_gpu_decoding.metrics import ConfidenceMap
from nemo_gpu_decoding.plain_text import path_of
from nemo_gpu_decoding.presets import load_preset, preset_names
from nemo_gpu_decoding.schema import check_option, checked_options, defaults_of, key_of, option
from nemo_gpu_decoding.search.config import SearchConfig

T = TypeVar("T")
S = TypeVar("S", bound=SearchConfig)

# NeMo 2.7 has this section in `wfst`, and so do configs saved by it
K2_DEFAULTS = {"search_beam": 20.0, "output_beam": 10.0, "min_active_states": 30, "max_active_states": 10000}

# Keys that NeMo reads, or has read, and its dataclasses lack; `n_best` is of this package's command line
UNDECLARED = {
    "greedy": ("max_symbols", "max_generation_delta", "n_samples", "temperature"),
    "beam": ("max_symbols", "tsd_max_sym_exp", "compute_timestamps", "preserve_frame_confidence", "n_best"),
    "wfst": ("n_best",),
}

# Values in NeMo's model configs that differ from its defaults, whatever the strategy
STOCK: dict[str, tuple[Any, ...]] = {
    "fused_batch_size": (-1,),
    "beam.beam_size": (1, 2, 4, 5),
    "beam.return_best_hypothesis": (True, False),
}


@checked_options
@dataclass(frozen=True)
class AllowedOptions:
    """The language lock (see `allowed_tokens`); without scripts, tokens and text, all tokens are allowed."""

    scripts: tuple[str, ...] = option((), nemo="allowed_scripts")
    tokens: tuple[str, ...] = option((), nemo="allowed_tokens")
    text: Path | None = option(None, nemo="allowed_text")  # a file of sentences
    # price of other tokens, also for scripts that requests name
    price: float = option(math.inf, low=0, infinite=True, nemo="allowed_price")


@checked_options
@dataclass(frozen=True)
class FusionOptions:
    """The paths and weights of token-level LMs and phrases, before they are loaded, by the names of `Fusion`."""

    lm: Path | None = option(None, nemo="ngram_lm_model")
    lm_weight: float = option(0.0, nemo="ngram_lm_alpha")
    lm_encoding: str = option("auto", choices=ENCODINGS)
    boosting: BoostingConfig = option(BoostingConfig(), nemo=None)
    boosting_weight: float | None = option(0.0, nemo=None)  # None: the default, see `default_bonuses.py`
    source_lm: Path | None = option(None, nemo="source_lm_model")
    source_lm_weight: float = option(0.0, low=0, nemo="source_lm_alpha")
    allowed: AllowedOptions = option(AllowedOptions(), nemo=None)
    grammar: Path | tuple[str, ...] | None = None  # a file, see `load_grammar`, or sentences
    grammar_price: float = option(math.inf, low=0, infinite=True)  # of tokens outside
    lm_pool: Mapping[str, Path] = option({})  # LMs that requests name
    lm_pool_weights: Mapping[str, float] = option({}, nemo="lm_pool_alpha")  # of some of them

    def check_rules(self) -> None:
        check_lms(self)

    @property
    def has_phrases(self) -> bool:
        return not self.boosting.is_empty and self.boosting_weight != 0


@dataclass(frozen=True)
class Options(Generic[S]):
    """The checked values of a section of NeMo's decoding config."""

    search: S  # options of the decoder; NeMo's decoding object sets `alignments`
    n_best: int  # hypotheses returned
    return_best: bool  # False: NeMo gets n-best lists
    fusion: FusionOptions
    confidence_map: ConfidenceMap | None  # of word confidence


class NoEffect(NamedTuple):
    """The error message for a key that has no effect on a strategy, and the values of the key that raise no error."""

    neutral: tuple[Any, ...]  # values that are accepted silently; the first one is the default
    reason: str  # text after "beam.key is 3, which "
    remedy: str = ""  # advice; "": remove the key


@functools.cache
def nemo_config(family: str) -> dict[str, Any]:
    """Return NeMo's decoding config of a family, "ctc" or "rnnt", with its defaults."""
    schema = {"ctc": CTCDecodingConfig, "rnnt": RNNTDecodingConfig}[family]
    return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.structured(schema), resolve=True))


def nemo_defaults(family: str, section: str) -> dict[str, Any]:
    """Return the keys of a section with the default values that NeMo's `change_decoding_strategy` gives them."""
    return ({"k2_decoding_cfg": K2_DEFAULTS} if section == "wfst" else {}) | nemo_config(family)[section]


@dataclass(frozen=True)
class Section:
    """The keys of the section `beam` or `wfst` of NeMo's decoding config for one strategy."""

    strategy: str
    family: str  # "ctc", or "rnnt" for RNN-T and TDT
    name: str  # "beam" or "wfst"
    search: type[SearchConfig]
    # Further keys that NeMo lacks, and fields of `search` with another default here: key -> default
    more: Mapping[str, Any]
    undeclared: tuple[str, ...] = ()  # NeMo's decoders read these keys, but its dataclass lacks them
    optional: tuple[str, ...] = ()  # keys of NeMo's that may be null: NeMo's default, or the search's
    search_types: tuple[str, ...] = ("default",)  # other names of this strategy
    # Keys of other strategies, dotted in nested sections
    unused: Mapping[str, NoEffect] = field(default_factory=dict)
    foreign: Mapping[str, str] = field(default_factory=dict)  # nested section -> owner of its options
    counterparts: Mapping[str, str] = field(default_factory=dict)  # key of `foreign` -> key here

    @property
    def defaults(self) -> dict[str, Any]:
        """Return NeMo's keys of this section with NeMo's default values."""
        return nemo_defaults(self.family, self.name)

    @property
    def added(self) -> dict[str, Any]:
        """Return the keys that this package adds to NeMo's section, with their default values."""
        ours = defaults_of(self.search) | dict(self.more)
        return {key: value for key, value in ours.items() if key not in (*self.defaults, *self.undeclared)}

    @property
    def valid(self) -> tuple[str, ...]:
        """Return the keys that have an effect on the strategy: first NeMo's keys, then the added ones."""
        return tuple(key for key in (*self.defaults, *self.undeclared, *self.added) if key not in self.unused)

    def read(self, cfg: DictConfig) -> Values:
        """Check all keys of the section in a decoding config, and return their values.

        Raises:
            ValueError: a key is unknown or without effect; the message has the key and the valid ones.
        """
        whole: Any = OmegaConf.to_container(cfg, resolve=True)
        given = whole.get(self.name) or {}
        schema = nemo_config(self.family)
        places: dict[str, Collection[str]] = {f"{self.name}.": self.valid, "": schema}
        places |= {f"{name}.": keys for name, keys in schema.items() if isinstance(keys, dict) and name != self.name}
        both = nemo_config("rnnt") | nemo_config("ctc")  # one config may be for models of both families
        common = [key for key in whole if key in both and whole[key] in (both[key], *STOCK.get(key, ()))]
        check_keys("", [key for key in whole if key not in common], schema, places)
        check_keys(self.name, [key for key in given if key not in self.unused], self.valid, places)
        self._check_others(whole)
        entries = {**self.defaults, **self.added, **given}
        for key in self.optional:
            if entries.get(key) is None and self.defaults.get(key) is None:
                entries.pop(key, None)  # the default of the search
            elif entries[key] is None:
                entries[key] = self.defaults[key]
        preset: Any = load_preset(self.strategy) if self.strategy in preset_names() else {}
        of_preset = (preset.get(self.name) or {}).get("ngram_lm_alpha")
        values = Values(self.name, entries, (0.0, self.defaults.get("ngram_lm_alpha"), of_preset))
        values.choice("search_type", (*self.search_types, self.strategy), f"with strategy {self.strategy}")
        self._check_foreign(values)
        listed = f"; valid keys: {', '.join(sorted(self.valid))}"
        for key, what in self.unused.items():
            if key in values.entries:
                check_no_effect(f"{self.name}.{key}", values[key], what, listed)
        for flag in ("return_best_hypothesis", "compute_timestamps"):
            values.flag(flag)
        if cfg.get("preserve_alignments") is None:  # the value outside of the section has priority, as in NeMo
            values.flag("preserve_alignments")
        return values

    def _check_others(self, whole: Mapping[str, Any]) -> None:
        """Raise a ValueError for a value that is not a default in a section that this strategy does not read."""
        check_confidence(whole, self.family)
        check_native(whole, ("greedy",))
        schema = nemo_config(self.family)
        for name in {"beam", "wfst", "greedy"} & schema.keys() - {self.name}:
            neutral = _flat(nemo_defaults(self.family, name), "")
            for key, value in _flat(whole.get(name) or {}, "").items():
                is_stock = _spelled(value) in (None, _spelled(neutral.get(key)), *STOCK.get(f"{name}.{key}", ()))
                instead = f"set {self.name}.{key} instead" if key in self.valid else ""
                # other options of greedy decoders are in all model configs, and do not change a search
                is_neutral = is_stock or (name == "greedy" and not key.startswith(("ngram_lm_model", "boosting_tree")))
                what = NoEffect((value,) if is_neutral else (), f"'{self.strategy}' does not read", instead)
                check_no_effect(f"{name}.{key}", value, what)

    def _check_foreign(self, values: Values) -> None:
        for name, owner in self.foreign.items():
            defaults = self.defaults[name] or {}  # Riva's exist only if its package is installed
            if defaults:
                check_keys(f"{self.name}.{name}", values[name] or (), defaults)
            neutral = _flat(defaults, f"{name}.")
            reason = f"is an option of {owner} and has no effect with '{self.strategy}'"
            for key, value in _flat(values[name] or {}, f"{name}.").items():
                remedy = f"set {self.name}.{self.counterparts[key]} instead" if key in self.counterparts else ""
                known = (neutral[key],) if key in neutral else ()
                check_no_effect(f"{self.name}.{key}", value, NoEffect(known, reason, remedy))


@dataclass(frozen=True)
class Values:
    """The values in a section. A method checks one value, or builds a dataclass that checks several values.

    An error is a ValueError that names the key, or a FileNotFoundError.
    """

    section: str
    entries: Mapping[str, Any]
    idle_lm_weights: tuple[float | None, ...] = (0.0,)  # values of `ngram_lm_alpha` that need no LM

    def __getitem__(self, key: str) -> Any:
        return self.entries[key]

    def error(self, key: str, expected: str, note: str = "") -> FieldError:
        """Return a FieldError for the value of a key: "beam.key is 3, expected ..."."""
        return FieldError(f"{self.section}.{key}", self.entries[key], expected, note)

    def checked(self, key: str, kind: str, **rule: Any) -> Any:
        """Check the type of a key's value and the rule of its option, and return the value."""
        check_option(f"{self.section}.{key}", self.entries[key], kind, rule)
        return self.entries[key]

    def flag(self, key: str) -> bool:
        return key in self.entries and bool(self.checked(key, "bool"))

    def weight(self, key: str) -> float:
        return float(self.checked(key, "float", low=0))

    def choice(self, key: str, choices: Collection[str], note: str = "") -> str:
        """Return the member of `choices` that a key names, as a string in any letter case or as an enum member."""
        spelled = _spelled(self.entries[key])
        if spelled not in choices:
            raise self.error(key, f"one of {', '.join(choices)}", note)
        return spelled

    def text(self, key: str) -> str | None:
        value = self.entries[key]
        if value is not None and not (isinstance(value, str) and value):
            raise self.error(key, "a text")
        return value

    def file(self, key: str) -> Path | None:
        """Return the path of the file that a key names, or None if the key is not set."""
        value = self.entries.get(key)
        if value is None:
            return None
        if not isinstance(value, str | PathLike):
            raise self.error(key, "the path of a file")
        path = path_of(value)
        if not path.is_file():
            raise FileNotFoundError(f"{self.section}.{key} is '{value}', which is no file")
        return path

    def mapping(self, key: str) -> Values:
        """Return the entries of the mapping in a key; no entries if the key is not set."""
        value = self.entries[key]
        if not isinstance(value, Mapping | None):
            raise self.error(key, "a mapping from names to values")
        return Values(f"{self.section}.{key}", value or {})

    def config(self, kind: Callable[..., T], **settled: Any) -> T:
        """Create a dataclass of options from the keys of its fields; the dataclass checks the values.

        Args:
            settled: values of fields that have no key in the section.
        """
        keys = {field.name: key_of(field) for field in fields(cast(Any, kind))}
        types = {field.name: str(field.type) for field in fields(cast(Any, kind))}
        names = [name for name, key in keys.items() if name not in settled and key in self.entries]
        read = {"str": lambda key: _spelled(self[key]), "Path | None": self.file, "tuple[str, ...]": self._texts}
        read |= {"Path | tuple[str, ...] | None": self._file_or_texts}
        options = {name: read.get(types[name], self.__getitem__)(str(keys[name])) for name in names}
        try:
            return kind(**options, **settled)
        except FieldError as error:
            name, *item = error.field.partition("[")
            raise error.named("".join([f"{self.section}.{keys.get(name) or name}", *item])) from None
        except ValueError as error:  # an error inside a value
            raise ValueError(f"{self.section}: {error}") from None

    def n_best(self) -> Any:
        """Return the number of hypotheses to return: 1, `n_best` or `beam_size`."""
        n_best, return_best = self.entries["n_best"], self.flag("return_best_hypothesis")
        if n_best is None:
            return 1 if return_best else self.entries["beam_size"]
        if return_best and n_best != 1:
            raise ValueError(
                f"{self.section}.n_best is {n_best}, but {self.section}.return_best_hypothesis is true; "
                "set it to false for n-best lists"
            )
        return n_best

    def confidence_map(self) -> ConfidenceMap | None:
        """Return the map from word confidence to probability, or None if it is not set."""
        value = self.entries["confidence_map"]
        if value is None:
            return None
        try:
            fitted = ConfidenceMap(*(float(number) for number in value))
        except (TypeError, ValueError):
            fitted = ConfidenceMap(-1.0, 0.0)
        if not (0 <= fitted.slope < math.inf and math.isfinite(fitted.intercept)):
            raise self.error("confidence_map", "[slope, intercept], two finite numbers, the slope >= 0")
        return fitted

    def fusion(self) -> FusionOptions:
        """Return paths and weights of the token-level LMs and phrases in a `beam` section."""
        lm, files, weights = self.file("ngram_lm_model"), self.mapping("lm_pool"), self.mapping("lm_pool_alpha")
        pool = {name: file for name in files.entries if (file := files.file(name)) is not None}
        pool_weights = {name: weights.weight(name) for name in weights.entries}
        model = "lm_pool" if lm is None and pool else "ngram_lm_model"
        weight = self._weight_of(model, "ngram_lm_alpha", lm is not None or pool.keys() > pool_weights.keys())
        has_source = self.entries["source_lm_model"] is not None
        source_weight = self._weight_of("source_lm_model", "source_lm_alpha", has_source)
        boosting, boosting_weight = self.boosting()
        if boosting.phrase_share != BoostingConfig.phrase_share and (lm is None or boosting_weight is not None):
            note = "without ngram_lm_model" if lm is None else "with boosting_tree_alpha"
            key = f"{self.section}.boosting_tree.phrase_share"
            raise FieldError(key, boosting.phrase_share, repr(BoostingConfig.phrase_share), note)
        if self.entries["grammar"] is not None and not boosting.is_empty and boosting_weight != 0:
            raise self.error("grammar", "null with boosting_tree: a grammar has all sentences")
        settled: dict[str, Any] = {"boosting": boosting, "boosting_weight": boosting_weight, "lm_pool": pool}
        settled |= {"lm_weight": weight, "source_lm_weight": source_weight, "lm_pool_weights": pool_weights}
        return self.config(FusionOptions, allowed=self.config(AllowedOptions), **settled)

    def _file_or_texts(self, key: str) -> Path | tuple[str, ...] | None:
        """Return the path or the list of texts that a key has, or None if the key is not set."""
        value = self.entries[key]
        is_file = value is None or isinstance(value, str)
        return self.file(key) if is_file else self._texts(key, "a list of texts, or a text file")

    def _texts(self, key: str, expected: str = "a list of texts") -> tuple[str, ...]:
        """Return the text or the list of texts in a key as a tuple, or () if the key is not set."""
        values = self.entries[key] or ()
        texts = (values,) if isinstance(values, str) else values
        if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
            raise self.error(key, expected)
        return tuple(texts)

    def boosting(self) -> tuple[BoostingConfig, float | None]:
        """Return the phrase options and the boosting weight; weight None is the default for the list's length."""
        name, given = f"{self.section}.boosting_tree", self.mapping("boosting_tree").entries
        check_keys(name, given, [f.name for f in fields(BoostingConfig)])
        switches = {f.name for f in fields(BoostingConfig) if isinstance(f.default, bool)}
        unset = {key for key in switches & given.keys() if given[key] is None}
        tree = Values(name, {key: value for key, value in given.items() if key not in unset})
        for key in ("key_phrases_file", "model_path"):
            tree.file(key)
        language = given.get("source_lang", BoostingConfig.source_lang)  # free text: keep its letter case
        boosting = tree.config(BoostingConfig, source_lang=language)
        if self.entries["boosting_tree_alpha"] is None:
            return boosting, None
        return boosting, self._weight_of("boosting_tree", "boosting_tree_alpha", not boosting.is_empty)

    def _weight_of(self, model: str, key: str, is_used: bool) -> float:
        """Return the weight of an LM or boosting tree, which is checked even if no model is set."""
        name = f"{self.section}.{key}"
        if self.entries[key] is None:
            if is_used:
                raise ValueError(f"{name} is not set, expected the weight of {self.section}.{model}, a number >= 0")
            return 0.0
        weight = self.weight(key)
        if key == "ngram_lm_alpha" and not is_used and weight not in self.idle_lm_weights:
            logging.warning(
                f"`{name}` is {weight}, but has no effect: `{self.section}.{model}` names no LM.",
                mode=logging_mode.ONCE,
            )
        if is_used and weight == 0.0:
            logging.warning(f"`{self.section}.{model}` is set, but has no effect: `{name}` is 0.")
        return weight


def check_confidence(cfg: Any, family: str) -> None:
    """Raise a ValueError for an unknown key of `confidence_cfg`, for which NeMo raises a TypeError."""
    confidence, known = cfg.get("confidence_cfg") or {}, nemo_config(family)["confidence_cfg"]
    check_keys("confidence_cfg", confidence, known)
    check_keys("confidence_cfg.method_cfg", confidence.get("method_cfg") or {}, known["method_cfg"])


def check_native(whole: Any, sections: Collection[str] = tuple(UNDECLARED)) -> None:
    """Raise a ValueError for a key in one of these sections that no strategy of NeMo knows."""
    for name in sections:
        known = [key for family in ("ctc", "rnnt") for key in nemo_config(family).get(name) or ()]
        check_keys(name, whole.get(name) or (), {*known, *UNDECLARED[name]})


def check_keys(
    section: str, given: Collection[str], valid: Collection[str], places: Mapping[str, Collection[str]] | None = None
) -> None:
    """Raise a ValueError for an unknown key of `section`; it suggests the closest key and lists the valid ones.

    `places` maps prefixes such as "beam." to the keys of other sections, to suggest where a misplaced key belongs.
    """
    for key in given:
        if key not in valid:
            there = [f"{place}{key}" for place, keys in (places or {}).items() if key in keys]
            hint = f", expected {' or '.join(there)}" if there else did_you_mean(str(key), valid)
            name = f"{section}.{key}" if section else key
            raise ValueError(f"unknown key '{name}'{hint}; valid keys: {', '.join(sorted(valid))}")


def check_no_effect(key: str, value: Any, what: NoEffect, listed: str = "") -> None:
    """Raise a ValueError if a key without effect has a value that is not in its neutral values."""
    if value in what.neutral:
        return
    remedy = what.remedy or "remove it" + (f" (default {what.neutral[0]!r})" if what.neutral else "")
    raise ValueError(f"{key} is {value!r}, which {what.reason}; {remedy}{listed}")


def _spelled(value: Any) -> Any:
    """Return the name of a choice in lower case; replace an enum member by its value.

    Configs from a saved `.nemo` have the names of enum members ("MAX") instead of their values ("max").
    """
    value = value.value if isinstance(value, Enum) else value
    return value.lower() if isinstance(value, str) else value


def _flat(section: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Flatten nested sections to one mapping with dotted keys such as "beam.beam_size"."""
    flat: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
