from __future__ import annotations

import pytest
import torch

from nemo_gpu_decoding.bench.gpu.place import (
    HostClock,
    Place,
    Samples,
    Seconds,
    find_place,
    time_in_turn,
)
from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.run import run
from nemo_gpu_decoding.cuda.availability import why_unavailable

NO_GPU = why_unavailable(torch.device("cuda"))


class ScriptedClock:
    """Every call takes what the script says."""

    def __init__(self, *wall):
        self._wall = list(wall)

    def measure(self, call):
        call()
        wall = self._wall.pop(0)
        return Seconds(wall, wall / 2)


def test_calls_take_turns():
    order = []
    calls = [lambda: order.append("peer"), lambda: order.append("ours")]
    theirs, ours = time_in_turn(calls, ScriptedClock(8, 1, 6, 3, 4, 2), 3, most_seconds=60)
    assert order == ["peer", "ours"] * 3
    assert (theirs.median("wall"), ours.median("wall")) == (6, 2)
    assert (theirs.median("device"), ours.median("device")) == (3, 1)
    assert ours.as_row()["wall"] == {"median": 2, "min": 1, "max": 3}


def test_a_pair_that_takes_too_long_is_timed_once():
    (samples,) = time_in_turn([lambda: None], HostClock(), 100, most_seconds=0)
    assert len(samples.all) == 1


def test_the_median_of_an_even_number():
    assert Samples([Seconds(1, 0), Seconds(2, 0)]).median("wall") == 1.5


def test_bandwidth_counts_what_is_read_and_written():
    place = Place(torch.device("cpu"), "host", ScriptedClock(*[2.0] * 20), copy_buffer_bytes=1000)
    assert place.copy_bandwidth() == 2000


@pytest.mark.skipif(NO_GPU is None, reason="there is a GPU here")
def test_without_a_gpu_the_reason_is_given():
    with pytest.raises(ValueError, match="device is 'cuda', expected cpu or a GPU that runs kernels: "):
        find_place("cuda")
    with pytest.raises(ValueError, match="device is 'cuda:3', expected cpu or a GPU"):
        run(BenchOptions(device="cuda:3"))


@pytest.mark.gpu
@pytest.mark.skipif(NO_GPU is not None, reason=NO_GPU or "")
def test_a_gpu_is_measured():
    place = find_place("cuda")
    assert place.name == torch.cuda.get_device_name(place.device)
    assert 1e10 < place.copy_bandwidth() < 1e14
    seconds = place.clock.measure(lambda: torch.cuda._sleep(10_000_000))
    assert 1e-3 < seconds.device <= seconds.wall < 1
