"""Build NeMo's `decoding` section from command-line options, and check files that the options name."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_gpu_decoding.checks import FieldError, check_choice
from nemo_gpu_decoding.cli.options import keys_for_commands, with_options_of
from nemo_gpu_decoding.nemo_plugin.register import NATIVE, STRATEGIES, find_strategy, possible_strategies, wrong_family
from nemo_gpu_decoding.plain_text import path_of
from nemo_gpu_decoding.presets import check_sections, load_preset, preset_names
from nemo_gpu_decoding.schema import option
from nemo_gpu_decoding.search.flexctc_beam.config import FlexCTCConfig
from nemo_gpu_decoding.search.transducer.config import AESConfig, ALSDConfig

if TYPE_CHECKING:
    from nemo_gpu_decoding.nemo_plugin.model import Model

logger = logging.getLogger("nemo_gpu_decoding")
T = TypeVar("T")
DEFAULT_STRATEGY = {"ctc": "flexctc_beam", "rnnt": "alsd_pp"}  # by head of the model
LARGE_LM_STRATEGY = "paged_biglm"  # the strategy with a second LM

# strategies whose options commands have, see `with_options_of`
SEARCHES = {"flexctc_beam": FlexCTCConfig, "alsd_pp": ALSDConfig, "aes_pp": AESConfig}
SEARCH_KEYS = {strategy: list(keys_for_commands(config).values()) for strategy, config in SEARCHES.items()}
TREE = ("segmentations", "ac_threshold", "ignore_case", "phrase_share")  # options of the boosting tree
# option -> key of NeMo's section
PHRASE_OPTIONS = {"phrases": "boosting_tree.key_phrases_file", "boosting_weight": "boosting_tree_alpha"}
BEAM_KEYS = {"lm": "ngram_lm_model", "lm_weight": "ngram_lm_alpha", "lms": "lm_pool"}
BEAM_KEYS |= {"source_lm": "source_lm_model", "source_lm_weight": "source_lm_alpha"}
BEAM_KEYS |= {name: name for name in ("allowed_scripts", "grammar")}
BEAM_KEYS |= PHRASE_OPTIONS | {name: f"boosting_tree.{name}" for name in TREE}
# `lm` is, for a graph, wfst_lm_path
WORD_GRAPH_KEYS = {"beam_width": "beam_width", "lm": "arpa_lm_path", "lm_weight": "lm_weight"}
WORD_GRAPH_KEYS |= PHRASE_OPTIONS | {name: f"boosting_tree.{name}" for name in ("ac_threshold", "ignore_case")}
# options that affect NeMo's strategies; those of its other beam searches are in `_BATCHED`
_SIMPLE = ("beam_size", "score_norm", "lm", "lm_weight", "beam_beta")
_BATCHED = (*_SIMPLE, "blank_lm_score_mode", "pruning_mode", "phrases", "boosting_weight")
NATIVE_OPTIONS = {
    **dict.fromkeys(("greedy", "greedy_batch"), ()),
    **dict.fromkeys(("tsd", "alsd"), _SIMPLE[:2]),
    **dict.fromkeys(("beam", "pyctcdecode", "flashlight", "maes"), _SIMPLE),
}
LARGE_LM_KEYS = {"large_lm": "large_lm_path", "large_lm_weight": "large_lm_weight"}
FILES = ("lm", "source_lm", "large_lm", "phrases", "grammar")
LM_KEYS = ("ngram_lm_model", "kenlm_path", "lm_pool", "arpa_lm_path", "wfst_lm_path")  # of NeMo's sections
PHRASE_KEYS = ("model_path", "key_phrases_file", "key_phrases_list", "key_phrase_items_list")  # of `boosting_tree`


@dataclass
class ModelOptions:
    """Options of the commands that decode with a model."""

    topic = "model, LMs and phrases"

    # A .nemo file, or the name of a pretrained model that NeMo can fetch.
    model: str = MISSING
    # Decoding strategy: for CTC flexctc_beam, cuda_wfst (word graphs) or paged_biglm (word graphs and a large LM), for
    # RNN-T and TDT alsd_pp or aes_pp. `transcribe` also accepts NeMo's own strategies, such as greedy_batch. null:
    # the strategy of the preset. Without a preset: flexctc_beam if the model has a CTC head and head=rnnt is not
    # given, else alsd_pp.
    strategy: str | None = None
    # A YAML file of decoding options with NeMo's keys (`tune` writes one), or the name of a shipped preset. Options of
    # the command line override it. null: the shipped preset of the strategy, adapted to lm and phrases.
    preset: str | None = None
    # Token-level n-gram LM: an ARPA file or NeMo's NGPU-LM (.nemo). For word graphs: a word-level ARPA file, or a
    # graph that `build-graph` built from one.
    lm: str | None = None
    # For flexctc_beam, alsd_pp and aes_pp: a token-level n-gram LM of the model's training text, or its internal LM;
    # `build-lm` makes both. Its scores are subtracted from those of `lm` (density ratio), because the network has
    # learnt this text.
    source_lm: str | None = None
    # For paged_biglm: the large word-level LM, a file of `pack-lm` or an ARPA file. `lm` is the small LM. If `lm` is
    # a graph, set wfst.small_lm_path in the preset, or decoding.wfst.small_lm_path of `transcribe`, to its ARPA file.
    large_lm: str | None = None
    # Text file of phrases to boost, one per line, optionally followed by a weight and by aliases, each after a tab:
    # spellings that are written as the phrase. `tune` reports precision, recall and F-score of the phrases.
    phrases: str | None = None
    # Utterances per batch of the encoder.
    batch_size: int = option(8, low=1)
    # Where the model runs: auto, cpu, cuda, cuda:1 ...
    device: str = "auto"
    # Show NeMo's own messages.
    verbose: bool = False


@with_options_of(SEARCHES.values())
@dataclass
class DecodingOptions(ModelOptions):
    """Options of commands that decode with one setting. null keeps the value of the preset, or NeMo's default."""

    topic = "search"

    # For flexctc_beam, alsd_pp and aes_pp: token-level LMs by name, lms.NAME=FILE. The field `lm` in a line of the
    # manifest, or in the first message of a stream, names its LM; the option lm is the LM of the others. The weight is
    # lm_weight, or decoding.beam.lm_pool_alpha.NAME.
    lms: dict[str, Any] = field(default_factory=dict)
    # Hypotheses kept per frame, 1 .. 4096. A larger beam is slower, and seldom better beyond 16; names need 32.
    beam_size: int | None = option(None, low=1, high=4096)
    # For word graphs: hypotheses whose cost exceeds the best one by more than this are dropped, natural log, > 0.
    beam_width: float | None = option(None, above=0)
    # Weight of the LM (paged_biglm: of both LMs), >= 0; 0.3 .. 1 is usual. `tune` finds it. An error without an LM.
    lm_weight: float | None = option(None, low=0)
    # Weight of the source LM, >= 0; required with source_lm. `tune` finds it.
    source_lm_weight: float | None = option(None, low=0)
    # For paged_biglm: share of the large LM in lm_weight, >= 0; with 1 only the large LM counts.
    large_lm_weight: float | None = option(None, low=0)
    # For flexctc_beam, alsd_pp and aes_pp: bonus per token, natural log; a value > 0 offsets the deletions that an LM
    # causes. `tune` finds it.
    beam_beta: float | None = option(None)
    # Weight of phrase boosting, natural log, >= 0; 0.25 .. 2 is usual, for word graphs (per word) 5 .. 40. null: a
    # default from the LM or the length of the list, unless the preset has one. An error without phrases.
    boosting_weight: float | None = option(None, low=0)
    # Boost phrases as written, in lower case, in upper case and with capital initials.
    ignore_case: bool | None = None
    # For flexctc_beam, alsd_pp and aes_pp with an LM and no boosting_weight: share of words from the list, (0, 1].
    phrase_share: float | None = option(None, above=0, high=1)
    # For multilingual models with flexctc_beam, alsd_pp and aes_pp: the scripts that may be written, as Unicode names
    # them, such as Latin or [Han,Hiragana,Katakana]. Digits and punctuation are always allowed. Other tokens are
    # forbidden, or cost decoding.beam.allowed_price.
    allowed_scripts: Any = None
    # For flexctc_beam, alsd_pp and aes_pp: a text file with all sentences that an utterance may be, one per line.
    # Tokens outside cost decoding.beam.grammar_price. An utterance in which no sentence fits has an empty text, and
    # in_grammar is false in its line of the output.
    grammar: str | None = None
    # Any key of NeMo's decoding section, as decoding.KEY=VALUE; overrides all other options.
    decoding: dict[str, Any] = field(default_factory=dict)


