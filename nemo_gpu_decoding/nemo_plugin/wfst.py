"""The object that NeMo calls to decode CTC log-probs with cuda_wfst; that of paged_biglm: `paged.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from omegaconf import DictConfig

from nemo_gpu_decoding.cache import cached
from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton
from nemo_gpu_decoding.fusion.boosting import BoostingConfig, Phrase
from nemo_gpu_decoding.fusion.fusion import Fusion
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.graph.load import load_word_graph
from nemo_gpu_decoding.graph.word_boosting import (
    as_phrases,
    configured_phrases,
    word_boosting,
    words_of,
)
from nemo_gpu_decoding.nemo_plugin.ctc_infer import CTCInfer
from nemo_gpu_decoding.nemo_plugin.hypotheses import WordHypothesis, from_word_path
from nemo_gpu_decoding.nemo_plugin.wfst_config import WfstOptions, read_wfst_options
from nemo_gpu_decoding.search.cuda_wfst.config import WFSTConfig
from nemo_gpu_decoding.search.cuda_wfst.decoder import CudaWFST
from nemo_gpu_decoding.search.cuda_wfst.mbr import minimum_bayes_risk
from nemo_gpu_decoding.search.cuda_wfst.result import Word, WordPath
from nemo_gpu_decoding.search.result import NBest, Path

Infer = TypeVar("Infer", bound="WfstInfer")


def build_cuda_wfst(owner: Any, cfg: DictConfig) -> WfstInfer:
    """The decoder for one of NeMo's CTC decoding objects (factory of the strategy table)."""
    return configured(WfstInfer, owner, read_wfst_options(cfg))


def configured(kind: type[Infer], owner: Any, options: WfstOptions) -> Infer:
    """A decoder with what NeMo's decoding object says besides the options."""
    infer = kind(owner.blank_id, options, dict(owner.confidence_method_cfg))
    infer.preserve_alignments = owner.preserve_alignments
    infer.compute_timestamps = owner.compute_timestamps
    infer.preserve_frame_confidence = owner.preserve_frame_confidence
    return infer


class WfstInfer(CTCInfer):
    """cuda_wfst as NeMo calls it.

    Args:
        blank_id: the blank's column, which in NeMo is also the number of tokens.
        options: from `read_wfst_options`.
        confidence_method: NeMo's `confidence_cfg.method_cfg`.
    """

    strategy = "cuda_wfst"
    section = "wfst"
    options: WfstOptions

    def __init__(self, blank_id: int, options: WfstOptions, confidence_method: dict[str, Any]) -> None:
        super().__init__(blank_id, options.n_best, options.return_best, confidence_method)
        self.options = options
        self._decoder: CudaWFST | None = None

    def decoder(self) -> CudaWFST:
        """The search itself, with graph and phrases loaded."""
        if self._decoder is None:
            self._decoder = self._load()
        return self._decoder

    def phrase_tree(self, phrases: Sequence[str | Phrase]) -> BackoffAutomaton:
        """The boosting automaton of other phrases, all of whose words the graph must have."""
        graph = self.decoder().graph
        return _boosting(as_phrases(phrases), self.options.boosting, graph, "error", "requests")

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles carry the options; graph and phrases come from the cache again."""
        return self.__dict__ | {"_decoder": None}

    def _load(self) -> CudaWFST:
        options, vocabulary = self.options, self.vocabulary()
        phrases = configured_phrases(options.boosting) if self.has_phrases else []
        graph, topology = load_word_graph(
            options.graph, vocabulary, self.blank_id, words_of(phrases), options.boosting.ignore_case
        )
        boosting = None
        if phrases:
            name = str(options.boosting.key_phrases_file or "wfst.boosting_tree")
            boosting = _boosting(phrases, options.boosting, graph, "skip", name)
        search = replace(options.search, topology=topology)
        fusion = Fusion(None, options.lm_weight, boosting, options.boosting_weight)
        return self._search(graph, search, fusion=fusion, pieces=vocabulary.pieces)

    def _search(self, graph: WordGraph, config: WFSTConfig, **others: Any) -> CudaWFST:
        """The search in a graph; `others` are arguments that all searches in word graphs have."""
        return CudaWFST(graph, self.blank_id, self.blank_id, config, **others)

    def _chosen(self, nbest: NBest) -> Sequence[Path]:
        if self.options.decoding_mode == "mbr":
            return [minimum_bayes_risk(_word_paths(nbest))]
        return nbest.paths[: self.options.n_best]

    def _hypothesis(self, path: Path, nbest: NBest) -> WordHypothesis:
        assert isinstance(path, WordPath)
        words = [self._without_space(word, path) for word in path.words]
        return from_word_path(path, words, nbest.num_frames, nbest.lattice)

    def _alignment(self, path: Path, num_frames: int) -> np.ndarray:
        labels = np.full(num_frames, self.blank_id, np.int64)
        for token, start, repeats in zip(path.tokens, path.frames, path.repeats, strict=True):
            labels[start : start + repeats] = token
        return labels

    def _without_space(self, word: Word, path: Path) -> Word:
        """In a character model the space before a word is a token; the word begins after it."""
        pieces, first = self.decoder().pieces, word.first_token
        if not pieces or first >= word.end_token or pieces[path.tokens[first]] != " ":
            return word
        return word._replace(first_token=first + 1, start_frame=int(path.frames[first + 1]))


def _word_paths(nbest: NBest) -> list[WordPath]:
    return [path for path in nbest if isinstance(path, WordPath)]


def _boosting(
    phrases: Sequence[Phrase], config: BoostingConfig, graph: WordGraph, missing: str, name: str
) -> BackoffAutomaton:
    """Cached, since NeMo makes its decoding objects anew for every `transcribe(timestamps=True)`."""
    key = ("word boosting", tuple(phrases), config, graph.fingerprint, missing)
    return cached(key, partial(word_boosting, phrases, config, graph, missing=missing, name=name))
