"""Read the options of cuda_wfst and paged_biglm in NeMo's `wfst` section.

`arpa_lm_path` is the LM of the graph, or `wfst_lm_path` is a ready-made graph. With paged_biglm, the graph has the
small LM, and `large_lm_path` is the large LM. `beam_size` is the length of n-best lists, as with NeMo's Riva decoder.
Options of Riva and k2 (`riva_decoding_cfg`, `k2_decoding_cfg`) have no effect here: a value in them raises an error
that names the key to use.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo.utils import logging
from omegaconf import DictConfig

from nemo_gpu_decoding.fusion.boosting import BoostingConfig
from nemo_gpu_decoding.graph.csr import NEMO_NAMES, TOPOLOGIES
from nemo_gpu_decoding.graph.lexicon import OpenVocabulary
from nemo_gpu_decoding.graph.load import GraphOptions
from nemo_gpu_decoding.nemo_plugin.section import FusionOptions, NoEffect, Options, Section, Values, check_no_effect
from nemo_gpu_decoding.plain_text import path_of
from nemo_gpu_decoding.schema import defaults_of
from nemo_gpu_decoding.search.config import BACKENDS
from nemo_gpu_decoding.search.word_graph.config import PagedBigLMConfig, WFSTConfig

DECODING_MODES = ("nbest", "mbr", "lattice")

GRAPH = defaults_of(GraphOptions, OpenVocabulary)
# Options of a graph that is built from `arpa_lm_path`, with their defaults
BUILD_KEYS = {key: value for key, value in GRAPH.items() if key not in ("topology", "words_path")}
MORE: dict[str, Any] = GRAPH | {
    "lattice_beam": None,  # natural log; None: beam_width, as in NeMo's Riva decoder
    "posterior_paths": 20,  # number of best texts for confidence and minimum Bayes risk
    "n_best": None,  # None: beam_size
    # phrases, as in the `beam` section
    "boosting_tree": None,
    "boosting_tree_alpha": None,
    "confidence_map": None,  # of word confidence, as tune writes it
}
LARGE_LM: dict[str, Any] = {
    "large_lm_path": None,  # packed, or an ARPA file, which is packed in memory at each load
    "small_lm_path": None,  # likewise; None: arpa_lm_path. For a ready-made graph: the LM that it was built from
}
RIVA = "riva_decoding_cfg.online_opts"
COUNTERPARTS = {  # options of other decoders in NeMo's section -> the keys here with the same effect
    f"{RIVA}.decoder_opts.default_beam": "beam_width",
    f"{RIVA}.decoder_opts.max_active": "max_active",
    f"{RIVA}.decoder_opts.lattice_beam": "lattice_beam",
    f"{RIVA}.lattice_postprocessor_opts.acoustic_scale": "acoustic_scale",
    f"{RIVA}.lattice_postprocessor_opts.lm_scale": "lm_weight",
    f"{RIVA}.lattice_postprocessor_opts.nbest": "beam_size",
    "k2_decoding_cfg.search_beam": "beam_width",
    "k2_decoding_cfg.output_beam": "lattice_beam",
    "k2_decoding_cfg.max_active_states": "max_active",
    "k2_decoding_cfg.min_active_states": "min_active",
}


def _section(strategy: str, search: type[WFSTConfig], more: dict[str, Any]) -> Section:
    return Section(
        strategy, "ctc", "wfst", search, more,
        search_types=("default", "riva"),
        foreign={"riva_decoding_cfg": "Riva's decoder", "k2_decoding_cfg": "k2's decoder"},
        counterparts=COUNTERPARTS,
    )  # fmt: skip


CUDA_WFST = _section("cuda_wfst", WFSTConfig, MORE)
PAGED_BIGLM = _section("paged_biglm", PagedBigLMConfig, MORE | LARGE_LM)

_SPELLINGS = "see wfst.segmentations for spellings of words"
ABOUT_TOKENS = {  # keys of `boosting_tree` that are about tokens
    key: NoEffect(neutral, f"has no effect on a word graph: {reason}")
    for key, neutral, reason in (
        ("model_path", (None,), "it holds tokens, and a word graph is boosted by words"),
        ("unk_score", (0.0,), "words that are in no phrase get nothing"),
        ("use_bpe_dropout", (False,), _SPELLINGS),
        ("num_of_transcriptions", (5,), _SPELLINGS),
        ("segmentations", (1,), _SPELLINGS),
        ("bpe_mode", ("default", "case_insensitive"), _SPELLINGS),
        ("source_lang", ("en",), "see wfst.source_lang for the language of the graph's words"),
        ("refund", ("full",), "NeMo's refunds are made for tokens"),
        ("overlapping", (None, True), "it pays for every phrase that occurs, overlapping or not"),
        ("whole_words", (None, True), "phrases of a word graph consist of whole words"),
        ("phrase_share", (BoostingConfig.phrase_share,), "its bonuses do not come from the LM"),
    )
}


@dataclass(frozen=True)
class WordGraphOptions(Options[WFSTConfig]):
    """The checked values of a `wfst` section; `search.topology` is set when the graph is loaded."""

    decoding_mode: str
    graph: GraphOptions


@dataclass(frozen=True)
class PagedOptions(WordGraphOptions):
    """The checked values of a `wfst` section for paged_biglm."""

    large: Path  # the large LM, packed or ARPA
    small: Path  # the LM of the graph, packed or ARPA


def read_cuda_wfst(cfg: DictConfig) -> WordGraphOptions:
    """Return the checked options of cuda_wfst.

    Raises:
        ValueError: a key of `wfst` is unknown, has no effect on the strategy or has an invalid value, or no
            LM is set; the message has the key.
        FileNotFoundError: a file does not exist.
    """
    return WordGraphOptions(**_read(_values(CUDA_WFST, cfg), WFSTConfig))


def read_paged_biglm(cfg: DictConfig) -> PagedOptions:
    """Return the checked options of paged_biglm; raise the errors of `read_cuda_wfst`."""
    wfst = _values(PAGED_BIGLM, cfg)
    options = _read(wfst, PagedBigLMConfig)
    large = wfst.file("large_lm_path")
    if large is None:
        raise ValueError(
            "wfst.large_lm_path is not set, expected the large LM of paged_biglm: a file of "
            "`nemo-gpu-decoding pack-lm`, or an ARPA file"
        )
    return PagedOptions(**options, large=large, small=_small_lm(wfst))


def _values(section: Section, cfg: DictConfig) -> Values:
    _check_lm_is_named(cfg, section.strategy)
    values = section.read(cfg)
    if (cfg.get("beam") or {}).get("return_best_hypothesis") is False:
        # `extract_nbest` of transcribe_speech.py sets it there for every strategy
        return replace(values, entries={**values.entries, "return_best_hypothesis": False})
    return values


def _check_lm_is_named(cfg: DictConfig, strategy: str) -> None:
    """Raise an error for NeMo scripts that can set only `beam`, and so no LM of a graph; it names other scripts."""
    wfst = cfg.get("wfst") or {}
    lm = (cfg.get("beam") or {}).get("ngram_lm_model")
    if lm and not wfst.get("arpa_lm_path") and not wfst.get("wfst_lm_path"):
        raise ValueError(
            f"beam.ngram_lm_model is '{lm}', which {strategy} does not read, and wfst.arpa_lm_path and "
            "wfst.wfst_lm_path are not set, expected one of them: a word LM (ARPA), or a graph. A script that has no "
            "`wfst` section, as eval_beamsearch_ngram_ctc.py, cannot set them: transcribe_speech.py and "
            f"speech_to_text_eval.py do (ctc_decoding.strategy={strategy} ctc_decoding.wfst.arpa_lm_path=words.arpa)"
        )


def _read(wfst: Values, search: type[WFSTConfig]) -> dict[str, Any]:
    """Return the values of the fields of `WordGraphOptions` from a `wfst` section."""
    mode = wfst.choice("decoding_mode", DECODING_MODES)
    n_best = _n_best(wfst, mode)
    boosting, weight = wfst.boosting()
    for key, effect in ABOUT_TOKENS.items():
        check_no_effect(f"wfst.boosting_tree.{key}", getattr(boosting, key), effect)
    return {
        "search": _search_config(wfst, search, n_best, mode),
        "n_best": n_best,
        "return_best": wfst.flag("return_best_hypothesis"),
        "fusion": FusionOptions(lm_weight=wfst.weight("lm_weight"), boosting=boosting, boosting_weight=weight),
        "confidence_map": wfst.confidence_map(),
        "decoding_mode": mode,
        "graph": _graph_options(wfst),
    }


def _search_config(wfst: Values, search: type[WFSTConfig], n_best: int, mode: str) -> WFSTConfig:
    """Return the options of the search, with n-best lists and lattices on only if the result needs them."""
    paths = wfst.checked("posterior_paths", "int", low=1)
    settled = {"topology": WFSTConfig.topology, "lattice": mode == "lattice", "backend": _backend(wfst)}
    if wfst["lattice_beam"] is None:
        settled["lattice_beam"] = wfst["beam_width"]
    n_best = max(n_best, paths) if n_best > 1 or mode != "nbest" else 1
    return wfst.config(search, n_best=n_best, **settled)


def _backend(wfst: Values) -> Any:
    """Return the backend of the search: "cpu" if NeMo's key `device` is "cpu", else the key `backend`."""
    backend, device = wfst["backend"], wfst["device"]
    if device not in ("cuda", "cpu"):
        raise wfst.error(
            "device", "'cuda' (NeMo's default: on the GPU that the log-probs are on, if they are on one) or 'cpu'"
        )
    if device == "cpu" and backend == "cuda":
        raise ValueError("wfst.device is 'cpu', but wfst.backend is 'cuda', expected one of them, or the same")
    return "cpu" if device == "cpu" else wfst.choice("backend", BACKENDS)