def fields_of(cls: type[T], options: Any) -> T:
    """Create a dataclass `cls` whose fields have the values of the options with the same names."""
    return cls(**{field.name: getattr(options, field.name) for field in fields(cast(Any, cls))})


def check_rescoring(given: Any) -> None:
    """Raise a ValueError if `rescore` (a second pass) has only one hypothesis to rank (n_best=1)."""
    if given.rescore and given.n_best < 2:
        raise ValueError(f"rescore={given.rescore} orders n_best hypotheses; n_best is {given.n_best}, expected >= 2")


def check_weight(name: str, value: Any, is_used: bool) -> None:
    """Raise a ValueError if an LM weight is given without an LM, or an option of phrases without phrases."""
    if value is not None and not is_used:
        option, what = ("lm", "an LM") if name == "lm_weight" else ("phrases", "phrases")
        raise ValueError(f"{name} is {value}, which has no effect without {what}; add {option}=FILE or remove {name}")


def check_weights(config: DictConfig, options: Any, *, has_own_phrases: bool) -> None:
    """Raise a ValueError for a weight on the command line if the `decoding` section lacks its LM or phrases.

    Args:
        has_own_phrases: whether utterances or streams may have phrases of their own.
    """
    section = config.get(section_of(str(config.strategy))) or {}
    check_weight("lm_weight", options.lm_weight, any(section.get(key) for key in LM_KEYS))
    tree = section.get("boosting_tree") or {}
    has_phrases = has_own_phrases or any(tree.get(key) for key in PHRASE_KEYS)
    check_weight("boosting_weight", options.boosting_weight, has_phrases)
    check_weight("ignore_case", options.ignore_case or None, has_phrases)
    check_weight("phrase_share", options.phrase_share, has_phrases)


