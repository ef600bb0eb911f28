"""Decode CTC log-probs in word graphs for NeMo, with cuda_wfst and paged_biglm."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from nemo_gpu_decoding.cache import cached
from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton
from nemo_gpu_decoding.fusion.boosting import BoostingConfig, can_spell, weight_of_tree
from nemo_gpu_decoding.fusion.default_bonuses import weight_of_list
from nemo_gpu_decoding.fusion.fusion import Fusion
from nemo_gpu_decoding.fusion.phrases import Phrase, spelled_phrases
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.graph.load import in_language, load_word_graph
from nemo_gpu_decoding.graph.unknown_words import Speller, with_piece_labels
from nemo_gpu_decoding.graph.word_boosting import configured_phrases, lacks_words, word_boosting, words_of
from nemo_gpu_decoding.nemo_plugin import word_graph_sections
from nemo_gpu_decoding.nemo_plugin.ctc import CTCInfer
from nemo_gpu_decoding.nemo_plugin.hypotheses import WordHypothesis, from_path
from nemo_gpu_decoding.nemo_plugin.streaming.stream_state import StreamState
from nemo_gpu_decoding.search.alternatives import word_alternatives
from nemo_gpu_decoding.search.result import NBest, Path, Place
from nemo_gpu_decoding.search.word_graph.decoder import CudaWFST, PagedBigLM
from nemo_gpu_decoding.search.word_graph.large_lm.pair import load_large_lm, load_small_lm
from nemo_gpu_decoding.search.word_graph.result import GraphWord, WordPath, minimum_bayes_risk


class WordGraphInfer(CTCInfer):
    """The search cuda_wfst with NeMo's decoder interface."""

    section = "wfst"
    read = staticmethod(word_graph_sections.read_cuda_wfst)
    options: word_graph_sections.WordGraphOptions

    @property
    def why_one_best(self) -> str:
        return "decoding_mode mbr has one result" if self.options.decoding_mode == "mbr" else ""

    def boosting_of(self, config: BoostingConfig, weight: float | None, lm: str | None = None) -> BackoffAutomaton:
        """Return the boosting automaton for a request; words that the graph lacks are spelled with tokens."""
        decoder, phrases = self.decoder(), configured_phrases(config)
        graph, speller = decoder.graph, None
        if graph.pieces is not None or lacks_words(phrases, config, graph):
            graph, language = decoder.opened_graph, self.options.graph.source_lang
            settled = weight_of_list(weight or None, len(config.key_phrases_list or ()))
            speller = Speller(in_language(self.vocabulary(), language), self.options.fusion.lm_weight / settled)
        return self._boosting(phrases, config, weight, graph, name="requests", speller=speller)

    def _load(self) -> CudaWFST:
        fused, vocabulary = self.options.fusion, self.vocabulary()
        phrases = configured_phrases(fused.boosting) if fused.has_phrases else []
        graph, topology = load_word_graph(
            self.options.graph, vocabulary, self.blank_id, self._boosted_words(phrases), fused.boosting.is_case_ignored
        )
        if self.options.graph.open_vocabulary is not None:
            key = "piece labels", graph.fingerprint, repr(graph.report)  # which has costs
            graph = cached(key, partial(with_piece_labels, graph))
        boosting = None
        if phrases:
            name = str(fused.boosting.key_phrases_file or "wfst.boosting_tree")
            boosting = self._boosting(phrases, fused.boosting, fused.boosting_weight, graph, name=name)
        fusion = Fusion(None, fused.lm_weight, boosting, weight_of_tree(fused.boosting_weight, boosting))
        config = replace(self.options.search, topology=topology)
        return self._search(graph, config=config, fusion=fusion, pieces=vocabulary.pieces)

    def _boosting(
        self, phrases: Sequence[Phrase], config: BoostingConfig, weight: float | None, graph: WordGraph, **how: Any
    ) -> BackoffAutomaton:
        """Return `word_boosting(...)` from the cache: `transcribe(timestamps=True)` recreates decoding objects."""
        if weight is None:
            how["vocabulary"] = in_language(self.vocabulary(), self.options.graph.source_lang)
        key = ("word boosting", tuple(phrases), config, graph.fingerprint, *how.items())
        return cached(key, partial(word_boosting, phrases, config, graph, **how))

    def _boosted_words(self, phrases: Sequence[Phrase]) -> list[str]:
        """Return the words of phrases and aliases to add to a graph that is built; [] for a ready-made graph."""
        options, config = self.options.graph, self.options.fusion.boosting
        if options.ready_made is not None or not phrases:
            return []
        vocabulary = in_language(self.vocabulary(), options.source_lang)
        return words_of(spelled_phrases(phrases, lambda phrase: can_spell(phrase, vocabulary, config)))

    def _search(self, graph: WordGraph, **others: Any) -> CudaWFST:
        return CudaWFST(graph, self.blank_id, self.blank_id, **others)

    def chosen(self, nbest: NBest) -> Sequence[Path]:
        if self.options.decoding_mode == "mbr":
            return [minimum_bayes_risk([path for path in nbest if isinstance(path, WordPath)])]
        return super().chosen(nbest)

    def alternatives(self, nbest: NBest) -> Callable[[], tuple[Place, ...]] | None:
        if self.options.decoding_mode == "mbr":
            best = self.chosen(nbest)[0]
            nbest = replace(nbest, paths=(best, *(path for path in nbest if path is not best)))
        lattice = nbest.lattice
        if lattice is None:
            return super().alternatives(nbest)
        return lambda: word_alternatives(nbest.paths, self.vocabulary(), lattice.determinized())

    def text_of(self, path: Path) -> str:
        assert isinstance(path, WordPath)
        return path.text if self._owner is None else self._owner.text_of(path)

    def _hypothesis(self, path: Path, state: StreamState) -> WordHypothesis:
        assert isinstance(path, WordPath)
        words = tuple(self._without_space(word, path) for word in path.words)
        nbest = state.nbest
        return from_path(path, state, WordHypothesis, words=words, lattice=nbest.lattice, work=nbest.work)

    def _alignment(self, path: Path, num_frames: int) -> np.ndarray:
        labels = np.full(num_frames, self.blank_id, np.int64)
        for token, start, repeats in zip(path.tokens, path.frames, path.repeats, strict=True):
            labels[start : start + repeats] = token
        return labels

    def _without_space(self, word: GraphWord, path: Path) -> GraphWord:
        """Return a word without the token of the space before it, which character models have."""
        pieces, first = self.decoder().pieces, word.first_token
        if not pieces or first >= word.end_token or pieces[path.tokens[first]] != " ":
            return word
        return word._replace(first_token=first + 1, start_frame=int(path.frames[first + 1]))


class PagedInfer(WordGraphInfer):
    """The search paged_biglm with NeMo's decoder interface; the graph has the small LM, costs are the large LM's."""

    read = staticmethod(word_graph_sections.read_paged_biglm)
    options: word_graph_sections.PagedOptions

    def _search(self, graph: WordGraph, **others: Any) -> PagedBigLM:
        large, small = load_large_lm(self.options.large), load_small_lm(self.options.small, graph)
        return PagedBigLM(graph, self.blank_id, self.blank_id, large, small, **others)
