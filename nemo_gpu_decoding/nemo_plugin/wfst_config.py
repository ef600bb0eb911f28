"""From NeMo's CTC decoding config to the options of searches in word graphs.

The keys are those of NeMo's `wfst` section; keys of ours stand beside them:

    strategy: cuda_wfst
    wfst:
      arpa_lm_path: words.arpa       # or wfst_lm_path: a ready-made graph
      beam_width: 16.0               # of the search, natural log
      lm_weight: 1.0
      decoding_mode: nbest           # or mbr, lattice
      max_active: 10000              # ours, as all that follows
      boosting_tree: {key_phrases_list: [acme, gdansk]}
      boosting_tree_alpha: 5.0

`paged_config.py` adds what paged_biglm has besides.

`beam_size` is the length of n-best lists, as with NeMo's Riva decoder. Riva's and k2's own options
(`riva_decoding_cfg`, `k2_decoding_cfg`) mean nothing here: what is set there is an error that names the
key to use.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from nemo.collections.asr.parts.submodules.ctc_decoding import CTCDecodingConfig
from nemo.utils import logging
from omegaconf import DictConfig, OmegaConf

from nemo_gpu_decoding.checks import check_number
from nemo_gpu_decoding.fusion.boosting import BoostingConfig
from nemo_gpu_decoding.graph.lexicon import OpenVocabulary
from nemo_gpu_decoding.graph.load import GraphOptions
from nemo_gpu_decoding.graph.topology import NEMO_NAMES, TOPOLOGIES
from nemo_gpu_decoding.nemo_plugin.beam_options import (
    Config,
    boosting_keys,
    check_top_level,
    existing_file,
    given_options,
    read_boosting,
    read_n_best,
    wants_alignments,
)
from nemo_gpu_decoding.nemo_plugin.strict import (
    check_keys,
    read_bool,
    read_choice,
    read_count,
    read_number,
)
from nemo_gpu_decoding.search.config import BACKENDS
from nemo_gpu_decoding.search.cuda_wfst.config import WFSTConfig

DECODING_MODES = ("nbest", "mbr", "lattice")

# What we add to NeMo's `wfst`, with the values that it has if it is not set
OWN_KEYS: dict[str, Any] = {
    # the search
    "topology": None,  # compact, normal or minimal; None: compact, or the one inside a ready-made graph
    "max_active": WFSTConfig.max_active,  # hypotheses per frame
    "acoustic_scale": WFSTConfig.acoustic_scale,
    "lattice_beam": None,  # natural log; None: beam_width, as NeMo's Riva decoder has it
    "posterior_paths": 20,  # best texts over which confidence and minimum Bayes risk are taken
    "n_best": None,  # None: beam_size
    "backend": WFSTConfig.backend,
    "threads": WFSTConfig.threads,
    # how the graph is built from `arpa_lm_path`
    "segmentations": 1,  # spellings of each word
    "added_words": None,  # words that the LM lacks: a list, or a text file of words or phrases
    "source_lang": None,  # for aggregate tokenizers: the language of the LM
    "unknown_word_cost": OpenVocabulary.word_cost,  # with open_vocabulary_decoding; natural log
    "unknown_piece_cost": OpenVocabulary.piece_cost,
    # how a ready-made graph is read
    "words_path": None,  # words.txt of an OpenFst file without symbols
    # phrases, as in the `beam` section
    "boosting_tree": None,
    "boosting_tree_alpha": 1.0,
}
BUILD_KEYS = ("segmentations", "added_words", "source_lang", "unknown_word_cost", "unknown_piece_cost")

# Options of other decoders that NeMo's section holds, and ours that do the same
COUNTERPARTS = {
    "riva_decoding_cfg.online_opts.decoder_opts.default_beam": "beam_width",
    "riva_decoding_cfg.online_opts.decoder_opts.max_active": "max_active",
    "riva_decoding_cfg.online_opts.decoder_opts.lattice_beam": "lattice_beam",
    "riva_decoding_cfg.online_opts.lattice_postprocessor_opts.acoustic_scale": "acoustic_scale",
    "riva_decoding_cfg.online_opts.lattice_postprocessor_opts.lm_scale": "lm_weight",
    "riva_decoding_cfg.online_opts.lattice_postprocessor_opts.nbest": "beam_size",
    "k2_decoding_cfg.search_beam": "beam_width",
    "k2_decoding_cfg.output_beam": "lattice_beam",
    "k2_decoding_cfg.max_active_states": "max_active",
}
# NeMo 2.7 has this section; configs that it saved still do
K2_DEFAULTS = {
    "search_beam": 20.0,
    "output_beam": 10.0,
    "min_active_states": 30,
    "max_active_states": 10000,
}

# Options of `boosting_tree` that are about tokens, with what they must be and why
_ABOUT_TOKENS: dict[str, tuple[tuple[Any, ...], str]] = {
    "model_path": ((None,), "it holds tokens, and a word graph is boosted by words"),
    "unk_score": ((0.0,), "words that are in no phrase get nothing"),
    "use_bpe_dropout": ((False,), "see wfst.segmentations for spellings of words"),
    "num_of_transcriptions": ((5,), "see wfst.segmentations for spellings of words"),
    "segmentations": ((1,), "see wfst.segmentations for spellings of words"),
    "source_lang": (("en",), "see wfst.source_lang for the language of the graph's words"),
    "refund": (("full",), "NeMo's refunds are made for tokens"),
    "whole_words": ((None, True), "a word graph knows nothing but whole words"),
}


@dataclass(frozen=True)
class WfstOptions:
    """Everything that a `wfst` section says."""

    search: WFSTConfig  # its topology is settled when the graph is there
    lm_weight: float
    return_best: bool  # False: NeMo gets n-best lists
    n_best: int  # hypotheses returned
    decoding_mode: str
    graph: GraphOptions
    boosting: BoostingConfig
    boosting_weight: float


@functools.lru_cache(maxsize=1)
def _nemo_defaults() -> dict[str, Any]:
    """NeMo's `wfst` section as `change_decoding_strategy` fills it up."""
    defaults: Any = OmegaConf.to_container(OmegaConf.structured(CTCDecodingConfig), resolve=True)
    return {"k2_decoding_cfg": K2_DEFAULTS} | defaults["wfst"]


