"""`CudaWFST` and `PagedBigLM` check arguments, and build results from the streams of the engines."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from nemo_gpu_decoding.cache import cached
from nemo_gpu_decoding.checks import FieldError, check_int, check_kind, given_or_default
from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton, empty_automaton
from nemo_gpu_decoding.fusion.batch import BatchFusion, FusionLabels
from nemo_gpu_decoding.fusion.fusion import Fusion
from nemo_gpu_decoding.graph.csr import GRAPH, WordGraph, topology_number
from nemo_gpu_decoding.graph.unknown_words import NEW_WORDS, num_opened_labels, with_new_words
from nemo_gpu_decoding.lm.on_device import SECTOR_BYTES
from nemo_gpu_decoding.lm.packed import PackedLM
from nemo_gpu_decoding.search.committed import joined
from nemo_gpu_decoding.search.decoder import Decoder
from nemo_gpu_decoding.search.engine import Engine, Streams
from nemo_gpu_decoding.search.evidence import Units
from nemo_gpu_decoding.search.result import NBest, ScoreParts, Work, new_frozen
from nemo_gpu_decoding.search.word_graph import records, result, stream_state
from nemo_gpu_decoding.search.word_graph.best_path import FoundPaths, Steps, best_paths, ends_of, together
from nemo_gpu_decoding.search.word_graph.config import PagedBigLMConfig, WFSTConfig
from nemo_gpu_decoding.search.word_graph.cpu_engine import CPUEngine
from nemo_gpu_decoding.search.word_graph.cuda_engine import CUDAEngine, LargeLMKernels
from nemo_gpu_decoding.search.word_graph.large_lm.let_engine import LetEngine
from nemo_gpu_decoding.search.word_graph.large_lm.pair import labels_of_unknown, shared_lm_pair, with_more_words
from nemo_gpu_decoding.search.word_graph.large_lm.scorer import LmPair, LmScorer
from nemo_gpu_decoding.search.word_graph.lattice.lattice import Lattice, lattice_of
from nemo_gpu_decoding.search.word_graph.lattice.rescoring import SecondLM
from nemo_gpu_decoding.search.word_graph.stream_state import StreamModels, WordGraphStream

logger = logging.getLogger("nemo_gpu_decoding")

MOST_PARTIAL = 100  # most alternatives of a running stream, because each is aligned with all others
NO_END = "no hypothesis has reached a final state of the graph; the result may break off within a word"


class CudaWFST(Decoder[WFSTConfig, NBest[result.WordPath]]):
    """A decoder that searches CTC log-probs in a word graph [CUDA-WFST].

    Args:
        graph: a graph from `build_graph`, `load_graph` or `load_fst_graph`.
        vocab_size: V, number of tokens without the blank.
        blank_id: column of the blank in the log-probs, 0 .. V; in NeMo it is V.
        config: see `WFSTConfig`.
        fusion: boosting from `build_word_boosting`; weights of the boosting and of the graph's costs.
        pieces: text of each column, to spell words that the graph reads as <unk>.

    Example:
        >>> graph = build_graph("lm.arpa", vocabulary)
        >>> decoder = CudaWFST(graph, len(vocabulary), blank_id=len(vocabulary))
        >>> decoder.decode(log_probs, lengths)[0].best.text

    Raises:
        ValueError: an argument is out of range or does not fit the other arguments.
    """

    strategy = "cuda_wfst"

    def __init__(
        self,
        graph: WordGraph,
        vocab_size: int,
        blank_id: int,
        config: WFSTConfig | None = None,
        fusion: Fusion | None = None,
        pieces: Sequence[str] | None = None,
    ) -> None:
        check_int("vocab_size", vocab_size, 1, records.MAX_LABELS - 1)
        check_int("blank_id", blank_id, 0, vocab_size)
        config = given_or_default("config", config, WFSTConfig)
        check_kind("graph", graph, WordGraph, ": build_graph or load_graph makes it")
        check_kind("pieces", () if pieces is None else pieces, Sequence)
        if pieces is not None and not 0 <= len(pieces) - vocab_size <= 1:
            raise FieldError("pieces", pieces, f"{vocab_size} texts, one per token")
        self.graph, self.vocab_size, self.blank_id, self.pieces = graph, vocab_size, blank_id, pieces
        self._check_graph(config)
        labels = FusionLabels(
            len(graph.words),
            opened=num_opened_labels(graph),
            unit="words",
            hint=": build it with build_word_boosting for this graph",
            lm_in_graph=True,
            max_states=records.MAX_BOOST_STATES,
            unlocked="a word graph writes its own words only; build it from the words that may be written",
        )
        super().__init__(config, fusion, labels)
        self._plain_models: StreamModels | None = None  # of the last utterance without phrases
        self._nothing = empty_automaton(len(graph.words))
        self._params = records.SearchParams(
            blank_id=blank_id,
            topology=topology_number(config.topology),
            beam=np.float32(config.beam),
            max_active=config.max_active,
            min_active=config.min_active,
            acoustic_scale=np.float32(config.acoustic_scale),
            keeps_links=config.keeps_links,
            lattice_beam=np.float32(config.lattice_beam),
            num_words=len(graph.words),
            num_spoken=graph.num_spoken,
        )

    @cached_property
    def opened_graph(self) -> WordGraph:
        """Return the graph for requests that boost words that `graph` lacks (`graph/unknown_words.py`).

        Raises:
            ValueError: the graph takes no new words.
        """
        return self._opened()

    def _opened(self) -> WordGraph:
        if self.graph.pieces is not None:
            return self.graph
        key = "new words", self.graph.fingerprint, repr(self.graph.report.get(NEW_WORDS))
        graph = cached(key, partial(with_new_words, self.graph))
        _check_epsilons(graph)
        return graph

    def _arguments(self, config: Any, fusion: Fusion) -> tuple[Any, ...]:
        """Return the arguments that make this decoder, with these options."""
        return self.graph, self.vocab_size, self.blank_id, config, fusion, self.pieces

    def __reduce__(self) -> tuple[Any, ...]:
        """Build copies from the arguments, so that their arrays have the same types in compiled code."""
        return type(self), self._arguments(self.config, self.fusion)

    def with_options(self, config: Any, fusion: Fusion) -> CudaWFST:
        return type(self)(*self._arguments(config, fusion))

    def _cpu_engine(self, streams: Streams) -> Engine:
        return CPUEngine(self._models_of, streams.fusion, self.config)

    def _cuda_engine(self, streams: Streams, device: torch.device) -> Engine:
        return CUDAEngine(self._models_of, streams.fusion, self.config, device)

    def _why_not_cuda(self, streams: Streams, device: torch.device) -> str | None:
        return None

    def _results(
        self, streams: Streams, engine: Engine, rows: Sequence[int], n_best: int, *, final: bool
    ) -> list[NBest[result.WordPath]]:
        assert isinstance(engine, (CPUEngine, CUDAEngine))
        states: list[WordGraphStream] = engine.results(rows, n_best, final=final)
        best = best_paths(states, final)
        paths = self._word_paths(best, [state.models for state in states], states)
        overflows = together([state.counters for state in states])["overflowed"].tolist()
        costs, ended, results = best.ends["cost"].tolist(), best.ended.tolist(), []
        end_costs = costs if final else ends_of(states, final=True)["cost"].tolist()
        for r, state in enumerate(states):
            head, lattice = None if state.committed is None else state.committed.head, None
            own_paths: tuple[result.WordPath, ...] = (joined(head, paths[r]),)
            if self.config.keeps_links and (final or n_best > 1):
                lattice = lattice_of(state, ended[r])
                own_paths = self._paths(lattice, n_best)
            nbest = new_frozen(
                NBest,
                paths=own_paths,
                num_frames=state.frames,
                notes=_notes(ended[r], overflows[r], final),
                lattice=lattice if self.config.lattice else None,
                relative_cost=None if final else max(0.0, end_costs[r] - costs[r]),
                work=None if state.models.lm_scorer is None else _work(state.counters),
                committed=None if final else self._committed(state, best.steps_of(r)),
            )
            results.append(nbest)
        return results

    def _units(self, path: result.WordPath) -> Units:
        words = path.words
        return Units([w.text for w in words], [w.first_token for w in words], [w.end_token for w in words])

    def _most_partial(self) -> tuple[int, str]:
        if self.config.keeps_links:
            return MOST_PARTIAL, ""
        return 1, ": alternatives are kept where the config has n_best > 1 or lattice"

    # ----------------------------------------------------------------------------------- results

    def _committed(self, state: WordGraphStream, steps: Steps) -> int | None:
        """Return the number of tokens that all live hypotheses share, or None if the live hypotheses are not known."""
        if state.live is None:
            return None
        _, count = stream_state.shared_steps(state)
        shared = state.models.graph.arrays.arcs["ilabel"][steps.arcs[:count]] != self.blank_id
        return int(shared.sum()) + (0 if state.committed is None else state.committed.tokens)

    def n_best(self, lattice: Lattice, n: int = 1) -> NBest[result.WordPath]:
        """Return the n best hypotheses of a lattice of this decoder, such as a rescored lattice.

        Raises:
            ValueError: n < 1.
        """
        paths = self._paths(lattice, n)
        return NBest(paths, int(lattice.node_frames[-1]), () if lattice.reaches_end else (NO_END,), lattice=lattice)

    def _paths(self, lattice: Lattice, n: int) -> tuple[result.WordPath, ...]:
        """Return the n best paths of a lattice with different words, with the posterior of each word."""
        best = lattice.n_best(n)
        paths = self._word_paths(best, [lattice.models] * len(best.ends), second=lattice.second)
        return result.with_posteriors(paths)

    def _word_paths(
        self,
        best: FoundPaths,
        models: Sequence[StreamModels],
        states: Sequence[WordGraphStream] = (),
        second: SecondLM | None = None,
    ) -> list[result.WordPath]:
        """Return paths as results; with `states` they begin after the committed words, but their scores include these.

        NumPy computes all paths at once, because a call of NumPy takes about as long for one number as for all.
        """
        before = np.zeros(len(models), result.BEFORE)
        start = [stream_state.TextScores.at_start(models_of_path) for models_of_path in models]
        for p, state in enumerate(states):
            if state.committed is not None and state.committed.head is not None:
                before[p], start[p] = state.committed.before, state.committed.scores
        # the numbers of arcs and labels of `graph` are those of `opened_graph`, which has more
        graph = next((opened.graph for opened in models if opened.graph is not self.graph), self.graph)
        read = result.read_paths(best, before, graph, self.blank_id)
        (tokens, frames, repeats), words = read.tokens, result.words_of(read, before, graph, self.pieces)
        labels, ended = read.words["label"].tolist(), best.ended.tolist()
        costs, graph_costs = best.ends["cost"].tolist(), read.paths["graph_cost"].tolist()
        # the tokens and the words of each path
        parts, spans = (
            [slice(*ends) for ends in pairwise([0, *read.paths[name].tolist()])] for name in ("tokens", "words")
        )
        texts = [
            result.emitted_labels(words[span], tokens[part], graph, complete=is_end)
            if own.weights.boosts
            else labels[span]
            for part, span, is_end, own in zip(parts, spans, ended, models, strict=True)
        ]
        differences = stream_state.weighted_differences(texts, start, ended, models)
        paths = []
        for p, (part, span) in enumerate(zip(parts, spans, strict=True)):
            weights, boosting, second_pass = models[p].weights, 0.0, 0.0
            lm = -graph_costs[p] * float(weights.lm_weight) - differences[p]
            if second is not None:
                lm *= second.lm_share
                second_pass = -second.cost(np.array(texts[p], np.int64), final=ended[p])
            if weights.boosts:
                bonus, end = start[p].boosted(texts[p], models[p])
                final_weight = models[p].boosting.arrays.states["final_weight"][end]
                boosting = float(weights.boosting_weight) * (bonus + (float(final_weight) if ended[p] else 0.0))
            acoustic = -costs[p] - lm - boosting - second_pass
            path = new_frozen(
                result.WordPath,
                tokens=tokens[part],
                frames=frames[part],
                repeats=repeats[part],
                token_confidence=read.confidence[part],
                score=-costs[p],
                parts=new_frozen(ScoreParts, acoustic=acoustic, lm=lm, boosting=boosting, second_pass=second_pass),
                words=tuple(words[span]),
            )
            paths.append(path)
        return paths

    # ------------------------------------------------------------------------------------ models

    def _models_of(self, fusion: BatchFusion, i: int) -> StreamModels:
        """Return the models of utterance i of a batch; utterances without phrases share them, also between calls."""
        if fusion.boosting_weights[i] > 0:
            return self._new_models(fusion, i)
        plain = self._plain_models
        if plain is None or plain.weights.lm_weight != fusion.lm_weights[i]:
            plain = self._plain_models = self._new_models(fusion, i)
        return plain

    def _new_models(self, fusion: BatchFusion, i: int) -> StreamModels:
        weight, lm_weight = float(fusion.boosting_weights[i]), float(fusion.lm_weights[i])
        boosts = weight > 0
        boosting = fusion.trees[fusion.tree_of[i]] if boosts else self._nothing
        graph, params = self.graph, self._params
        if boosting.vocab_size != len(graph.words):
            graph = self.opened_graph
            params = params._replace(num_words=len(graph.words), num_spoken=graph.num_spoken)
        bonus = self._most_bonus(boosting, weight) * graph.most_words / self.graph.most_words if boosts else 0.0
        weights = records.StreamParams(
            lm_weight=np.float32(lm_weight),
            least_cost=np.float32(lm_weight * graph.least_cost - 2 * bonus - 1e-3),
            boosting_weight=np.float32(weight if boosts else 0.0),
            boosts=boosts,
            most_bonus=np.float32(bonus),
        )
        return StreamModels(params, weights, graph, boosting, pieces=self.pieces)

    def _most_bonus(self, boosting: BackoffAutomaton, weight: float) -> float:
        """Return an upper bound of the bonus of an output label. Warns if a word's bonus exceeds half of the beam."""
        bonus = weight * max(0.0, float(boosting.arrays.states["upper_bound"].max()))
        if round(bonus, 2) > self.config.beam / 2:  # the bound is rounded up
            _warn_of_bonus(boosting.name, round(bonus, 1), self.config.beam)
        return bonus * self.graph.most_words

    def _check_graph(self, config: WFSTConfig) -> None:
        graph = self.graph
        if graph.largest_label > self.vocab_size:
            raise ValueError(
                f"graph ({graph.name}) reads column {graph.largest_label}, expected 0 .. "
                f"{self.vocab_size}: it was built for another model"
            )
        _check_epsilons(graph)
        if topology_number(config.topology) != GRAPH and (graph.arrays.arcs["ilabel"] == self.blank_id).any():
            raise ValueError(
                f"graph ({graph.name}) reads the blank (column {self.blank_id}) with topology "
                f"{config.topology!r}, expected topology 'graph' for a ready-made T o L o G"
            )


