"""`CudaWFST`: the public face of cuda_wfst. Checks inputs, keeps streams; no algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton, empty_automaton
from nemo_gpu_decoding.fusion.batch import BatchFusion, FusionLabels, check_fusion
from nemo_gpu_decoding.fusion.fusion import Fusion, Request
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.graph.topology import topology_number
from nemo_gpu_decoding.search.backend import choose_backend
from nemo_gpu_decoding.search.cuda_wfst import cuda
from nemo_gpu_decoding.search.cuda_wfst.config import WFSTConfig
from nemo_gpu_decoding.search.cuda_wfst.cpu_engine import CPUEngine
from nemo_gpu_decoding.search.cuda_wfst.engine import Engine
from nemo_gpu_decoding.search.cuda_wfst.lattice import LatticePath, lattice_of
from nemo_gpu_decoding.search.cuda_wfst.mbr import with_confidence
from nemo_gpu_decoding.search.cuda_wfst.result import (
    WordNBest,
    WordPath,
    graph_score,
    relative_cost,
    traced_text,
    words_of,
)
from nemo_gpu_decoding.search.cuda_wfst.streams import Setup, Streams
from nemo_gpu_decoding.search.cuda_wfst.tokens import (
    MAX_BOOST_STATES,
    MAX_EPSILONS,
    MAX_LABELS,
    NONE,
)
from nemo_gpu_decoding.search.cuda_wfst.trace import all_ends, best_end, steps_of
from nemo_gpu_decoding.search.cuda_wfst.ways import Search
from nemo_gpu_decoding.search.inputs import check_log_probs, checked_lengths
from nemo_gpu_decoding.search.result import ScoreParts

NO_END = "no hypothesis has reached a final state of the graph; the result may break off within a word"


class CudaWFST:
    """Word-graph decoding of CTC log-probs [CUDA-WFST].

    Args:
        graph: from `build_graph`, `load_graph` or `load_fst_graph`.
        vocab_size: V, number of tokens without the blank.
        blank_id: column of the blank in the log-probs, 0 .. V. NeMo's is V.
        config: see `WFSTConfig`.
        fusion: boosting from `build_word_boosting`, and the weights of it and of the graph's costs.
        pieces: text of each column, to spell words that only <unk> stands for.

    Example:
        >>> graph = build_graph("lm.arpa", vocabulary)
        >>> decoder = CudaWFST(graph, len(vocabulary), blank_id=len(vocabulary))
        >>> decoder.decode(log_probs, lengths)[0].best.text

    One decoder may serve several threads at once: it holds no state of a running utterance.

    Raises:
        ValueError: an argument is out of range or does not fit the others.
    """

    def __init__(
        self,
        graph: WordGraph,
        vocab_size: int,
        blank_id: int,
        config: WFSTConfig | None = None,
        fusion: Fusion | None = None,
        pieces: Sequence[str] | None = None,
    ) -> None:
        if not 1 <= vocab_size < MAX_LABELS:
            raise ValueError(f"vocab_size is {vocab_size}, expected 1 .. {MAX_LABELS - 1}")
        if not 0 <= blank_id <= vocab_size:
            raise ValueError(f"blank_id is {blank_id}, expected 0 .. {vocab_size} (vocab_size)")
        self.graph, self.vocab_size, self.blank_id = graph, vocab_size, blank_id
        self.config = config or WFSTConfig()
        self.fusion, self.pieces = fusion or Fusion(), pieces
        self._check_graph()
        self._labels = FusionLabels(
            len(graph.words),
            unit="words",
            hint=": build it with build_word_boosting for this graph",
            lm_in_graph=True,
            max_states=MAX_BOOST_STATES,
        )
        check_fusion(self.fusion, self._labels)
        self._nothing = empty_automaton(len(graph.words))

    # ------------------------------------------------------------------------------------ verbs

    def decode(
        self,
        log_probs: torch.Tensor,
        lengths: torch.Tensor | Sequence[int],
        requests: Sequence[Request | None] | None = None,
    ) -> list[WordNBest]:
        """Decode a batch.

        Args:
            log_probs: [B, T, V + 1] natural log-probabilities. What lies beyond an utterance's length
                is never read.
            lengths: [B] valid frames.
            requests: [B] boosting and LM weight that single utterances want instead of the decoder's.

        Returns:
            One `WordNBest` per utterance.

        Raises:
            ValueError: wrong shapes, lengths beyond T, NaN or +inf in valid frames, wrong requests.
        """
        log_probs, _ = self._checked(log_probs, lengths, batch=None)
        streams = self.open(len(log_probs), requests)
        self.push(streams, log_probs, lengths)
        return self.close(streams)

    def open(self, n: int, requests: Sequence[Request | None] | None = None) -> Streams:
        """Begin n utterances that arrive in chunks; see `decode` for the requests."""
        if n < 0:
            raise ValueError(f"n is {n}, expected the number of streams, >= 0")
        fusion = BatchFusion.resolve(self.fusion, n, requests, self._labels)
        return Streams([self._setup(fusion, i) for i in range(n)])

    def push(
        self, streams: Streams, log_probs: torch.Tensor, lengths: torch.Tensor | Sequence[int]
    ) -> None:
        """Read the next chunk of every stream: log_probs [n, T, V + 1], lengths [n] (0 = nothing new).

        Raises:
            ValueError: as `decode`; the streams are then as they were before the call.
        """
        self._check_open(streams)
        log_probs, sizes = self._checked(log_probs, lengths, batch=len(streams))
        if streams.engine is None and len(streams):
            streams.engine = self._engine(streams.setups, log_probs.device)
        if streams.engine is not None:
            streams.engine.push(log_probs, sizes)

    def partial(
        self, streams: Streams, n_best: int = 1, *, rows: Sequence[int] | None = None
    ) -> list[WordNBest]:
        """The best hypothesis of every stream so far; final costs are not in its score.

        Args:
            streams: from `open`.
            n_best: 1.
            rows: numbers of the streams that are asked about, and in this order; None: all.
        """
        self._check_open(streams)
        if n_best != 1:
            raise ValueError(f"n_best is {n_best}, expected 1: alternatives are known at the end only")
        asked = range(len(streams)) if rows is None else rows
        for row in asked:
            if not isinstance(row, (int, np.integer)) or not 0 <= row < len(streams):
                raise ValueError(f"rows holds {row}, expected 0 .. {len(streams) - 1}")
        return [self._result(known, final=False) for known in streams.leading(asked, final=False)]

    def close(self, streams: Streams) -> list[WordNBest]:
        """End the utterances and return their hypotheses."""
        self._check_open(streams)
        streams.closed = True
        if self.config.keeps_links:
            known = streams.utterances
        else:
            known = streams.leading(range(len(streams)), final=True)
        return [self._result(utterance, final=True) for utterance in known]

    def with_options(self, config: Any, fusion: Fusion) -> CudaWFST:
        """The same decoder with other options; what it searches with is shared."""
        return CudaWFST(self.graph, self.vocab_size, self.blank_id, config, fusion, self.pieces)

    # ------------------------------------------------------------------------------- inner rooms

    def _engine(self, setups: Sequence[Any], device: torch.device) -> Engine:
        backend = choose_backend(self.config.backend, device, lambda _: None)
        if backend == "cuda":
            return cuda.CUDAEngine(setups, self.config, device)
        return CPUEngine(setups, self.config)

    def _result(self, utterance: Any, final: bool) -> WordNBest:
        notes, found, ended = [], self._best_path(utterance, final), final
        if found is None:
            notes.append(NO_END)
            found, ended = self._best_path(utterance, final=False), False
            assert found is not None
        overflows = int(utterance.progress["overflowed"][0])
        if overflows:
            notes.append(f"a table was full {overflows} times, which narrowed the beam there")
        paths: tuple[WordPath, ...] = (self._path(utterance, found, ended),)
        lattice = None
        if final and self.config.keeps_links:
            lattice = lattice_of(utterance, self._ends(utterance, ended), ended)
            best = lattice.n_best(self.config.n_best)
            paths = with_confidence([self._path(utterance, path, ended) for path in best])
        return WordNBest(
            paths,
            utterance.frames,
            tuple(notes),
            lattice=lattice if self.config.lattice else None,
            relative_cost=None
            if final
            else relative_cost(found, self._best_path(utterance, final=True)),
        )

    # What follows differs between strategies that search a word graph; the utterance is the strategy's.

    def _best_path(self, utterance: Any, final: bool) -> LatticePath | None:
        """The best path by the records of the search; None if none reaches a final state."""
        setup, tokens = utterance.setup, utterance.tokens
        best, epsilon, cost = best_end(
            tokens, len(tokens), final, setup.search, setup.graph.arrays, setup.boosting.arrays
        )
        if best == NONE:
            return None
        steps = steps_of(utterance.records, tokens[best])
        cost += float(utterance.progress["cost"][0])
        return LatticePath(cost, steps, int(tokens["key"][best]) >> 32, epsilon)

    def _ends(self, utterance: Any, final: bool) -> np.ndarray:
        """All ways to end, as `trace.all_ends` gives them."""
        setup = utterance.setup
        return all_ends(utterance.tokens, final, setup.search, setup.graph.arrays, setup.boosting.arrays)

    def _correction(self, words: Sequence[int], ended: bool, setup: Any) -> float:
        """What the strategy adds to the graph's costs of a path with these words, weighted."""
        return 0.0

    def _path(self, utterance: Any, found: LatticePath, ended: bool) -> WordPath:
        setup, graph = utterance.setup, self.graph
        traced = traced_text(found.steps, graph, self.blank_id)
        lm, state = graph_score(found.steps, graph), found.state
        if found.epsilon != NONE:
            record = graph.arrays.epsilons[found.epsilon]
            traced = traced.followed_by(graph.expanded(int(record["word"])))
            lm, state = lm - float(record["cost"]), int(record["target"])
        if ended:
            lm -= float(graph.arrays.states["final_cost"][state])
        lm *= float(setup.search.lm_weight)
        lm -= self._correction(traced.words, ended, setup)
        boosting = 0.0
        if setup.search.boosts:
            weight = float(setup.search.boosting_weight)
            boosting = weight * setup.boosting.score(traced.words, final=ended)
        score = -found.cost
        return WordPath(
            tokens=traced.tokens,
            frames=traced.frames,
            repeats=traced.repeats,
            token_confidence=traced.confidence,
            score=score,
            parts=ScoreParts(score - lm - boosting, lm, boosting),
            words=words_of(traced, graph, self.pieces),
        )

    def _setup(self, fusion: BatchFusion, i: int) -> Any:
        """What utterance i of a batch is decoded with."""
        boosting, options = self._search_options(fusion, i)
        return Setup(Search(**options), self.graph, boosting)

    def _search_options(self, fusion: BatchFusion, i: int) -> tuple[BackoffAutomaton, dict[str, Any]]:
        """The boosting automaton of an utterance, and the fields of its `Search`."""
        weight, lm_weight = float(fusion.boosting_weights[i]), float(fusion.lm_weights[i])
        boosts = weight > 0
        boosting = fusion.trees[fusion.tree_of[i]] if boosts else self._nothing
        bonus = max(0.0, float(boosting.arrays.states["upper_bound"].max())) if boosts else 0.0
        bonus *= weight * (1 + len(self.graph.arrays.compounds))
        return boosting, {
            "blank_id": self.blank_id,
            "topology": topology_number(self.config.topology),
            "beam": np.float32(self.config.beam),
            "max_active": self.config.max_active,
            "acoustic_scale": np.float32(self.config.acoustic_scale),
            "lm_weight": np.float32(lm_weight),
            "least_cost": np.float32(lm_weight * self.graph.least_cost - 2 * bonus - 1e-3),
            "keeps_links": self.config.keeps_links,
            "lattice_beam": np.float32(self.config.lattice_beam),
            "boosting_weight": np.float32(weight if boosts else 0.0),
            "num_words": len(self.graph.words),
            "boosts": boosts,
            "most_bonus": np.float32(bonus),
        }

    # ------------------------------------------------------------------------------------ checks

    def _checked(
        self, log_probs: torch.Tensor, lengths: torch.Tensor | Sequence[int], batch: int | None
    ) -> tuple[torch.Tensor, np.ndarray]:
        check_log_probs(log_probs, batch=batch, columns=self.vocab_size + 1)
        return log_probs, checked_lengths(lengths, *log_probs.shape[:2])

    def _check_graph(self) -> None:
        graph = self.graph
        if graph.largest_label > self.vocab_size:
            raise ValueError(
                f"graph ({graph.name}) reads column {graph.largest_label}, expected 0 .. "
                f"{self.vocab_size}: it was made for another model"
            )
        states = graph.arrays.states
        epsilons = int((states["epsilon_end"] - states["epsilon_begin"]).max())
        if epsilons > MAX_EPSILONS:
            raise ValueError(
                f"graph ({graph.name}) has a state with {epsilons} ways on without a label, expected at "
                f"most {MAX_EPSILONS}: remove epsilons from it (OpenFst's fstrmepsilon)"
            )
        if self.config.is_ready_made:
            return
        if (graph.arrays.arcs["label"] == self.blank_id).any():
            raise ValueError(
                f"graph ({graph.name}) reads the blank (column {self.blank_id}) with topology "
                f"{self.config.topology!r}: a ready-made T o L o G needs topology 'graph'"
            )

    @staticmethod
    def _check_open(streams: Streams) -> None:
        if streams.closed:
            raise ValueError("streams is closed, expected streams from open() that were not closed yet")