def wfst_keys() -> dict[str, tuple[str, ...]]:
    """The valid keys of `wfst` and of the section in it: NeMo's, then ours."""
    return {"wfst": (*_nemo_defaults(), *OWN_KEYS), "wfst.boosting_tree": boosting_keys()}


def read_wfst_options(
    cfg: DictConfig, strategy: str = "cuda_wfst", more_keys: Collection[str] = ()
) -> WfstOptions:
    """Read NeMo's decoding config, checking every key that its `wfst` section has.

    Args:
        strategy: the search in a word graph that the config is for.
        more_keys: valid keys of the section that only this strategy has; the caller reads them.

    Raises:
        ValueError: a key of `wfst` is unknown, cannot apply to the strategy or has a wrong value, or no
            LM is named; the message names the key.
        FileNotFoundError: a file that is named does not exist.
    """
    check_top_level(cfg, (*OWN_KEYS, *more_keys), "wfst")
    given = given_options(cfg, "wfst")
    check_keys("wfst", given, (*wfst_keys()["wfst"], *more_keys))
    wfst = _nemo_defaults() | OWN_KEYS | given
    read_choice("wfst.search_type", wfst["search_type"], ("default", "riva", strategy))
    _check_foreign_sections(wfst, strategy)
    return_best = read_bool("wfst.return_best_hypothesis", wfst["return_best_hypothesis"])
    wants_alignments(cfg, wfst, "wfst")
    read_bool("wfst.compute_timestamps", wfst["compute_timestamps"])
    mode = read_choice("wfst.decoding_mode", wfst["decoding_mode"], DECODING_MODES)
    n_best = _n_best(wfst, return_best, mode)
    boosting, boosting_weight = read_boosting(wfst, "wfst")
    _check_for_words(boosting)
    return WfstOptions(
        search=_search_config(wfst, n_best, mode),
        lm_weight=_lm_weight(wfst),
        return_best=return_best,
        n_best=n_best,
        decoding_mode=mode,
        graph=_graph_options(wfst, given),
        boosting=boosting,
        boosting_weight=boosting_weight,
    )