class PagedBigLM(CudaWFST):
    """A decoder that searches a small LM's graph and queries a large LM on the fly [LET], [XLLM].

    The results are those of `CudaWFST` with a graph of the large LM, which is often too large to be built. Methods
    and requests are those of `CudaWFST`. `NBest.work` counts LM queries, groups and arcs.

    Args:
        graph: graph of the small LM, from `build_graph`.
        vocab_size, blank_id, pieces: as in `CudaWFST`.
        large: the large LM, from `load_packed_lm` or `pack_arpa_in_memory`.
        small: the LM of the graph, from the same functions.
        config: see `PagedBigLMConfig`.
        fusion: boosting from `build_word_boosting`; weights of the boosting and of both LMs.

    Example:
        >>> graph = build_graph("small.arpa", vocabulary)
        >>> small, large = pack_arpa_in_memory("small.arpa"), load_packed_lm("large.packed")
        >>> decoder = PagedBigLM(graph, len(vocabulary), len(vocabulary), large, small)
        >>> decoder.decode(log_probs, lengths)[0].best.text

    Raises:
        ValueError: an argument is out of range or does not fit the other arguments.
    """

    strategy = "paged_biglm"
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
        config = given_or_default("config", config, PagedBigLMConfig)
        for name, lm in (("large", large), ("small", small)):
            check_kind(name, lm, PackedLM, ": load_packed_lm or pack_arpa_in_memory makes it")
        super().__init__(graph, vocab_size, blank_id, config, fusion, pieces)
        self._large, self._small = large, small
        self._lms = shared_lm_pair(graph, large, small, config.difference)
        self._kernels = LargeLMKernels(self._lms, config, large.name)

    def _arguments(self, config: Any, fusion: Fusion) -> tuple[Any, ...]:
        arguments = super()._arguments(config, fusion)
        return *arguments[:3], self._large, self._small, *arguments[3:]

    def _cpu_engine(self, streams: Streams) -> Engine:
        if self.config.composition == "let":
            return LetEngine(self._models_of, streams.fusion, self.config)
        return super()._cpu_engine(streams)

    def _cuda_engine(self, streams: Streams, device: torch.device) -> Engine:
        return CUDAEngine(self._models_of, streams.fusion, self.config, device, self._kernels)

    def _why_not_cuda(self, streams: Streams, device: torch.device) -> str | None:
        if self.config.composition == "let":
            return "composition is 'let', expected 'lazy': 'let' has no CUDA kernels"
        return super()._why_not_cuda(streams, device)

    def _new_models(self, fusion: BatchFusion, i: int) -> StreamModels:
        models = super()._new_models(fusion, i)
        weight = np.float32(float(models.weights.lm_weight) * self.config.large_lm_weight)
        lms = self._lms if models.graph is self.graph else self._opened_lms
        return replace(models, lm_scorer=LmScorer(lms, weight, self.config.group_size or 1 << 30))

    def _opened(self) -> WordGraph:
        graph = super()._opened()
        if graph is not self.graph:
            labels_of_unknown(graph, self._large, self._small)  # raises an error if an LM has no <unk>
        return graph

    @cached_property
    def _opened_lms(self) -> LmPair:
        """Return the LMs for the words of `opened_graph`."""
        return with_more_words(self._lms, self.opened_graph, self._large, self._small)


