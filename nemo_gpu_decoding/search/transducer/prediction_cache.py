"""Inputs of the joint during a search: cached predictions per text, and frames that are not read yet."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.search.transducer.beam import PendingPredictions
from nemo_gpu_decoding.search.transducer.networks import State, TransducerNetworks


@dataclass
class Predictions:
    """The prediction cache of n utterances, P entries each; entry b * P + p belongs to b."""

    outputs: Tensor  # [n * P, H] projected predictions
    state: State  # parts of [n * P, ...]

    @classmethod
    def start(cls, networks: TransducerNetworks, n: int, entries: int) -> Predictions:
        """A cache in which entry 0 of every utterance holds the empty text."""
        output, state = networks.start()

        def spread(row: Tensor) -> Tensor:
            table = row.new_empty((n, entries, *row.shape[1:]))
            table[:, 0] = row
            return table.flatten(0, 1)

        return cls(spread(output), tuple(spread(part) for part in state))

    def restart(self, networks: TransducerNetworks, rows: list[int], n: int) -> None:
        """Reset entry 0 of the utterances `rows`, of n, to the empty text."""
        output, state = networks.start()
        first = torch.tensor(rows, device=self.outputs.device) * (len(self.outputs) // n)
        for part, row in zip(self.parts, (output, *state), strict=True):
            part[first] = row.to(part.dtype)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Outputs, then the parts of the state."""
        return (self.outputs, *self.state)

    def selected(self, rows: np.ndarray, n: int) -> Predictions:
        """A copy of the entries of some of the n utterances."""
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
    """Fill flat [3, n * K] with labels, sources and targets of all `rows`; returns their number.

    Utterance b has the entries b * `entries` .. of the cache.
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
class Frames:
    """Projected encoder frames that are still needed. Column c of utterance b is frame first[b] + c."""

    values: Tensor  # [n, C, H]
    first: np.ndarray  # [n] int64

    @classmethod
    def none(cls, n: int) -> Frames:
        return cls(torch.empty(n, 0, 0), np.zeros(n, np.int64))

    def extended(self, projected: Tensor, lengths: np.ndarray, ends: np.ndarray, needed: np.ndarray) -> Frames:
        """These frames from `needed` on, and new ones after them.

        Args:
            projected: [sum of lengths, H], the new frames of all utterances, concatenated.
            lengths: [n] number of new frames.
            ends: [n] number of frames before them.
            needed: [n] first frame that is still needed.
        """
        kept = np.maximum(ends - needed, 0)
        first = ends - kept
        columns = int((kept + lengths).max(initial=0))
        values = projected.new_zeros(len(lengths), columns, projected.shape[1])
        for b in np.flatnonzero(kept):
            begin, count = int(first[b] - self.first[b]), int(kept[b])
            values[b, :count] = self.values[b, begin : begin + count]
        for row, begin, chunk in zip(values, kept, projected.split(lengths.tolist()), strict=True):
            row[begin : begin + len(chunk)] = chunk
        return Frames(values, first)
