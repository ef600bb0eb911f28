"""`TransducerEngine` is the base class of the engines of both backends; this file also has the streams' state.

Between runs both backends keep a `TransducerStreams`; a subclass implements a run.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nemo_gpu_decoding.fusion.batch import BatchFusion, FusionArrays
from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.search.committed import CommittedTokens, common_ancestor, worth_committing
from nemo_gpu_decoding.search.engine import BadRow, Engine, StreamsLost
from nemo_gpu_decoding.search.transducer.beam import PendingPredictions, TransducerBeams, new_beam_state, new_nodes
from nemo_gpu_decoding.search.transducer.config import TransducerConfig
from nemo_gpu_decoding.search.transducer.cpu_networks import CompiledNetworks
from nemo_gpu_decoding.search.transducer.networks import State, TransducerNetworks
from nemo_gpu_decoding.search.transducer.records import SearchParams
from nemo_gpu_decoding.search.transducer.trace_back import add_scores, drop_nodes, path_fields, rank, trace_back

MOST_FRAME = np.iinfo(np.int32).max
FIRST_COMMIT = 1 << 12  # nodes of a tree, 20 bytes each


class Algorithm(NamedTuple):
    """A transducer search, alsd_pp or aes_pp, with its networks."""

    networks: TransducerNetworks
    config: TransducerConfig
    params: SearchParams
    durations: np.ndarray  # [D] int32, frames
    step: Callable[..., None]  # alsd_pp's or aes_pp's, compiled
    run: Callable[..., None]  # all steps and networks of a group of utterances on the CPU, compiled
    compiled: CompiledNetworks
    kernels: str  # the source of the same step on the GPU, relative to the package


@dataclass
class TransducerStreams:
    """The state of a search of n utterances between runs."""

    beams: TransducerBeams
    nodes: np.ndarray  # [n, N] NODE
    predictions: Predictions
    frames: UnreadFrames  # frames that a hypothesis may still read
    fusions: FusionArrays

    def selected(self, rows: np.ndarray) -> TransducerStreams:
        """Return a copy of the state for some of the utterances."""
        beams = TransducerBeams(*(part[rows] for part in self.beams))
        return TransducerStreams(
            beams,
            self.nodes[rows, : int(beams.counters["node_count"].max(initial=1))],
            self.predictions.selected(rows, len(self.nodes)),
            UnreadFrames(self.frames.values[rows], self.frames.first[rows]),
            self.fusions._replace(utterances=self.fusions.utterances[rows]),
        )

    def add_frames(self, projected: Tensor, lengths: np.ndarray) -> None:
        """Append new frames, and drop those that no hypothesis needs any more.

        Args:
            projected: [sum of lengths, H], utterance by utterance.
            lengths: [n] number of new frames.
        """
        self.frames = self.frames.extended(projected, lengths, self.beams.ends, self.needed)
        self.beams.ends[:] += lengths

    @property
    def needed(self) -> np.ndarray:
        """Return the first frame that a hypothesis may still read, [n]."""
        return first_needed(self.beams.beam, self.beams.counters)

    def restart(self, rows: list[int], fusions: FusionArrays, moved: np.ndarray, networks: TransducerNetworks) -> None:
        """Begin new utterances in these rows; the other utterances' boosting states are renumbered by `moved` [n]."""
        n, beam_size = self.beams.beam.shape
        self.fusions = fusions
        self.beams.beam["boosting_state"] += moved[:, None]
        for part, fresh in zip(self.beams, new_beam_state(fusions, beam_size), strict=True):
            part[rows] = fresh[rows]
        self.predictions.restart(networks, rows, n)
        self.frames.first[rows] = 0


@compiled
def first_needed(beams, counters):
    """Return the first frame that a hypothesis of each utterance may still read, [n]."""
    frames = np.full(len(beams), MOST_FRAME, np.int64)
    for b in range(len(beams)):
        for k in range(counters[b].size):
            frames[b] = min(frames[b], beams[b, k].frame)
    return frames


class TransducerNBest(NamedTuple):
    """The N best hypotheses of each of R utterances."""

    order: np.ndarray  # [R, N] int32 slots in the beam, best first; -1: there are fewer
    scores: np.ndarray  # [R, N] float32
    state: TransducerStreams
    rows: np.ndarray  # [R] numbers of the utterances in `state`
    committed: list[CommittedTokens]  # [R] the tokens before the nodes of `state`


