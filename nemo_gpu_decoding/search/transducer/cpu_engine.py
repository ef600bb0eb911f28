"""`CPUEngine`: joint, step, prediction network, until no frame is left to read.

The utterances of a batch work in lockstep, so that each network runs once per step for all of them;
what a hypothesis is given depends on its own utterance alone.
"""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.search.threads import for_each_share
from nemo_gpu_decoding.search.transducer.beam import (
    Joint,
    Wishes,
    grown_nodes,
    new_wishes,
    packed_wishes,
    readable,
)
from nemo_gpu_decoding.search.transducer.engine import StreamState, TransducerEngine
from nemo_gpu_decoding.search.transducer.joint_rows import JointRows

# Below so many log-probs per step, handing out shares to threads costs more than it saves.
WORK_PER_THREAD = 200_000


class CPUEngine(TransducerEngine):
    """The search on the CPU; the networks run where they are."""

    def _advance(self, state: StreamState, *, ended: bool) -> None:
        batch = state.batch
        n, beam_size = batch.beam.shape
        entries = batch.memo_hash.shape[1]
        wishes = new_wishes(n, beam_size)
        row_of = np.empty((n, beam_size), np.int32)
        utterances, slots, labels, sources, targets = (
            np.empty(n * beam_size, np.int64) for _ in range(5)
        )
        networks, temperature = self._networks, self._config.softmax_temperature
        joints = JointRows(networks, temperature, state.predictions, state.frames, n, beam_size)
        rows = np.arange(n)
        while True:
            count = readable(batch, rows, ended, row_of, utterances, slots)
            if count == 0:
                return
            rows = rows[row_of[rows].max(axis=1) >= 0]  # who waits once has to wait for more frames
            joint = joints.read(batch, count, row_of, utterances, slots)
            state.nodes = grown_nodes(state.nodes, int(batch.node_counts.max()) + beam_size)
            self._step(rows, joint, state, wishes)
            if (batch.sizes[rows] <= 0).any():
                return
            count = packed_wishes(wishes, rows, entries, labels, sources, targets)
            if count:
                state.predictions.extend(networks, labels[:count], sources[:count], targets[:count])

    def _step(self, rows: np.ndarray, joint: Joint, state: StreamState, wishes: Wishes) -> None:
        """One step of these utterances; threads share them."""
        own, fusion = self._strategy, self._fusion

        def step(share: np.ndarray) -> None:
            own.step(
                share, joint, state.batch, state.nodes, wishes, own.search, own.durations, own.limits,
                fusion.lm.arrays, fusion.arrays.boosting,
            )  # fmt: skip

        if joint.log_probs.size < WORK_PER_THREAD:
            step(rows)
            return
        costs = np.zeros(len(wishes.counts))
        costs[rows] = (joint.row_of[rows] >= 0).sum(axis=1)
        for_each_share(step, costs, self._config.threads)
