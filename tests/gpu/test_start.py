"""What a first use costs on a machine, and the first use in a later process."""

from __future__ import annotations

from nemo_gpu_decoding.bench.gpu.probes import measure_first_use, probe_first_use

FIRST_EVER, LATER = 3.0, 0.05  # seconds that issue 3 allows


def test_kernels_compile_once_and_load_at_once(gpu):
    seconds = probe_first_use(str(gpu))
    print(seconds)
    assert seconds["first_ever"]["first_decode"] < FIRST_EVER, seconds
    assert seconds["later"]["first_decode"] < LATER, seconds


def test_every_step_is_measured(device):
    seconds = measure_first_use(device)
    assert list(seconds) == ["context", "libraries", "first_decode", "next_decode"]
    assert min(seconds.values()) >= 0
