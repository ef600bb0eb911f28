from __future__ import annotations

import pytest
import torch

from nemo_gpu_decoding.bench import measure
from nemo_gpu_decoding.bench.measure import ratio_clock, time_alternately, torch_threads


def test_both_are_timed_in_turns(monkeypatch):
    monkeypatch.setattr(measure, "LEAST_SECONDS", 0.0)
    calls = []
    theirs, ours = time_alternately(lambda: calls.append("theirs"), lambda: calls.append("ours"), 3)
    assert calls == ["theirs", "ours"] * 3
    assert len(theirs.cpu) == len(theirs.wall) == len(ours.cpu) == len(ours.wall) == 3


def test_slow_pairs_are_not_repeated():
    calls = []
    theirs, _ = time_alternately(lambda: calls.append("theirs"), lambda: None, 5, most_seconds=0.0)
    assert len(theirs.cpu) == 1


def test_quick_calls_are_repeated_until_they_can_be_measured(monkeypatch):
    monkeypatch.setattr(measure, "LEAST_SECONDS", 0.01)
    calls = []
    time_alternately(lambda: calls.append("theirs"), lambda: calls.append("ours"), 1)
    assert calls.count("ours") > 10


def test_seconds_are_those_of_one_call(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(measure.time, "process_time", lambda: float(next(clock)))
    assert measure._time_calls(lambda: next(clock), 4)[0] == pytest.approx((4 + 1) / 4)


def test_a_row_has_median_and_spread():
    timing = measure.Timing(cpu=[3.0, 1.0, 2.0], wall=[6.0, 4.0, 5.0])
    assert timing.as_row() == {
        "cpu": {"median": 2.0, "min": 1.0, "max": 3.0},
        "wall": {"median": 5.0, "min": 4.0, "max": 6.0},
    }


def test_ratios_come_from_cpu_time_on_one_thread_and_from_wall_time_on_more():
    assert (ratio_clock(1), ratio_clock(2)) == ("cpu", "wall")


def test_threads_of_torch_are_put_back():
    before = torch.get_num_threads()
    with torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