def _search_config(wfst: Config, n_best: int, mode: str) -> WFSTConfig:
    """Alternatives are kept only where somebody asks for them: they cost time and memory."""
    paths = read_count("wfst.posterior_paths", wfst["posterior_paths"])
    lattice_beam = wfst["beam_width" if wfst["lattice_beam"] is None else "lattice_beam"]
    needs_alternatives = n_best > 1 or mode != "nbest"
    with fields_named_as_keys():
        return WFSTConfig(
            beam=read_number("beam", wfst["beam_width"]),
            max_active=wfst["max_active"],
            acoustic_scale=read_number("acoustic_scale", wfst["acoustic_scale"]),
            n_best=max(n_best, paths) if needs_alternatives else 1,
            lattice_beam=read_number("lattice_beam", lattice_beam),
            lattice=mode == "lattice",
            backend=_backend(wfst),
            threads=wfst["threads"],
        )


def _lm_weight(wfst: Config) -> float:
    weight = read_number("wfst.lm_weight", wfst["lm_weight"])
    check_number("wfst.lm_weight", weight)
    return weight


@contextmanager
def fields_named_as_keys() -> Iterator[None]:
    """Errors of the search's config, which begin with the name of a field, name the key instead."""
    try:
        yield
    except ValueError as error:
        field, _, rest = str(error).partition(" ")
        raise ValueError(f"wfst.{'beam_width' if field == 'beam' else field} {rest}") from None


def _backend(wfst: Config) -> str:
    """`device` is NeMo's word for it; its default, "cuda", says nothing: a search runs where it can."""
    backend = read_choice("backend", wfst["backend"], BACKENDS)
    device = wfst["device"]
    if device not in ("cuda", "cpu"):
        raise ValueError(
            f"device is {device!r}, expected 'cuda' (NeMo's default: on the GPU that the log-probs are "
            "on, if they are on one) or 'cpu'"
        )
    if device == "cpu" and backend == "cuda":
        raise ValueError(
            "device is 'cpu', but wfst.backend is 'cuda', expected one of them, or the same"
        )
    return "cpu" if device == "cpu" else backend


def _n_best(wfst: Config, return_best: bool, mode: str) -> int:
    read_count("wfst.beam_size", wfst["beam_size"])
    n_best = read_count("wfst.n_best", read_n_best(wfst, return_best, "wfst"))
    if mode != "mbr":
        return n_best
    if wfst["n_best"] not in (None, 1):
        raise ValueError(f"wfst.n_best is {n_best} with decoding_mode mbr, which has one result")
    return 1


def _graph_options(wfst: Config, given: Config) -> GraphOptions:
    arpa = existing_file("wfst.arpa_lm_path", wfst["arpa_lm_path"])
    ready_made, keep_at = _ready_made(wfst["wfst_lm_path"], arpa)
    if arpa is None and ready_made is None:
        raise ValueError(
            "wfst.arpa_lm_path and wfst.wfst_lm_path are not set, expected one of them: a search in a "
            "word graph needs a word LM (ARPA), or a graph that was built from one"
        )
    if ready_made is not None:
        _check_not_built(wfst, given, arpa)
    if ready_made is None and wfst["words_path"] is not None:
        raise ValueError("wfst.words_path is set, which belongs to an OpenFst file as wfst.wfst_lm_path")
    is_open = read_bool("wfst.open_vocabulary_decoding", wfst["open_vocabulary_decoding"])
    costs = [_cost(wfst, key, is_open) for key in ("unknown_word_cost", "unknown_piece_cost")]
    return GraphOptions(
        ready_made=ready_made,
        arpa=None if ready_made else arpa,
        keep_at=keep_at,
        topology=_topology(wfst["topology"], arpa if ready_made is None else None),
        words=existing_file("wfst.words_path", wfst["words_path"]),
        open_vocabulary=OpenVocabulary(*costs) if is_open else None,
        segmentations=read_count("wfst.segmentations", wfst["segmentations"]),
        added_words=_added_words(wfst["added_words"]),
        source_lang=_text("wfst.source_lang", wfst["source_lang"]),
    )


