"""The clock and the bandwidth of the benchmarks, on a GPU."""

import torch

from benchmarks.clock import find_hardware


def test_the_clock_measures_the_time_of_a_kernel(gpu):
    hardware = find_hardware("cuda", 1)
    assert hardware.name == torch.cuda.get_device_name(gpu)
    assert 1e10 < hardware.copy_bandwidth() < 1e14  # bytes per second
    seconds = hardware.clock.measure(lambda: torch.cuda._sleep(10_000_000), 1)  # cycles
    assert 1e-3 < seconds.device <= seconds.wall < 1
