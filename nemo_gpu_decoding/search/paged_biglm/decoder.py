"""`PagedBigLM`: the public face of paged_biglm. Checks inputs, keeps streams; no algorithm."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton
from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.graph.topology import topology_number
from nemo_gpu_decoding.jit import announce_compilation
from nemo_gpu_decoding.lm.packed import PackedLM
from nemo_gpu_decoding.search.backend import choose_backend
from nemo_gpu_decoding.search.cuda_wfst.decoder import NO_END, CudaWFST
from nemo_gpu_decoding.search.cuda_wfst.lattice import LatticePath
from nemo_gpu_decoding.search.cuda_wfst.mbr import with_confidence
from nemo_gpu_decoding.search.cuda_wfst.result import (
    WordPath,
    graph_score,
    relative_cost,
    traced_text,
    words_of,
)
from nemo_gpu_decoding.search.cuda_wfst.tokens import NONE
from nemo_gpu_decoding.search.cuda_wfst.trace import steps_of
from nemo_gpu_decoding.search.inputs import as_float32
from nemo_gpu_decoding.search.paged_biglm import streams as streaming
from nemo_gpu_decoding.search.paged_biglm.composition import correction_of
from nemo_gpu_decoding.search.paged_biglm.config import BigLMConfig
from nemo_gpu_decoding.search.paged_biglm.lattice import lattice_of
from nemo_gpu_decoding.search.paged_biglm.rescoring import make_rescoring
from nemo_gpu_decoding.search.paged_biglm.result import BigLMNBest, Work
from nemo_gpu_decoding.search.paged_biglm.streams import Setup, Streams, Utterance
from nemo_gpu_decoding.search.paged_biglm.tokens import new_workspace
from nemo_gpu_decoding.search.paged_biglm.trace import all_ends, best_of
from nemo_gpu_decoding.search.paged_biglm.ways import Search
from nemo_gpu_decoding.search.result import ScoreParts
from nemo_gpu_decoding.search.threads import for_each_share


class PagedBigLM(CudaWFST):
    """Word-graph decoding with a small LM in the graph and a large one asked on the fly [LET], [XLLM].

    It finds what `CudaWFST` would find in a graph of the large LM, which may be far too large to be
    built. The verbs, requests and results are those of `CudaWFST`; results are `BigLMNBest`.

    Args:
        graph: of the small LM, from `build_graph`.
        vocab_size: V, number of tokens without the blank.
        blank_id: column of the blank in the log-probs, 0 .. V. NeMo's is V.
        large: the large LM, from `load_packed_lm` or `pack_arpa_in_memory`.
        small: the small LM that the graph was made of, likewise.
        config: see `BigLMConfig`.
        boosting: from `build_word_boosting`; for all utterances that don't request another one.
        boosting_weight: factor of its bonuses.
        pieces: text of each column, to spell words that only <unk> stands for.

    Example:
        >>> graph = build_graph("small.arpa", vocabulary)
        >>> small, large = pack_arpa_in_memory("small.arpa"), load_packed_lm("large.packed")
        >>> decoder = PagedBigLM(graph, len(vocabulary), len(vocabulary), large, small)
        >>> decoder.decode(log_probs, lengths)[0].best.text

    Raises:
        ValueError: an argument is out of range or does not fit the others.
    """

    config: BigLMConfig

    def __init__(
        self,
        graph: WordGraph,
        vocab_size: int,
        blank_id: int,
        large: PackedLM,
        small: PackedLM,
        config: BigLMConfig | None = None,
        boosting: BackoffAutomaton | None = None,
        boosting_weight: float = 1.0,
        pieces: Sequence[str] | None = None,
    ) -> None:
        config = config or BigLMConfig()
        super().__init__(graph, vocab_size, blank_id, config, boosting, boosting_weight, pieces)
        self._rescoring = make_rescoring(graph, large, small, config.difference)

    # ------------------------------------------------------------------------------------ verbs

    def open(self, n: int, requests: Sequence[Request | None] | None = None) -> Streams:  # type: ignore[override]
        """Begin n utterances that arrive in chunks; see `decode` for the requests."""
        if n < 0:
            raise ValueError(f"n is {n}, expected the number of streams, >= 0")
        wishes = self._checked_requests(n, requests)
        return Streams([streaming.new_utterance(self._setup(wish)) for wish in wishes])

    def push(  # type: ignore[override]
        self, streams: Streams, log_probs: torch.Tensor, lengths: torch.Tensor | Sequence[int]
    ) -> None:
        """Read the next chunk of every stream: log_probs [n, T, V + 1], lengths [n] (0 = nothing new).

        Raises:
            ValueError: as `decode`; the streams are then as they were before the call.
        """
        self._check_open(streams)  # type: ignore[arg-type]
        log_probs, sizes = self._checked(log_probs, lengths, batch=len(streams))
        choose_backend(self.config.backend, log_probs.device)
        announce_compilation()
        values, done = as_float32(log_probs), list(streams.utterances)

        def read(rows: np.ndarray) -> None:
            columns, config = self.vocab_size + 1, self.config
            space = new_workspace(config.max_active, columns, config.keeps_links)
            for b in rows.tolist():
                done[b], space = streaming.read_chunk(done[b], values, int(sizes[b]), b, space)

        for_each_share(read, sizes, self.config.threads)
        streams.utterances = done

    # ------------------------------------------------------------------------------- inner rooms

    def _result(self, utterance: Utterance, final: bool) -> BigLMNBest:  # type: ignore[override]
        notes, found, ended = [], self._best_path(utterance, final), final
        if found is None:
            notes.append(NO_END)
            found, ended = self._best_path(utterance, final=False), False
            assert found is not None
        progress = utterance.progress[0]
        if progress["overflowed"]:
            frames = int(progress["overflowed"])
            notes.append(f"a table was full {frames} times, which narrowed the beam there")
        paths: tuple[WordPath, ...] = (self._path(utterance, found, ended),)
        lattice = None
        if final and self.config.keeps_links:
            lattice = lattice_of(utterance)
            best = lattice.n_best(self.config.n_best)
            paths = with_confidence([self._path(utterance, path, ended) for path in best])
        counts = ("look_ups", "memo_hits", "arc_visits", "groups", "prolonged", "frames")
        work = Work(*(int(progress[name]) for name in counts))
        return BigLMNBest(
            paths,
            utterance.frames,
            tuple(notes),
            lattice=lattice if self.config.lattice else None,
            relative_cost=None
            if final
            else relative_cost(found, self._best_path(utterance, final=True)),
            work=work,
        )

    @staticmethod
    def _best_path(utterance: Utterance, final: bool) -> LatticePath | None:  # type: ignore[override]
        """The best path by the records of the search; None if none reaches a final state."""
        setup, tokens = utterance.setup, utterance.tokens
        ends = all_ends(
            tokens, final, setup.search, setup.graph.arrays, setup.boosting.arrays, setup.rescoring
        )
        number = best_of(ends, tokens)
        if number == NONE:
            return None
        end = ends[number]
        token = tokens[end["node"]]
        cost = float(utterance.progress["cost"][0]) + float(token["cost"]) + float(end["cost"])
        steps = steps_of(utterance.records, token)
        return LatticePath(cost, steps, int(end["state"]), int(end["epsilon"]))

    def _path(self, utterance: Utterance, found: LatticePath, ended: bool) -> WordPath:  # type: ignore[override]
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
        labels = np.array(traced.words, np.int64)
        lm -= correction_of(labels, ended, setup.search, setup.rescoring)
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

    def _setup(self, wish: Request) -> Setup:  # type: ignore[override]
        boosting = wish.boosting or self.boosting
        weight = self.boosting_weight if wish.boosting_weight is None else wish.boosting_weight
        lm_weight = self.config.lm_weight if wish.lm_weight is None else wish.lm_weight
        boosts = boosting is not None and weight > 0
        boosting = boosting if boosting is not None and boosts else self._nothing
        bonus = max(0.0, float(boosting.arrays.states["upper_bound"].max())) if boosts else 0.0
        bonus *= weight * (1 + len(self.graph.arrays.compounds))
        config = self.config
        search = Search(
            blank_id=self.blank_id,
            topology=topology_number(config.topology),
            beam=np.float32(config.beam),
            max_active=config.max_active,
            acoustic_scale=np.float32(config.acoustic_scale),
            lm_weight=np.float32(lm_weight),
            least_cost=np.float32(lm_weight * self.graph.least_cost - 2 * bonus - 1e-3),
            keeps_links=config.keeps_links,
            lattice_beam=np.float32(config.lattice_beam),
            boosting_weight=np.float32(weight if boosts else 0.0),
            num_words=len(self.graph.words),
            boosts=boosts,
            most_bonus=np.float32(bonus),
            correction_weight=np.float32(lm_weight * config.big_lm_weight),
            lazy=config.composition == "lazy",
            group_size=config.group_size or 1 << 30,
        )
        return Setup(search, self.graph, boosting, self._rescoring)