def _ready_made(value: Any, arpa: Path | None) -> tuple[Path | None, Path | None]:
    """The graph that `wfst_lm_path` names; or, as in NeMo, where to keep one that is to be built."""
    text = _text("wfst.wfst_lm_path", value)
    if text is None:
        return None, None
    path = Path(text).expanduser()
    if path.exists():
        return path, None
    if arpa is None:
        raise FileNotFoundError(f"wfst.wfst_lm_path is '{text}', which does not exist")
    if path.suffix != ".graph":
        raise FileNotFoundError(
            f"wfst.wfst_lm_path is '{text}', which does not exist; the graph of wfst.arpa_lm_path can "
            "be kept there if the name ends in .graph"
        )
    return None, path


def _check_not_built(wfst: Config, given: Config, arpa: Path | None) -> None:
    shaping = [key for key in BUILD_KEYS if key in given and given[key] != OWN_KEYS[key]]
    if arpa is not None:  # as in NeMo: what was built for this config before is used again
        logging.warning(
            f"`wfst.wfst_lm_path` exists and is used as it is; `wfst.arpa_lm_path`"
            f"{''.join(f', `wfst.{key}`' for key in shaping)} would shape a new one."
        )
    elif shaping:
        raise ValueError(
            f"wfst.{shaping[0]} is {wfst[shaping[0]]!r}, which has no effect on a ready-made graph "
            "(wfst.wfst_lm_path); build it anew from wfst.arpa_lm_path"
        )


def _topology(value: Any, arpa: Path | None) -> str | None:
    if value is None:
        return None
    topology = read_choice("wfst.topology", value, (*TOPOLOGIES, *NEMO_NAMES))
    if topology == "graph" and arpa is not None:
        raise ValueError("wfst.topology is 'graph', which is for ready-made T o L o G files only")
    return topology


def _cost(wfst: Config, key: str, is_open: bool) -> float:
    cost = read_number(f"wfst.{key}", wfst[key])
    if not 0 <= cost < float("inf"):
        raise ValueError(f"wfst.{key} is {cost}, expected a finite number >= 0")
    if not is_open and cost != OWN_KEYS[key]:
        raise ValueError(f"wfst.{key} is {cost}, which needs wfst.open_vocabulary_decoding: true")
    return cost


def _added_words(value: Any) -> tuple[str, ...] | Path:
    if isinstance(value, str):
        path = existing_file("wfst.added_words", value)
        assert path is not None
        return path
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise ValueError(f"wfst.added_words is {value!r}, expected a list of words or a text file")
    return tuple(value)


def _text(key: str, value: Any) -> str | None:
    if value is not None and not (isinstance(value, str) and value):
        raise ValueError(f"{key} is {value!r}, expected a text")
    return value


def _check_for_words(boosting: BoostingConfig) -> None:
    for key, (neutral, reason) in _ABOUT_TOKENS.items():
        value = getattr(boosting, key)
        if value not in neutral:
            raise ValueError(
                f"wfst.boosting_tree.{key} is {value!r}, which has no effect on a word graph: {reason}"
            )


def _check_foreign_sections(wfst: Config, strategy: str) -> None:
    """Options of other decoders: at NeMo's defaults they say nothing, else the user means something."""
    for name, decoder in (("riva_decoding_cfg", "Riva's decoder"), ("k2_decoding_cfg", "k2's decoder")):
        defaults = _flat(_nemo_defaults()[name] or {}, f"{name}.")
        for key, value in _flat(wfst[name] or {}, f"{name}.").items():
            if key in defaults and defaults[key] == value:
                continue
            ours = COUNTERPARTS.get(key)
            remedy = f"set wfst.{ours} instead" if ours else "remove it"
            raise ValueError(
                f"'wfst.{key}' is {value!r}, which is an option of {decoder} and has no effect with "
                f"'{strategy}'; {remedy}"
            )


def _flat(section: Config, prefix: str = "") -> dict[str, Any]:
    """Nested sections as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


assert set(_ABOUT_TOKENS) <= {field.name for field in fields(BoostingConfig)}
