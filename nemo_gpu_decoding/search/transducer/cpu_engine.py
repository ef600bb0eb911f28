"""`CPUEngine`: repeats joint, step and prediction network until all frames are read.

The utterances of a batch run in lockstep, so that each network runs once per step for all of them. The results of an
utterance do not depend on the others.
"""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.search.threads import for_each_share
from nemo_gpu_decoding.search.transducer.beam import StepData, grown_nodes, new_pending
from nemo_gpu_decoding.search.transducer.engine import StreamState, TransducerEngine
from nemo_gpu_decoding.search.transducer.schedule import JointRows

# With fewer log-probs per step, threads cost more time than they save.
WORK_PER_THREAD = 200_000


class CPUEngine(TransducerEngine):
    """The search on the CPU; the networks run on their own device."""

    def _advance(self, state: StreamState, *, ended: bool) -> None:
        algorithm, beams = self._algorithm, state.beams
        n, beam_size = beams.beam.shape
        pending = new_pending(n, beam_size)
        joint = JointRows(algorithm.networks, algorithm.config.softmax_temperature, state)
        rows = np.arange(n)

        def step(share: np.ndarray) -> None:
            data = StepData(joint.log_probs, joint.row_of, beams, state.nodes, pending)
            algorithm.step(share, data, algorithm.params, algorithm.durations, state.fusions)

        while count := joint.read(rows, ended):
            costs = np.zeros(n)
            costs[rows] = (joint.row_of[rows] >= 0).sum(axis=1)
            rows = np.flatnonzero(costs)  # an utterance that waits once must wait for new frames
            state.nodes = grown_nodes(state.nodes, int(beams.counters["node_count"].max()) + beam_size)
            if count * joint.log_probs.shape[1] < WORK_PER_THREAD:
                step(rows)
            else:
                for_each_share(step, costs, algorithm.config.threads)
            if (beams.counters["size"][rows] <= 0).any():
                return
            state.predictions.extend(algorithm.networks, pending, rows)