def with_decoding(config: DictConfig, options: Any) -> DictConfig:
    """Return the `decoding` section, overridden by the option `decoding` (decoding.KEY=VALUE).

    Raises:
        ValueError: the option has a single value where the section has keys, or head or n_best do not fit.
    """
    given = options.decoding
    check_sections(given, "decoding.")
    try:
        config = cast(DictConfig, OmegaConf.merge(config, given))
        OmegaConf.resolve(config.copy())  # whether all ${keys} exist
    except OmegaConfBaseException as error:
        raise ValueError(f"decoding={given} does not fit the decoding section: {error}") from error
    check_readers(config, given)
    spec, head, n_best = find_strategy(config), getattr(options, "head", None), getattr(options, "n_best", 1)
    if spec and head not in (None, spec.family):
        raise ValueError(wrong_family(spec, head, f"head={head}"))
    size = (config.get("beam") or {}).get("beam_size") if spec and spec.section == "beam" else None
    if isinstance(size, int) and n_best > size:
        raise FieldError("n_best", n_best, f"an integer 1 .. {size}; beam_size={n_best} keeps as many")
    return config


def check_readers(config: DictConfig, given: Mapping[str, Any]) -> None:
    """Raise a ValueError if the strategy of a config does not read a `given` section; warn of one in a preset."""
    readers = {name: section for family in NATIVE.values() for section, names in family.items() for name in names}
    spec = find_strategy(config)
    for name in sorted({"beam", "wfst", "greedy"} - {spec.section if spec else readers.get(str(config.strategy))}):
        if name in given:
            raise ValueError(f"decoding.{name} has no effect with strategy {config.strategy}, expected none")
        if spec is None and config.get(name):
            logger.warning("%s in the preset has no effect with strategy %s", name, config.strategy)


def section_of(strategy: str) -> str:
    """Return the section of NeMo's `decoding` that holds the options of a strategy: "beam" or "wfst"."""
    if strategy in STRATEGIES:
        return STRATEGIES[strategy].section
    return "wfst" if strategy in NATIVE["ctc"]["wfst"] else "beam"