def _n_best(wfst: Values, mode: str) -> int:
    for key in ("beam_size",) if wfst["n_best"] is None else ("beam_size", "n_best"):
        wfst.checked(key, "int", low=1)
    n_best = wfst.n_best()
    if mode != "mbr":
        return n_best
    if wfst["n_best"] not in (None, 1):
        raise ValueError(f"wfst.n_best is {n_best} with decoding_mode mbr, which has one result")
    return 1


def _graph_options(wfst: Values) -> GraphOptions:
    arpa = wfst.file("arpa_lm_path")
    ready_made, keep_at = _ready_made(wfst, arpa)
    if arpa is None and ready_made is None:
        raise ValueError(
            "wfst.arpa_lm_path and wfst.wfst_lm_path are not set, expected one of them: a search in a "
            "word graph needs a word LM (ARPA), or a graph that was built from one"
        )
    if ready_made is not None:
        _check_not_built(wfst, arpa)
    elif wfst["words_path"] is not None:
        raise ValueError("wfst.words_path is set, which belongs to an OpenFst file as wfst.wfst_lm_path")
    topology = None if wfst["topology"] is None else wfst.choice("topology", (*TOPOLOGIES, *NEMO_NAMES))
    if topology == "graph" and ready_made is None:
        raise ValueError("wfst.topology is 'graph', which is for ready-made T o L o G files only")
    files = {"ready_made": ready_made, "arpa": None if ready_made else arpa, "keep_at": keep_at}
    shape = {"topology": topology, "open_vocabulary": _open_vocabulary(wfst)}
    return wfst.config(GraphOptions, source_lang=wfst.text("source_lang"), **shape, **files)


