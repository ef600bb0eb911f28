"""Quantisation of costs: bins of equal width, each decoded to the middle of its costs.

With 2 bits and the costs [1.0, 1.2, 3.0, 8.8, 228.0]: 228 means "impossible" and has its own code. The
others share three bins of width 2.6, with the costs [1.0, 1.2, 3.0], [] and [8.8]. The codebook is
[2.0, 4.9, 8.8, 228.0]. The largest error is 1.0; it is at most half the width of a bin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nemo_gpu_decoding.checks import FieldError

MIN_BITS, MAX_BITS = 4, 16
_CHUNK = 1 << 22  # costs at a time
# SRILM writes log10 0 as -99. Costs in this region are flags, which must not widen the bins.
_NEVER_COST = 90 * np.log(10.0)
_MOST_FLAGS = 4


@dataclass(frozen=True)
class Codebook:
    """A table of costs; see the module docstring."""

    values: np.ndarray  # [2 ** bits] float32
    low: float  # lower end of the first bin
    width: float  # of a bin
    flags: np.ndarray  # float32, ascending: costs above the bins; they have the last codes
    max_error: float  # largest error of a cost, natural log

    @classmethod
    def of(cls, costs: np.ndarray, bits: int) -> Codebook:
        """The codebook for these costs, [A] float32, with 2 ** bits codes."""
        check_cost_bits(bits)
        flags = _flags(costs)
        limit = flags[0] if len(flags) else np.float32(np.inf)
        low = min((float(usual.min()) for usual in _below(limit, costs)), default=0.0)
        high = max((float(usual.max()) for usual in _below(limit, costs)), default=0.0)
        bins = (1 << bits) - len(flags)
        width = (high - low) / bins or 1.0
        least, most = np.full(bins, np.inf, np.float32), np.full(bins, -np.inf, np.float32)
        for usual in _below(limit, costs):
            codes = _bins_of(usual, low, width, bins)
            np.minimum.at(least, codes, usual)
            np.maximum.at(most, codes, usual)
        is_used = least <= most
        middles = low + width * (np.arange(bins) + 0.5)
        middles[is_used] = (least[is_used].astype(np.float64) + most[is_used]) / 2
        values = np.concatenate([middles, flags]).astype(np.float32)
        errors = np.maximum(most[is_used] - values[:bins][is_used], values[:bins][is_used] - least[is_used])
        return cls(values, low, width, flags, float(errors.max(initial=0.0)))

    def encode(self, costs: np.ndarray) -> np.ndarray:
        """The code of each cost. uint64"""
        bins = len(self.values) - len(self.flags)
        codes = _bins_of(costs, self.low, self.width, bins)
        if len(self.flags):
            is_flag = costs >= self.flags[0]
            codes[is_flag] = bins + np.searchsorted(self.flags, costs[is_flag])
        return codes.astype(np.uint64)


def check_cost_bits(bits: int) -> None:
    """Raise a FieldError if `bits` is out of range."""
    if not MIN_BITS <= bits <= MAX_BITS:
        raise FieldError("cost_bits", bits, f"{MIN_BITS} .. {MAX_BITS}")


def _flags(costs: np.ndarray) -> np.ndarray:
    """The distinct costs above `_NEVER_COST`, if they are few; else infinity alone, if it occurs."""
    found = np.zeros(0, np.float32)
    for begin in range(0, len(costs), _CHUNK):
        chunk = costs[begin : begin + _CHUNK]
        found = np.union1d(found, chunk[chunk >= _NEVER_COST])
    return found if len(found) <= _MOST_FLAGS else found[np.isinf(found)]


def _below(limit: np.float32, costs: np.ndarray) -> Iterator[np.ndarray]:
    """The costs below the limit, in chunks that are not empty."""
    for begin in range(0, len(costs), _CHUNK):
        chunk = costs[begin : begin + _CHUNK]
        if len(usual := chunk[chunk < limit]):
            yield usual


def _bins_of(costs: np.ndarray, low: float, width: float, bins: int) -> np.ndarray:
    """The bin of each cost, int64; the last one for costs above the bins."""
    return np.minimum((costs.astype(np.float64) - low) / width, bins - 1).astype(np.int64)