def keys_of(config: DictConfig) -> dict[str, str]:
    """Return the options that affect the strategy of a config, each with its key in NeMo's section."""
    spec, strategy = find_strategy(config), str(config.strategy)
    keys = WORD_GRAPH_KEYS if section_of(strategy) == "wfst" else BEAM_KEYS
    if spec is None and keys is BEAM_KEYS:
        return {name: keys.get(name, name) for name in NATIVE_OPTIONS.get(strategy, _BATCHED)}
    keys = keys | {key: key for key in SEARCH_KEYS.get(strategy, ())}
    return keys | LARGE_LM_KEYS if spec is not None and spec.name == LARGE_LM_STRATEGY else keys


def decoding_config(
    strategy: str | None, preset: str | None, options: Mapping[str, Any], head: str = "ctc"
) -> DictConfig:
    """Return NeMo's `decoding` section, made from a preset and from the options that are not None.

    If `preset` is None, the strategy's shipped preset is used, adapted to an LM and phrases if they are given. If
    `strategy` is None, the preset's strategy is used or, if `preset` is None too, the default of the model's head.

    Raises:
        ValueError: the preset cannot be read, a file that an option names does not exist, or an option
            has no effect with the strategy.
    """
    if preset is None:
        config = _shipped_config(strategy or DEFAULT_STRATEGY[head], options)
    else:
        config = load_preset(preset)
    if strategy is not None:
        config.strategy = strategy
    possible = dict.fromkeys([*possible_strategies("ctc"), *possible_strategies("rnnt")])
    check_choice("strategy", str(config.strategy), possible)
    section = section_of(str(config.strategy))
    keys = keys_of(config)
    if not keys and options.get("n_best", 1) > 1:
        raise ValueError(f"n_best={options['n_best']} has no effect with strategy {config.strategy}, expected 1")
    of_searches = chain.from_iterable(SEARCH_KEYS.values())
    for name in dict.fromkeys([*of_searches, *BEAM_KEYS, *WORD_GRAPH_KEYS, *LARGE_LM_KEYS]):
        value: Any = options.get(name)
        if value is None or value == {}:
            continue
        if name not in keys:
            raise ValueError(
                f"{name}={value} has no effect with strategy {config.strategy}, whose options are "
                f"{', '.join(keys) or 'none of these'}, and decoding.{section}.KEY=VALUE"
            )
        if name in FILES:
            value = existing_file(name, str(value))
        if name == "lms":
            value = {lm: existing_file(f"lms.{lm}", str(file)) for lm, file in value.items()}
        if name in (*FILES, "lms") and "${" in str(value):
            raise ValueError(f"{name}={value} has ${{ in its path, which a config of NeMo cannot hold; rename it")
        if (section, name) == ("wfst", "lm"):
            _set_word_lm(config, value)
        else:
            OmegaConf.update(config, f"{section}.{keys[name]}", value, force_add=True)
    if find_strategy(config) is None and options.get("phrases") and config.beam.get("boosting_tree_alpha") is None:
        config.beam.boosting_tree_alpha = 0.5  # NeMo's is 0, and null is an error
    if options.get("source_lm") is not None and config.beam.get("source_lm_alpha") is None:
        raise ValueError("source_lm_weight is not set, expected the weight of source_lm, a number >= 0; tune finds it")
    return config


def config_with_n_best(options: Any, head: str, n_best: int, **changed: Any) -> DictConfig:
    """Return NeMo's `decoding` section for n-best lists from a command's options; `changed` replaces options.

    Args:
        head: the model's head, which decides the strategy if neither options nor preset do.
        n_best: hypotheses per utterance.
    """
    config = decoding_config(options.strategy, options.preset, vars(options) | changed, head)
    section = section_of(str(config.strategy))
    for key, value in {"return_best_hypothesis": False, "n_best": n_best}.items() if n_best > 1 else ():
        OmegaConf.update(config, f"{section}.{key}", value, force_add=True)
    return config


