"""The loop of all transducer searches: joint, step, prediction network, until no frame is left to read.

The utterances of a batch work in lockstep, so that each network runs once per step for all of them;
what a hypothesis is given depends on its own utterance alone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nemo_gpu_decoding.search.threads import for_each_share
from nemo_gpu_decoding.search.transducer.beam import (
    Batch,
    Joint,
    Wishes,
    grown_nodes,
    new_wishes,
    packed_wishes,
    readable,
)
from nemo_gpu_decoding.search.transducer.joint_rows import JointRows
from nemo_gpu_decoding.search.transducer.memory import Frames, Predictions
from nemo_gpu_decoding.search.transducer.networks import TransducerNetworks

# Below so many log-probs per step, handing out shares to threads costs more than it saves.
WORK_PER_THREAD = 200_000

# (rows, joint, nodes, wishes): one step of these utterances
Step = Callable[[np.ndarray, Joint, np.ndarray, Wishes], None]


class Loop:
    """Runs the steps of a batch. `step` is the algorithm, compiled: see `alsd_pp/cpu.py`.

    Args:
        networks: see `TransducerNetworks`.
        temperature: softmax_temperature.
        nodes_per_step: nodes that a step adds to an utterance's tree at most.
        threads: 0 = torch.get_num_threads().
    """

    def __init__(
        self, networks: TransducerNetworks, temperature: float, nodes_per_step: int, threads: int
    ) -> None:
        self.networks = networks
        self.temperature = temperature
        self.nodes_per_step = nodes_per_step
        self.threads = threads

    def run(
        self,
        batch: Batch,
        nodes: np.ndarray,
        predictions: Predictions,
        frames: Frames,
        step: Step,
        *,
        ended: bool,
    ) -> np.ndarray:
        """Work until every utterance needs frames that have not come, or has `ended`; returns `nodes`.

        Stops at once with a size <= 0 in `batch` where the joint's output was unusable.
        """
        n, beam_size = batch.beam.shape
        entries = batch.memo_hash.shape[1]
        wishes = new_wishes(n, beam_size)
        row_of = np.empty((n, beam_size), np.int32)
        utterances, slots, labels, sources, targets = (
            np.empty(n * beam_size, np.int64) for _ in range(5)
        )
        joints = JointRows(self.networks, self.temperature, predictions, frames, n, beam_size)
        rows = np.arange(n)
        while True:
            count = readable(batch, rows, ended, row_of, utterances, slots)
            if count == 0:
                return nodes
            rows = rows[row_of[rows].max(axis=1) >= 0]  # who waits once has to wait for more frames
            joint = joints.read(batch, count, row_of, utterances, slots)
            nodes = grown_nodes(nodes, int(batch.node_counts.max()) + self.nodes_per_step)
            self._share(step, rows, joint, nodes, wishes)
            if (batch.sizes[rows] <= 0).any():
                return nodes
            count = packed_wishes(wishes, rows, entries, labels, sources, targets)
            if count:
                predictions.extend(self.networks, labels[:count], sources[:count], targets[:count])

    def _share(
        self, step: Step, rows: np.ndarray, joint: Joint, nodes: np.ndarray, wishes: Wishes
    ) -> None:
        if joint.log_probs.size < WORK_PER_THREAD:
            step(rows, joint, nodes, wishes)
            return
        costs = np.zeros(len(wishes.counts))
        costs[rows] = (joint.row_of[rows] >= 0).sum(axis=1)
        for_each_share(lambda share: step(share, joint, nodes, wishes), costs, self.threads)
