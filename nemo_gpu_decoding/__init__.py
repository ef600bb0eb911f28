"""Beam-search decoding for NeMo's CTC, RNN-T and TDT checkpoints, and for log-probs of other models.

With NeMo installed, the strategies register themselves: set `decoding.strategy=flexctc_beam`. Without NeMo,
use the decoder classes, which take plain tensors. Importing this package imports neither NeMo nor CUDA;
each name is loaded on first use. docs/api.md lists the names.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton
    from nemo_gpu_decoding.fusion.boosting import BoostingConfig, Phrase, build_boosting_tree
    from nemo_gpu_decoding.fusion.fusion import Fusion, Request
    from nemo_gpu_decoding.fusion.ngram import load_ngram_lm
    from nemo_gpu_decoding.graph.build import build_graph, load_fst_graph
    from nemo_gpu_decoding.graph.store import load_graph
    from nemo_gpu_decoding.graph.word_boosting import build_word_boosting
    from nemo_gpu_decoding.live.endpointing import EndpointConfig, find_endpoint, progress_of
    from nemo_gpu_decoding.lm.arpa import read_arpa
    from nemo_gpu_decoding.lm.estimate import estimate_ngram_lm, write_arpa
    from nemo_gpu_decoding.lm.pack import pack_arpa, pack_arpa_in_memory
    from nemo_gpu_decoding.lm.packed_file import load_packed_lm
    from nemo_gpu_decoding.lm.prune import prune_ngram_lm
    from nemo_gpu_decoding.nemo_plugin.register import register, unregister
    from nemo_gpu_decoding.nemo_plugin.requests import utterance_requests
    from nemo_gpu_decoding.presets import load_preset, preset_names
    from nemo_gpu_decoding.search.flexctc_beam.config import FlexCTCConfig
    from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam
    from nemo_gpu_decoding.search.rescoring import CausalLM, rescored
    from nemo_gpu_decoding.search.result import NBest, Path, ScoreParts
    from nemo_gpu_decoding.search.transducer.aes import AESPlusPlus
    from nemo_gpu_decoding.search.transducer.alsd import ALSDPlusPlus
    from nemo_gpu_decoding.search.transducer.config import AESConfig, ALSDConfig
    from nemo_gpu_decoding.search.transducer.networks import LSTMNetworks, StatelessNetworks
    from nemo_gpu_decoding.search.word_graph.config import PagedBigLMConfig, WFSTConfig
    from nemo_gpu_decoding.search.word_graph.decoder import CudaWFST, PagedBigLM
    from nemo_gpu_decoding.vocabulary import Vocabulary

__version__ = "0.1.0"

_HOMES = {
    "BackoffAutomaton": "fusion.automaton",
    "BoostingConfig": "fusion.boosting",
    "Phrase": "fusion.boosting",
    "build_boosting_tree": "fusion.boosting",
    "Fusion": "fusion.fusion",
    "Request": "fusion.fusion",
    "load_ngram_lm": "fusion.ngram",
    "build_graph": "graph.build",
    "load_fst_graph": "graph.build",
    "load_graph": "graph.store",
    "read_arpa": "lm.arpa",
    "estimate_ngram_lm": "lm.estimate",
    "write_arpa": "lm.estimate",
    "prune_ngram_lm": "lm.prune",
    "pack_arpa": "lm.pack",
    "pack_arpa_in_memory": "lm.pack",
    "load_packed_lm": "lm.packed_file",
    "register": "nemo_plugin.register",
    "unregister": "nemo_plugin.register",
    "utterance_requests": "nemo_plugin.requests",
    "load_preset": "presets",
    "preset_names": "presets",
    "AESConfig": "search.transducer.config",
    "AESPlusPlus": "search.transducer.aes",
    "ALSDConfig": "search.transducer.config",
    "ALSDPlusPlus": "search.transducer.alsd",
    "build_word_boosting": "graph.word_boosting",
    "WFSTConfig": "search.word_graph.config",
    "CudaWFST": "search.word_graph.decoder",
    "EndpointConfig": "live.endpointing",
    "find_endpoint": "live.endpointing",
    "progress_of": "live.endpointing",
    "FlexCTCConfig": "search.flexctc_beam.config",
    "FlexCTCBeam": "search.flexctc_beam.decoder",
    "PagedBigLMConfig": "search.word_graph.config",
    "PagedBigLM": "search.word_graph.decoder",
    "CausalLM": "search.rescoring",
    "rescored": "search.rescoring",
    "NBest": "search.result",
    "Path": "search.result",
    "ScoreParts": "search.result",
    "LSTMNetworks": "search.transducer.networks",
    "StatelessNetworks": "search.transducer.networks",
    "Vocabulary": "vocabulary",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
