"""`CPUEngine` repeats joint, step and prediction network until all frames are read.

The utterances of a batch take steps together, so that each network runs once per step for all utterances. The results
of an utterance do not depend on the other utterances. Networks that can be compiled (`cpu_networks.py`) run inside
compiled code, for groups of utterances whose rows fit in a CPU's cache. torch runs all other networks.

`schedule` lists the pairs of frame and text that the joint evaluates in a step. In TDT the same text may reach the
same frame twice, in different numbers of steps: "4" with a blank of two frames, and "4" with two blanks of one frame.
The joint's output is then the same. 10-40 % of all rows are such repeats, and 99 % of the repeats equal a row of the
previous step. So a step's rows are kept for the next step. RNN-T searches repeat no rows in a run.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from nemo_gpu_decoding.jit import compiled, inlined, linked
from nemo_gpu_decoding.search.engine import for_each_share
from nemo_gpu_decoding.search.numerics import grown
from nemo_gpu_decoding.search.transducer import beam, cpu_networks
from nemo_gpu_decoding.search.transducer.cpu_networks import copy
from nemo_gpu_decoding.search.transducer.engine import TransducerEngine, TransducerStreams, flattened
from nemo_gpu_decoding.search.transducer.networks import TransducerNetworks

# Most rows of a step. With fewer, reading the weights takes longer than the products: few texts are new in a step.
ROWS_AT_ONCE = 512
# With fewer log-probs per step, threads cost more time than they save.
WORK_PER_THREAD = 200_000


class CPUEngine(TransducerEngine):
    """An engine that searches on the CPU; the networks run on their own device."""

    def _advance(self, state: TransducerStreams, *, ended: bool) -> None:
        networks = self._algorithm.compiled.current()
        parts = (state.frames.values, *state.predictions.parts)
        if networks is None or any(part.dtype != torch.float32 for part in parts):
            self._advance_in_torch(state, ended)
        elif state.frames.values.shape[1]:
            self._advance_compiled(state, ended, networks)

    def _advance_compiled(self, state: TransducerStreams, ended: bool, networks: cpu_networks.PackedNetworks) -> None:
        algorithm, beams = self._algorithm, state.beams
        frames = beams.ends - state.frames.first
        beam_size = beams.beam.shape[1]
        at_once = max(1, ROWS_AT_ONCE // beam_size)

        def search(share: np.ndarray) -> None:
            run = new_run(algorithm.networks, state, texts, shared, min(at_once, len(share)))
            for first in range(0, len(share), at_once):
                rows = share[first : first + at_once]
                options = ended, 1.0 / algorithm.config.softmax_temperature
                algorithm.run(rows, run, networks, options, algorithm.params, algorithm.durations, state.fusions)

        needed = int(beams.counters["node_count"].max()) + beam_size * (2 + int(frames.max()))
        texts = cpu_networks.text_cache(state.predictions.outputs, state.predictions.state)
        while True:
            state.nodes = grown(state.nodes, needed)
            shared = SharedRows.of(beams.beam.shape)
            for_each_share(search, frames.astype(float), algorithm.config.threads)
            needed = int(beams.counters["node_count"].max()) + beam_size
            if needed <= state.nodes.shape[1] or (beams.counters["size"] <= 0).any():
                return
            needed += beam_size * int(frames.max())

    def _advance_in_torch(self, state: TransducerStreams, ended: bool) -> None:
        algorithm, beams, turn = self._algorithm, state.beams, 0
        n, beam_size = beams.beam.shape
        run = new_run(algorithm.networks, state, None, SharedRows.of(beams.beam.shape), n)
        rows, (row_of, pending, *_) = np.arange(n), run.shared

        def step(share: np.ndarray) -> None:
            data = beam.StepData(run.log_probs[turn], row_of, beams, state.nodes, pending)
            algorithm.step(share, data, algorithm.params, algorithm.durations, state.fusions)

        while count := self._read_joint(rows, turn, run, state, ended):
            costs = np.zeros(n)
            costs[rows] = (row_of[rows] >= 0).sum(axis=1)
            rows = np.flatnonzero(costs)  # an utterance that waits once must wait for new frames
            state.nodes = grown(state.nodes, int(beams.counters["node_count"].max()) + beam_size)
            if count * run.log_probs.shape[2] < WORK_PER_THREAD:
                step(rows)
            else:
                for_each_share(step, costs, algorithm.config.threads)
            if (beams.counters["size"][rows] <= 0).any():
                return
            state.predictions.extend(algorithm.networks, pending, rows)
            turn = 1 - turn

    def _read_joint(self, rows: np.ndarray, turn: int, run: Run, state: TransducerStreams, ended: bool) -> int:
        """Fill `row_of` and log_probs[turn] for these utterances; return the number of hypotheses with a row."""
        networks, outputs, sources = self._algorithm.networks, state.predictions.outputs, run.sources
        new, repeated = schedule(rows, run.state, ended, run.shared, run.first_frames, run.strides, sources)
        if new:
            frame, text = (torch.from_numpy(values[:new]).to(outputs.device) for values in sources[:2])
            frames = state.frames.values.flatten(0, 1).index_select(0, frame)
            logits = networks.join(frames, outputs.index_select(0, text)).double()  # rounded once: all backends agree
            if (temperature := self._algorithm.config.softmax_temperature) != 1.0:
                logits = logits * (1.0 / temperature)
            log_probs, labels = torch.from_numpy(run.log_probs[turn, :new]), networks.vocab_size + 1
            for part in (slice(labels), slice(labels, logits.shape[1]))[: 1 + bool(networks.durations)]:
                log_probs[:, part] = torch.log_softmax(logits[:, part], dim=-1)
        if repeated:
            old_rows, out = sources.old_rows[-repeated:], run.log_probs[turn, -repeated:]
            np.take(run.log_probs[1 - turn], old_rows, axis=0, out=out)
        return new + repeated


class SharedRows(NamedTuple):
    """The row numbers of n utterances; only the thread of an utterance reads and changes its row numbers."""

    row_of: np.ndarray  # [n, K] int32, row of a hypothesis in the log-probs, or -1
    pending: beam.PendingPredictions
    # What each hypothesis read in the last step. An entry of the prediction cache identifies a text, because a step
    # does not reassign the entries that it reads
    rows: np.ndarray  # [n, K] int32, row of log-probs, or -1
    entries: np.ndarray  # [n, K] int32
    frames: np.ndarray  # [n, K] int32

    @classmethod
    def of(cls, shape: tuple[int, int]) -> SharedRows:
        pending = beam.PendingPredictions(np.zeros(shape[0], np.int32), *np.empty((3, *shape), np.int64))
        return cls(np.empty(shape, np.int32), pending, *np.full((3, *shape), -1, np.int32))


class RowSources(NamedTuple):
    """The sources of the R rows of a step: new rows are listed from the front, old rows from the end."""

    frames: np.ndarray  # [R] int64, row of the flattened frames
    texts: np.ndarray  # [R] int64, entry in the flattened prediction cache
    old_rows: np.ndarray  # [R] int64, row of the last step


class Run(NamedTuple):
    """The arrays for the compiled search of a group of utterances, with R rows per step."""

    state: beam.TransducerBeams
    nodes: np.ndarray  # [n, N] NODE
    first_frames: np.ndarray  # [n] int64
    strides: tuple[int, int]  # frames and cache entries per utterance
    shared: SharedRows
    sources: RowSources
    log_probs: np.ndarray  # [2, R, V + 1 (+ D)], of this step and of the last one in turn
    networks: cpu_networks.NetworkArrays | None  # None: torch runs them


def new_run(
    networks: TransducerNetworks,
    state: TransducerStreams,
    texts: cpu_networks.TextCache | None,
    shared: SharedRows,
    group: int,
) -> Run:
    """Return the arrays of a `Run` for groups of at most `group` utterances."""
    rows = group * state.beams.beam.shape[1]
    columns, frames = networks.vocab_size + 1 + len(networks.durations), state.frames.values
    return Run(
        state=state.beams,
        nodes=state.nodes,
        first_frames=state.frames.first,
        strides=(frames.shape[1], state.beams.cache_hashes.shape[1]),
        shared=shared,
        sources=RowSources(*np.empty((3, rows), np.int64)),
        log_probs=np.empty((2, rows, columns), np.float32),
        networks=texts and cpu_networks.network_arrays(frames.flatten(0, 1).numpy(), texts, columns, rows),
    )


@linked
def read_joint(rows, turn, run, networks, options, params):
    """Fill `row_of` and log_probs[turn] for these utterances, and move utterances that read a row to the front.

    Return how many utterances read a row: 0 if an utterance has failed, or if its tree has no space for a step's
    nodes. An utterance that waits once waits until new frames arrive.
    """
    for b in rows:
        counters = run.state.counters[b]
        if counters.size <= 0 or counters.node_count + params.beam_size > run.nodes.shape[1]:
            return 0
    ended, scale = options
    row_of = run.shared.row_of
    new, repeated = schedule(rows, run.state, ended, run.shared, run.first_frames, run.strides, run.sources)
    log_probs, before = run.log_probs[turn], run.log_probs[1 - turn]
    cpu_networks.join(run.sources, new, params.vocab_size + 1, scale, networks, run.networks, log_probs)
    for row in range(log_probs.shape[0] - repeated, log_probs.shape[0]):
        copy(before[run.sources.old_rows[row]], log_probs[row])
    count = 0
    for b in rows:
        for k in range(row_of.shape[1]):
            if row_of[b, k] >= 0:
                rows[count] = b
                count += 1
                break
    return count


@inlined
def take_steps(step, rows, run, networks, options, params, durations, fusions):
    """Repeat the compiled `step` and the networks until all utterances `rows` wait for frames; `rows` is changed."""
    turn, shared = 0, run.shared
    count = read_joint(rows, turn, run, networks, options, params)
    while count > 0:
        data = beam.StepData(run.log_probs[turn], shared.row_of, run.state, run.nodes, shared.pending)
        step(rows[:count], data, params, durations, fusions)
        texts = flattened(shared.pending, rows[:count], run.strides[1], run.networks.requests)
        if texts:
            cpu_networks.predict(texts, networks, run.networks)
        turn = 1 - turn
        count = read_joint(rows[:count], turn, run, networks, options, params)


@compiled
def schedule(rows, beams, ended, shared, first_frames, strides, sources):
    """Number the hypotheses of the utterances `rows` that the joint can read now.

    An utterance waits while one of its open hypotheses needs a frame that has not arrived, because the order of steps
    must not depend on the chunks. If the utterance has `ended`, such a hypothesis is finished.

    Return the number of rows to compute, and the number of kept rows.
    """
    new, repeated, last, row_of = 0, 0, sources.old_rows.shape[0] - 1, shared.row_of
    for b in rows:
        row_of[b] = -1
        hypotheses, end = beams.beam[b, : beams.counters[b].size], beams.ends[b]
        blocked = False
        for k in range(len(hypotheses)):
            if hypotheses[k].open and hypotheses[k].frame >= end and not ended:
                blocked = True
        for k in range(0 if blocked else len(hypotheses)):
            hypothesis = hypotheses[k]
            if not hypothesis.open or hypothesis.frame >= end:
                continue
            old = _kept_row(shared, b, hypothesis)
            if old >= 0:
                row_of[b, k] = last - repeated
                sources.old_rows[last - repeated] = old
                repeated += 1
            else:
                row_of[b, k] = new
                sources.frames[new] = b * strides[0] + hypothesis.frame - first_frames[b]
                sources.texts[new] = b * strides[1] + hypothesis.cache_entry
                new += 1
        for k in range(row_of.shape[1]):
            shared.rows[b, k] = row_of[b, k]
            shared.entries[b, k] = beams.beam[b, k].cache_entry
            shared.frames[b, k] = beams.beam[b, k].frame
    return new, repeated


@linked
def _kept_row(kept, b, hypothesis):
    """Return the row of the same text at the same frame in the last step, or -1."""
    old = -1
    for j in range(kept.rows.shape[1]):
        if (
            kept.rows[b, j] >= 0
            and kept.entries[b, j] == hypothesis.cache_entry
            and kept.frames[b, j] == hypothesis.frame
        ):
            old = kept.rows[b, j]
    return old
