"""`CPUEngine`: joint, step, prediction network, until no frame is left to read.

The utterances of a batch work in lockstep, so that each network runs once per step for all of them;
what a hypothesis is given depends on its own utterance alone.
"""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.search.threads import for_each_share
from nemo_gpu_decoding.search.transducer.beam import StepData, grown_nodes, new_pending
from nemo_gpu_decoding.search.transducer.engine import StreamState, TransducerEngine
from nemo_gpu_decoding.search.transducer.schedule import JointRows, collect_pending, new_numbered, schedule

# Below so many log-probs per step, handing out shares to threads costs more than it saves.
WORK_PER_THREAD = 200_000


class CPUEngine(TransducerEngine):
    """The search on the CPU; the networks run where they are."""

    def _advance(self, state: StreamState, *, ended: bool) -> None:
        networks, config = self._algorithm.networks, self._algorithm.config
        beams, predictions = state.beams, state.predictions
        n, beam_size = beams.beam.shape
        entries = beams.cache_hashes.shape[1]
        pending, numbered = new_pending(n, beam_size), new_numbered(n, beam_size)
        labels, sources, targets = (np.empty(n * beam_size, np.int64) for _ in range(3))
        temperature = config.softmax_temperature
        joint = JointRows(networks, temperature, predictions, state.frames, (n, beam_size))
        rows, row_of = np.arange(n), numbered.row_of
        while True:
            count = schedule(rows, beams.beam, beams.sizes, beams.ends, ended, numbered)
            if count == 0:
                return
            rows = rows[row_of[rows].max(axis=1) >= 0]  # who waits once has to wait for more frames
            log_probs = joint.read(beams.beam, count, numbered)
            state.nodes = grown_nodes(state.nodes, int(beams.node_counts.max()) + beam_size)
            self._step(rows, StepData(log_probs, row_of, beams, state.nodes, pending), state)
            if (beams.sizes[rows] <= 0).any():
                return
            count = collect_pending(pending, rows, entries, labels, sources, targets)
            if count:
                predictions.extend(networks, labels[:count], sources[:count], targets[:count])

    def _step(self, rows: np.ndarray, data: StepData, state: StreamState) -> None:
        """One step of these utterances; threads share them."""
        algorithm = self._algorithm

        def step(share: np.ndarray) -> None:
            algorithm.step(share, data, algorithm.params, algorithm.durations, state.fusions)

        if data.log_probs.size < WORK_PER_THREAD:
            step(rows)
            return
        costs = np.zeros(len(data.row_of))
        costs[rows] = (data.row_of[rows] >= 0).sum(axis=1)
        for_each_share(step, costs, algorithm.config.threads)
