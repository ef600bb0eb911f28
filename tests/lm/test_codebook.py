"""Codebooks: no cost is off by more than they say, flags are exact."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_gpu_decoding.lm.codebook import Codebook


def decoded(codebook, costs):
    return codebook.values[codebook.encode(costs)]


@pytest.mark.parametrize("bits", [4, 8, 10, 16])
@pytest.mark.parametrize("seed", range(3))
def test_no_cost_is_off_by_more_than_max_error_nor_half_a_bin(bits, seed):
    draw = np.random.default_rng(seed)
    costs = draw.gamma(2.0, 3.0, 5000).astype(np.float32)
    codebook = Codebook.of(costs, bits)
    errors = np.abs(decoded(codebook, costs).astype(np.float64) - costs)
    assert len(codebook.values) == 1 << bits
    assert errors.max() == pytest.approx(codebook.max_error, rel=1e-4)
    half_a_bin = (float(costs.max()) - float(costs.min())) / (1 << bits) / 2
    assert codebook.max_error <= half_a_bin + 1e-6  # float32
    assert codebook.max_error > half_a_bin / 2 or bits == 16  # of 2^16 bins most hold one cost


def test_flags_are_exact_and_do_not_stretch_the_bins():
    usual = np.linspace(0, 10, 1000, dtype=np.float32)
    flags = np.array([99 * np.log(10), np.inf], np.float32)
    codebook = Codebook.of(np.concatenate([usual, flags]), 8)
    assert decoded(codebook, flags).tolist() == flags.tolist()
    assert codebook.max_error < 10 / 254 / 2 + 1e-6


def test_many_distinct_large_costs_are_costs_like_any_other():
    costs = np.linspace(0, 1000, 500, dtype=np.float32)
    codebook = Codebook.of(np.append(costs, np.float32(np.inf)), 8)
    assert np.abs(decoded(codebook, costs) - costs).max() <= codebook.max_error <= 1000 / 255 / 2 + 1e-3
    assert decoded(codebook, np.array([np.inf], np.float32)).tolist() == [np.inf]


@pytest.mark.parametrize("costs", [[], [2.5], [2.5, 2.5], [np.inf]])
def test_few_costs_are_exact(costs):
    costs = np.array(costs, np.float32)
    codebook = Codebook.of(costs, 4)
    assert decoded(codebook, costs).tolist() == costs.tolist()
    assert codebook.max_error == 0
    assert len(codebook.values) == 16


@pytest.mark.parametrize("bits", [3, 17])
def test_bits_out_of_range(bits):
    with pytest.raises(ValueError, match=f"cost_bits is {bits}, expected 4 .. 16"):
        Codebook.of(np.zeros(1, np.float32), bits)