def _ready_made(wfst: Values, arpa: Path | None) -> tuple[Path | None, Path | None]:
    """Return the existing graph at `wfst_lm_path`, and the path for a new graph if, as NeMo allows, it is missing."""
    text = wfst.text("wfst_lm_path")
    if text is None:
        return None, None
    path = path_of(text)
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


def _check_not_built(wfst: Values, arpa: Path | None) -> None:
    shaping = [key for key, unset in BUILD_KEYS.items() if wfst[key] != unset]
    if arpa is not None:  # as in NeMo, the graph of an earlier run with this config is used
        logging.warning(
            f"`wfst.wfst_lm_path` exists and is used as it is; `wfst.arpa_lm_path`"
            f"{''.join(f', `wfst.{key}`' for key in shaping)} would shape a new one."
        )
    elif shaping:
        raise ValueError(
            f"wfst.{shaping[0]} is {wfst[shaping[0]]!r}, which has no effect on a ready-made graph "
            "(wfst.wfst_lm_path); build it anew from wfst.arpa_lm_path"
        )


def _open_vocabulary(wfst: Values) -> OpenVocabulary | None:
    is_open = wfst.flag("open_vocabulary_decoding")
    options = wfst.config(OpenVocabulary)
    for key, unset in {} if is_open else defaults_of(OpenVocabulary).items():
        if wfst[key] != unset:
            raise ValueError(f"wfst.{key} is {wfst[key]}, which needs wfst.open_vocabulary_decoding: true")
    return options if is_open else None


def _small_lm(wfst: Values) -> Path:
    """Return the path of the small LM; the search subtracts the small LM's scores at each word."""
    if wfst["small_lm_path"] is not None and wfst["arpa_lm_path"] is not None:
        raise ValueError(
            "wfst.small_lm_path and wfst.arpa_lm_path are both set, expected one of them: the LM of the "
            "graph (wfst.small_lm_path where wfst.wfst_lm_path is a ready-made graph)"
        )
    path = wfst.file("small_lm_path") or wfst.file("arpa_lm_path")
    if path is None:
        raise ValueError(
            "wfst.small_lm_path is not set, expected the LM that the graph (wfst.wfst_lm_path) was made "
            "of: an ARPA file, or a packed one"
        )
    return path
