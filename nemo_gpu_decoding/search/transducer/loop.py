"""The loop of all transducer searches: joint, step, prediction network, until no frame is left to read.

The utterances of a batch work in lockstep, so that each network runs once per step for all of them;
what a hypothesis is given depends on its own utterance alone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from nemo_gpu_decoding.search.threads import for_each_share
from nemo_gpu_decoding.search.transducer.beam import (
    Batch,
    Joint,
    Wishes,
    grown_nodes,
    joint_inputs,
    new_wishes,
    packed_wishes,
    readable,
)
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
        utterances, hypotheses = np.empty(n * beam_size, np.int64), np.empty(n * beam_size, np.int64)
        places, texts = np.empty(n * beam_size, np.int64), np.empty(n * beam_size, np.int64)
        labels, sources, targets = (np.empty(n * beam_size, np.int64) for _ in range(3))
        columns = frames.values.shape[1]
        flat_frames = frames.values.flatten(0, 1)
        rows = np.arange(n)
        while True:
            count = readable(batch, rows, ended, row_of, utterances, hypotheses)
            if count == 0:
                return nodes
            rows = rows[row_of[rows].max(axis=1) >= 0]  # who waits once has to wait for more frames
            joint_inputs(batch, count, utterances, hypotheses, frames.first, columns, places, texts)
            log_probs = self._log_probs(flat_frames, predictions, places[:count], texts[:count])
            nodes = grown_nodes(nodes, int(batch.node_counts.max()) + self.nodes_per_step)
            self._share(step, rows, Joint(log_probs, row_of), nodes, wishes)
            if (batch.sizes[rows] <= 0).any():
                return nodes
            count = packed_wishes(wishes, rows, entries, labels, sources, targets)
            if count:
                predictions.extend(self.networks, labels[:count], sources[:count], targets[:count])

    def _log_probs(
        self, flat_frames: Tensor, predictions: Predictions, places: np.ndarray, texts: np.ndarray
    ) -> np.ndarray:
        """The joint's log-probs [rows, V + 1 (+ D)] float32; labels and durations normalised apart."""
        device = flat_frames.device
        place, text = (torch.from_numpy(values).to(device) for values in (places, texts))
        logits = self.networks.join(
            flat_frames.index_select(0, place), predictions.outputs.index_select(0, text)
        )
        return log_probs_of(logits, self.networks.vocab_size + 1, self.temperature).cpu().numpy()

    def _share(
        self, step: Step, rows: np.ndarray, joint: Joint, nodes: np.ndarray, wishes: Wishes
    ) -> None:
        if joint.log_probs.size < WORK_PER_THREAD:
            step(rows, joint, nodes, wishes)
            return
        costs = np.zeros(len(wishes.counts))
        costs[rows] = (joint.row_of[rows] >= 0).sum(axis=1)
        for_each_share(lambda share: step(share, joint, nodes, wishes), costs, self.threads)


def log_probs_of(logits: Tensor, num_labels: int, temperature: float) -> Tensor:
    """[N, labels + durations] to log-probs, float32; labels and durations are normalised apart."""
    log_probs = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    for begin, end in ((0, num_labels), (num_labels, logits.shape[1])):
        if begin < end:
            # in double and rounded once: the order of a sum no longer shows, and backends agree
            part = logits[:, begin:end].double()
            if temperature != 1.0:
                part = part * (1.0 / temperature)
            log_probs[:, begin:end] = torch.log_softmax(part, dim=-1)
    return log_probs
