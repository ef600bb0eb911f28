"""What look-ups in a paged LM cost: how many were answered by the cache, and what crossed the bus."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nemo_gpu_decoding.cuda.launch import Tensor

SECTOR_BYTES = 32  # what a read over the bus fetches at least

# The parameter of a kernel that adds up `LookupCounters` of paged.cuh, per utterance.
COUNTERS = Tensor(torch.int64, ("B", 3))


@dataclass(frozen=True)
class LookupStatistics:
    """Arcs that were asked for; all 0 for an LM that lies on the device as a whole.

    Results never depend on the cache, but these numbers do: on its size, on what was decoded before,
    and on the order in which threads came.
    """

    hits: int = 0  # that were in the cache
    misses: int = 0  # that were read over the bus
    bus_bytes: int = 0  # that these reads fetched

    @property
    def hit_rate(self) -> float:
        """Share of the hits, 0 .. 1; NaN if nothing was asked for."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else float("nan")

    def __add__(self, other: LookupStatistics) -> LookupStatistics:
        return LookupStatistics(
            self.hits + other.hits, self.misses + other.misses, self.bus_bytes + other.bus_bytes
        )


def new_counters(batch: int, device: torch.device) -> torch.Tensor:
    """Zeros for `COUNTERS`. [batch, 3] int64"""
    return torch.zeros((batch, 3), dtype=torch.int64, device=device)


def statistics_of(counters: torch.Tensor) -> LookupStatistics:
    """Of one utterance [3] or of several [B, 3]; waits for the device."""
    hits, misses, sectors = counters.reshape(-1, 3).sum(0).tolist()
    return LookupStatistics(hits, misses, sectors * SECTOR_BYTES)
