"""Beam-search decoding for NeMo's CTC, RNN-T and TDT checkpoints, and for the log-probs of any CTC model.

With NeMo installed, the strategies register themselves: set `decoding.strategy=flexctc_beam`. Without NeMo,
use the decoder classes, which take plain tensors. Importing this package imports neither NeMo nor CUDA;
each public name is imported on first use. docs/api.md lists the public names.
"""

from __future__ import annotations

import ast
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_gpu_decoding.fusion.allowed import AllowedTokens, allowed_tokens
    from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton
    from nemo_gpu_decoding.fusion.boosting import BoostingConfig, Phrase, build_boosting_tree
    from nemo_gpu_decoding.fusion.fusion import Fusion, Request
    from nemo_gpu_decoding.fusion.grammar import Grammar, build_grammar
    from nemo_gpu_decoding.fusion.ngram import load_ngram_lm
    from nemo_gpu_decoding.graph.build import build_graph, load_fst_graph
    from nemo_gpu_decoding.graph.store import load_graph
    from nemo_gpu_decoding.graph.word_boosting import build_word_boosting
    from nemo_gpu_decoding.live.endpointing import EndpointConfig, find_endpoint, progress_of
    from nemo_gpu_decoding.lm.arpa import read_arpa
    from nemo_gpu_decoding.lm.estimate import estimate_ngram_lm, write_arpa
    from nemo_gpu_decoding.lm.pack import pack_arpa, pack_arpa_in_memory
    from nemo_gpu_decoding.lm.packed import load_packed_lm
    from nemo_gpu_decoding.lm.prune import prune_ngram_lm
    from nemo_gpu_decoding.nemo_plugin.cutting import Cutting
    from nemo_gpu_decoding.nemo_plugin.register import register, unregister
    from nemo_gpu_decoding.nemo_plugin.requests import utterance_requests
    from nemo_gpu_decoding.nemo_plugin.transcribing import transcribe_long
    from nemo_gpu_decoding.presets import load_preset, preset_names
    from nemo_gpu_decoding.search.flexctc_beam.config import FlexCTCConfig
    from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam
    from nemo_gpu_decoding.search.rescoring import rescored
    from nemo_gpu_decoding.search.result import NBest, Path, ScoreParts
    from nemo_gpu_decoding.search.transducer.aes import AESPlusPlus
    from nemo_gpu_decoding.search.transducer.alsd import ALSDPlusPlus
    from nemo_gpu_decoding.search.transducer.config import AESConfig, ALSDConfig
    from nemo_gpu_decoding.search.transducer.networks import LSTMNetworks, StatelessNetworks
    from nemo_gpu_decoding.search.word_graph.config import PagedBigLMConfig, WFSTConfig
    from nemo_gpu_decoding.search.word_graph.decoder import CudaWFST, PagedBigLM
    from nemo_gpu_decoding.vocabulary import Vocabulary

__version__ = "0.1.0"

# the imports above are for type checkers; they name the module of each name, too
_SOURCE = __spec__.loader.get_source(__name__)  # type: ignore[union-attr]
_IMPORTS = next(node for node in ast.parse(_SOURCE).body if isinstance(node, ast.If))
_HOMES = {name.name: node.module for node in _IMPORTS.body if isinstance(node, ast.ImportFrom) for name in node.names}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(str(_HOMES[name])), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