def _check_epsilons(graph: WordGraph) -> None:
    states = graph.arrays.states
    epsilons = int((states["epsilon_end"] - states["epsilon_begin"]).max())
    if epsilons > records.MAX_EPSILONS:
        raise ValueError(
            f"graph ({graph.name}) has a state with {epsilons} closure arcs (paths without an input label), "
            f"expected at most {records.MAX_EPSILONS}: remove epsilons with OpenFst's fstrmepsilon"
        )


def _notes(ended: bool, overflows: int, final: bool) -> tuple[str, ...]:
    """Return the warnings about a stream's result, as texts."""
    notes = () if ended == final else (NO_END,)
    if overflows:
        return (*notes, f"a table was full {overflows} times, which narrowed the beam there")
    return notes


def _work(counters: np.ndarray) -> Work:
    counts = dict(zip(counters.dtype.names or (), counters.tolist()[0], strict=True))
    counts["bus_bytes"] = SECTOR_BYTES * counts["cache_sectors"]
    return Work(*map(counts.__getitem__, Work._fields))


@lru_cache(maxsize=64)  # warn once for each phrase list and bonus
def _warn_of_bonus(name: str, bonus: float, beam: float) -> None:
    logger.warning(
        "%s: a boosted word gains up to %s, more than half of beam_width (%s / 2 = %s): the best path without the "
        "bonus is pruned before it can be compared. Use beam_width >= %d or a smaller weight",
        name, bonus, beam, beam / 2, math.ceil(2 * bonus),
    )  # fmt: skip