class TransducerEngine(Engine):
    """An engine that searches a transducer, see `engine.Engine`; errors are never deferred.

    Args:
        algorithm: the search of all streams.
        fusion: LM, boosting trees and weights of each utterance.
    """

    def __init__(self, algorithm: Algorithm, fusion: BatchFusion) -> None:
        self._algorithm, self._fusion = algorithm, fusion
        networks, beam_size = algorithm.networks, algorithm.params.beam_size
        n, beams = len(fusion), new_beam_state(fusion.arrays, beam_size)
        with torch.inference_mode(), networks.evaluation():
            predictions = Predictions.start(networks, n, beams.cache_hashes.shape[1])
        nodes, frames = new_nodes(n, 16 * beam_size), UnreadFrames(torch.empty(n, 0, 0), np.zeros(n, np.int64))
        self._state = TransducerStreams(beams, nodes, predictions, frames, fusion.arrays)
        self._committed = [CommittedTokens() for _ in range(n)]
        self._most_nodes = FIRST_COMMIT  # of a tree; a larger tree triggers a commit
        self._lost = False

    @abstractmethod
    def _advance(self, state: TransducerStreams, *, ended: bool) -> None:
        """Search until every utterance needs frames that have not arrived, or has `ended`.

        The search stops if the joint's output is invalid: the beam of that utterance has a size <= 0.
        """

    def push(self, inputs: Tensor, lengths: np.ndarray | Tensor, *, deferred: bool = False) -> None:
        """Read a chunk, see `engine.Engine.push`.

        Hypotheses that are ahead in time wait for the other hypotheses. So the order of steps and the result do not
        depend on the chunks.
        """
        assert isinstance(lengths, np.ndarray)
        self._check_alive()
        new = valid_frames(inputs, lengths)
        if len(new) == 0:
            return
        self._commit_long_trees()
        networks = self._algorithm.networks
        with torch.inference_mode(), networks.evaluation():
            projected = networks.project_encoder(new)
            self._state.add_frames(projected, lengths)
            self._lost = True  # reset below, unless the networks fail
            self._run(self._state, ended=deferred)
            self._lost = False
            if not deferred:
                self._state.add_frames(projected[:0], np.zeros_like(lengths))  # frees memory

    def _commit_long_trees(self) -> None:
        if self._state.beams.counters["node_count"].max() > self._most_nodes:
            self.commit(range(len(self._committed)))
            self._most_nodes = 2 * int(self._state.beams.counters["node_count"].max()) + FIRST_COMMIT

    def results(self, rows: Sequence[int], n_best: int, *, final: bool) -> TransducerNBest:
        self._check_alive()
        state, numbers = self._state, np.array(rows, np.int64)
        if final and (state.needed < state.beams.ends)[numbers].any():  # frames of utterances that waited for more
            state = state.selected(numbers)
            with torch.inference_mode(), self._algorithm.networks.evaluation():
                self._run(state, ended=True)
            numbers = np.arange(len(numbers))
        order = np.full((len(numbers), n_best), -1, np.int32)
        scores = np.zeros((len(numbers), n_best), np.float32)
        rank(numbers, state.beams, state.fusions, final, self._algorithm.config.score_norm, order, scores)
        return TransducerNBest(order, scores, state, numbers, [self._committed[row] for row in rows])

    def commit(self, rows: Sequence[int]) -> None:
        """Make the common ancestor of live hypotheses the root of their tree."""
        beams, params = self._state.beams, self._algorithm.params
        for b in rows:
            beam, nodes = beams.beam[b, : beams.counters["size"][b]], self._state.nodes[b]
            ancestor = common_ancestor(nodes["parent"], beam["node"])
            steps, committed = trace_back(nodes, ancestor), self._committed[b]
            if worth_committing(len(steps)):
                new = path_fields(steps, params)
                committed.extend(new)
                add_scores(new["tokens"], params.vocab_size, self._state.fusions, b, committed.scores, False)
                counters = beams.counters[b : b + 1]
                counters["node_count"] = drop_nodes(nodes[: counters["node_count"][0]], ancestor, beam)

    def restart(self, rows: Sequence[int], fusion: BatchFusion) -> None:
        networks = self._algorithm.networks
        with torch.inference_mode(), networks.evaluation():
            for row in rows:
                self._committed[row] = CommittedTokens()
            self._state.restart(list(rows), fusion.arrays, self._fusion.moved_states(fusion), networks)
        self._fusion = fusion

    def _run(self, state: TransducerStreams, *, ended: bool) -> None:
        self._advance(state, ended=ended)
        self._check_beams(state)

    def _check_beams(self, state: TransducerStreams) -> None:
        sizes = state.beams.counters["size"]
        failed = (sizes <= 0).nonzero()[0]
        if len(failed):
            b = int(failed[0])
            what = "NaN or +inf" if sizes[b] < 0 else "-inf for every label"
            raise StreamsLost(
                f"networks give {what} for utterance {b}, expected logits of which at least one is "
                "finite and none is NaN or +inf; the streams are closed"
            )

    def _check_alive(self) -> None:
        if self._lost:
            raise StreamsLost("streams is closed, expected streams whose networks have not failed")


def concatenated(encoder_output: Tensor, lengths: np.ndarray) -> Tensor:
    """Return the valid frames of all utterances, [sum of lengths, D]."""
    counts = lengths.tolist()
    if all(count == encoder_output.shape[1] for count in counts):
        return encoder_output.flatten(0, 1)
    return torch.cat([encoder_output[b, :count] for b, count in enumerate(counts)])