def load_model(options: Any, build: Callable[..., DictConfig], head: str | None = None, channel: Any = None) -> Model:
    """Load the model of a command and set the `decoding` section that `build(options, default head)` returns.

    Args:
        head: the model's head that decodes; None: the head of the strategy, or for NeMo's strategies the default head.
        channel: see `Model`.
    """
    from nemo_gpu_decoding.nemo_plugin.model import Model

    model = Model.load(options.model, device=options.device, verbose=options.verbose, channel=channel)
    config = build(options, model.default_head)
    model.head_for(str(config.strategy), head).use(config)
    return model


def _shipped_config(strategy: str, options: Mapping[str, Any]) -> DictConfig:
    """Return a strategy's preset in `conf/`, or its variant for an LM or phrases if given; {} without a preset.

    With phrases and no LM, strategies over tokens have the beam size of the variant for an LM.
    """
    has_lm, has_phrases = options.get("lm") or options.get("lms"), options.get("phrases")
    if strategy not in preset_names():
        return OmegaConf.create({})
    if section_of(strategy) == "wfst":  # the graph has an LM
        return load_preset(f"{strategy}_phrases" if has_phrases else strategy)
    config, with_lm = load_preset(strategy), load_preset(f"{strategy}_lm")
    if has_phrases:
        config.beam.beam_size = with_lm.beam.beam_size
    return with_lm if has_lm else config


def _set_word_lm(config: DictConfig, file: str) -> None:
    """Set the path of an ARPA word LM or of a ready-made word graph, and remove the key of the other kind."""
    from nemo_gpu_decoding.graph.store import is_word_graph

    keys = ("wfst_lm_path", "arpa_lm_path")
    named, other = keys if is_word_graph(file) else keys[::-1]
    OmegaConf.update(config, f"wfst.{named}", file, force_add=True)
    config.wfst.pop(other, None)
    if named == "arpa_lm_path":
        config.wfst.pop("small_lm_path", None)  # this key is for ready-made graphs


def existing_file(option: str, value: str) -> str:
    """Return the absolute path of the file that an option names; raise a ValueError if it does not exist."""
    path = path_of(value)
    if not path.is_file():
        raise ValueError(f"{option}={value} is no file here")
    return str(path.resolve())


OUTPUTS = ("out", "oov", "plot")  # options that name a file to write

Named = Iterable[tuple[str, Any]]  # options or other origins of files, and the files


def check_outputs(options: Any, inputs: Named = (), outputs: Named = ()) -> None:
    """Raise a ValueError if an output file is also an input or another output, under any name or link.

    Args:
        options: options of the command, which name inputs and outputs.
        inputs: further input files, such as recordings; values may be nested.
        outputs: further output files.
    """
    given = [(name, text) for name, value in [*vars(options).items(), *inputs] for text in _texts(value)]
    taken = {_identity(text): f"{name}={text}" for name, text in given if name not in OUTPUTS and os.path.isfile(text)}
    for name, text in [*(pair for pair in given if pair[0] in OUTPUTS), *outputs]:
        if os.path.exists(text) and not os.path.isfile(text):
            continue  # a folder or a device
        if other := taken.get(_identity(text)):
            raise ValueError(f"{name}={text} would overwrite {other}, expected another file")
        taken[_identity(text)] = f"{name}={text}"


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in nested lists and mappings of option values, as paths that may name files."""
    if isinstance(value, str | os.PathLike):
        yield str(path_of(value))
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


def _identity(file: str) -> Any:
    """Return a key that is equal for all paths and links to the same file."""
    if os.path.isfile(file):
        return os.stat(file).st_dev, os.stat(file).st_ino
    return os.path.realpath(file)


def load_phrase_file(path: str | None) -> list[str]:
    """Return the phrases with weight >= 0 in the phrase file `path`, or [] if it is None."""
    if path is None:
        return []
    from nemo_gpu_decoding.fusion.phrases import read_phrases, weight_of  # as the decoder reads them

    return [phrase.text for phrase in read_phrases(existing_file("phrases", path)) if weight_of(phrase) >= 0]


def writable_file(option: str, value: str) -> Path:
    """Return the path of the output file that an option names.

    Raises:
        ValueError: the file's folder does not exist, or the path is a folder.
    """
    path = path_of(value)
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{option}={value}: there is no folder {path.parent}")
    if path.is_dir():
        raise ValueError(f"{option}={value} is a folder, expected a file to write")
    return path
