"""`PagedBigLM`: the public face of paged_biglm. Checks inputs, builds results; no algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from nemo_gpu_decoding.fusion.batch import BatchFusion
from nemo_gpu_decoding.fusion.fusion import Fusion
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.lm.packed import PackedLM
from nemo_gpu_decoding.search.decoder import Streams
from nemo_gpu_decoding.search.engine import Engine
from nemo_gpu_decoding.search.result import NBest, Work
from nemo_gpu_decoding.search.word_graph.composition.composition import correction_of
from nemo_gpu_decoding.search.word_graph.composition.config import PagedBigLMConfig
from nemo_gpu_decoding.search.word_graph.composition.cpu_engine import CPUEngine
from nemo_gpu_decoding.search.word_graph.composition.rescoring import shared_rescoring
from nemo_gpu_decoding.search.word_graph.composition.streams import Setup
from nemo_gpu_decoding.search.word_graph.composition.trace import all_ends, best_of
from nemo_gpu_decoding.search.word_graph.composition.ways import CompositionParams
from nemo_gpu_decoding.search.word_graph.cuda_composition import LmComposition
from nemo_gpu_decoding.search.word_graph.cuda_engine import CUDAEngine
from nemo_gpu_decoding.search.word_graph.decoder import CudaWFST
from nemo_gpu_decoding.search.word_graph.lattice import LatticePath
from nemo_gpu_decoding.search.word_graph.result import WordPath
from nemo_gpu_decoding.search.word_graph.tokens import NONE
from nemo_gpu_decoding.search.word_graph.trace import steps_of


class PagedBigLM(CudaWFST):
    """Word-graph decoding with a small LM in the graph and a large one asked on the fly [LET], [XLLM].

    It finds what `CudaWFST` would find in a graph of the large LM, which may be far too large to be
    built. The verbs, requests and results are those of `CudaWFST`; `NBest.work` says what it took.

    Args:
        graph: of the small LM, from `build_graph`.
        vocab_size: V, number of tokens without the blank.
        blank_id: column of the blank in the log-probs, 0 .. V. NeMo's is V.
        large: the large LM, from `load_packed_lm` or `pack_arpa_in_memory`.
        small: the small LM that the graph was made of, likewise.
        config: see `PagedBigLMConfig`.
        fusion: boosting from `build_word_boosting`, and the weights of it and of both LMs.
        pieces: text of each column, to spell words that only <unk> stands for.

    Example:
        >>> graph = build_graph("small.arpa", vocabulary)
        >>> small, large = pack_arpa_in_memory("small.arpa"), load_packed_lm("large.packed")
        >>> decoder = PagedBigLM(graph, len(vocabulary), len(vocabulary), large, small)
        >>> decoder.decode(log_probs, lengths)[0].best.text

    Raises:
        ValueError: an argument is out of range or does not fit the others.
    """

    config: PagedBigLMConfig

    def __init__(
        self,
        graph: WordGraph,
        vocab_size: int,
        blank_id: int,
        large: PackedLM,
        small: PackedLM,
        config: PagedBigLMConfig | None = None,
        fusion: Fusion | None = None,
        pieces: Sequence[str] | None = None,
    ) -> None:
        config = config or PagedBigLMConfig()
        super().__init__(graph, vocab_size, blank_id, config, fusion, pieces)
        self._large, self._small = large, small
        self._rescoring = shared_rescoring(graph, large, small, config.difference)
        self._composition = LmComposition(self._rescoring, config, large.name)

    def with_options(self, config: Any, fusion: Fusion) -> PagedBigLM:
        return PagedBigLM(
            self.graph, self.vocab_size, self.blank_id, self._large, self._small, config, fusion,
            self.pieces,
        )  # fmt: skip

    def _cpu_engine(self, streams: Streams) -> Engine:
        return CPUEngine(self._setups(streams), self.config)

    def _cuda_engine(self, streams: Streams, device: torch.device) -> Engine:
        return CUDAEngine(self._setups(streams), self.config, device, self._composition)

    def _result(self, utterance: Any, final: bool) -> NBest[WordPath]:
        counts = ("look_ups", "memo_hits", "arc_visits", "groups", "prolonged", "frames")
        work = Work(*(int(utterance.progress[name][0]) for name in counts))
        return replace(super()._result(utterance, final), work=work)

    def _best_path(self, utterance: Any, final: bool) -> LatticePath | None:
        tokens, ends = utterance.tokens, self._ends(utterance, final)
        number = best_of(ends, tokens)
        if number == NONE:
            return None
        end = ends[number]
        token = tokens[end["node"]]
        cost = float(utterance.progress["cost"][0]) + float(token["cost"]) + float(end["cost"])
        steps = steps_of(utterance.records, token)
        return LatticePath(cost, steps, int(end["state"]), int(end["epsilon"]))

    def _ends(self, utterance: Any, final: bool) -> np.ndarray:
        setup = utterance.setup
        facts = setup.search, setup.graph.arrays, setup.boosting.arrays, setup.rescoring
        return all_ends(utterance.tokens, final, *facts)

    def _correction(self, words: Sequence[int], ended: bool, setup: Any) -> float:
        return correction_of(np.array(words, np.int64), ended, setup.search, setup.rescoring)

    def _setup(self, fusion: BatchFusion, i: int) -> Setup:
        weights, graph, boosting = self._weights(fusion, i)
        composition = CompositionParams(
            correction_weight=np.float32(float(weights.lm_weight) * self.config.large_lm_weight),
            lazy=self.config.composition == "lazy",
            group_size=self.config.group_size or 1 << 30,
        )
        return Setup(self._params, weights, graph, boosting, composition, self._rescoring)