def valid_frames(encoder_output: Tensor, lengths: np.ndarray) -> Tensor:
    """Return the valid frames of all utterances, concatenated, [sum of lengths, D].

    Raises:
        ValueError: a valid frame holds NaN or infinity.
    """
    frames = concatenated(encoder_output, lengths)
    # one pass instead of several: in double, a sum of finite float32 numbers is finite
    if not math.isfinite(float(frames.sum(dtype=torch.float64))) and not torch.isfinite(frames).all():
        row, column = torch.nonzero(~torch.isfinite(frames))[0].tolist()
        b = int(np.searchsorted(np.cumsum(lengths), row, side="right"))
        frame = row - int(lengths[:b].sum())
        raise BadRow(
            b,
            f"encoder_output[{b}, {frame}, {column}] is {float(frames[row, column])}, expected a finite "
            "number in every valid frame",
        )
    return frames


# ----------------------------------------------------------------------------- inputs of the joint


@dataclass
class Predictions:
    """The prediction cache of n utterances with P entries each; entry b * P + p belongs to utterance b."""

    outputs: Tensor  # [n * P, H] projected predictions
    state: State  # parts of [n * P, ...]

    @classmethod
    def start(cls, networks: TransducerNetworks, n: int, entries: int) -> Predictions:
        """Return a cache in which entry 0 of every utterance holds the empty text."""
        output, state = networks.start()

        def spread(row: Tensor) -> Tensor:
            table = row.new_empty((n * entries, *row.shape[1:]))
            table[::entries] = row
            return table

        return cls(spread(output), tuple(spread(part) for part in state))

    def restart(self, networks: TransducerNetworks, rows: list[int], n: int) -> None:
        """Reset entry 0 of the utterances `rows`, of n, to the empty text."""
        output, state = networks.start()
        first = torch.tensor(rows, dtype=torch.long, device=self.outputs.device) * (len(self.outputs) // n)
        for part, row in zip(self.parts, (output, *state), strict=True):
            part[first] = row.to(part.dtype)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Return the outputs, then the parts of the state."""
        return (self.outputs, *self.state)

    def selected(self, rows: np.ndarray, n: int) -> Predictions:
        """Copy the entries of the utterances `rows`, out of n."""
        numbers = torch.from_numpy(rows).to(self.outputs.device)

        def chosen(part: Tensor) -> Tensor:
            return part.unflatten(0, (n, -1)).index_select(0, numbers).flatten(0, 1)

        with torch.inference_mode():
            return Predictions(chosen(self.outputs), tuple(chosen(part) for part in self.state))

    def extend(self, networks: TransducerNetworks, pending: PendingPredictions, rows: np.ndarray) -> None:
        """Run the prediction network for the pending texts of utterances `rows`."""
        flat = np.empty((3, pending.labels.size), np.int64)
        count = flattened(pending, rows, len(self.outputs) // len(pending.counts), flat)
        if count == 0:
            return
        label, source, target = (torch.from_numpy(values[:count]).to(self.outputs.device) for values in flat)
        before = tuple(part.index_select(0, source) for part in self.state)
        output, after = networks.predict(label, before)
        for part, values in zip(self.parts, (output, *after), strict=True):
            part.index_copy_(0, target, values.to(part.dtype))


@compiled
def flattened(pending, rows, entries, flat):
    """Fill flat [3, n * K] with labels, sources and targets of all `rows`; return their number.

    The cache entries of utterance b begin at b * `entries`.
    """
    count = 0
    for b in rows:
        for i in range(pending.counts[b]):
            flat[0, count] = pending.labels[b, i]
            flat[1, count] = b * entries + pending.sources[b, i]
            flat[2, count] = b * entries + pending.targets[b, i]
            count += 1
    return count


@dataclass
class UnreadFrames:
    """The projected encoder frames that are still needed. Column c of utterance b is frame first[b] + c."""

    values: Tensor  # [n, C, H]
    first: np.ndarray  # [n] int64

    def extended(self, projected: Tensor, lengths: np.ndarray, ends: np.ndarray, needed: np.ndarray) -> UnreadFrames:
        """Return these frames from `needed` on, followed by new frames.

        Args:
            projected: [sum of lengths, H], the new frames of all utterances, concatenated.
            lengths: [n] number of new frames.
            ends: [n] number of frames before the new ones.
            needed: [n] first frame that is still needed.
        """
        kept = np.maximum(ends - needed, 0)
        first = ends - kept
        if len(kept) == 1 and not kept[0] and len(projected):
            return UnreadFrames(projected[None], first)
        columns = int((kept + lengths).max(initial=0))
        values = projected.new_zeros(len(lengths), columns, projected.shape[1])
        for b in np.flatnonzero(kept):
            begin, count = int(first[b] - self.first[b]), int(kept[b])
            values[b, :count] = self.values[b, begin : begin + count]
        for row, begin, chunk in zip(values, kept, projected.split(lengths.tolist()), strict=True):
            row[begin : begin + len(chunk)] = chunk
        return UnreadFrames(values, first)
