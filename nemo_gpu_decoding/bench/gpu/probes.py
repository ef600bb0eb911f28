"""What a first use costs, in processes of their own: once with an empty cache, once with a full one.

python -m nemo_gpu_decoding.bench.gpu.probes cuda:0
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

from nemo_gpu_decoding.cuda.launch import runtime
from nemo_gpu_decoding.jit import CACHE_VARIABLE


def probe_first_use(device: str = "cuda") -> dict[str, Any]:
    """Seconds of a first use: the very first one on a machine, which compiles, and a later one.

    Raises:
        RuntimeError: a process failed; its last words are in the message.
    """
    with tempfile.TemporaryDirectory() as folder:
        first, later = (_child(device, {CACHE_VARIABLE: folder}) for _ in range(2))
    return {"first_ever": first, "later": later}


def _child(device: str, environment: dict[str, str]) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", __name__, device],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the probe of a first use failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_first_use(device: torch.device) -> dict[str, float]:
    """Seconds of each step, in a process that has not used the GPU yet.

    Returns:
        `context`: torch's and the driver's own start. `libraries`: finding cuda-python and NVRTC.
        `first_decode`: kernels are compiled, or read from the cache, loaded and run. `next_decode`.
    """
    from nemo_gpu_decoding.search.flexctc_beam.config import FlexCTCConfig
    from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam

    seconds: dict[str, float] = {}
    start = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal start
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds[name] = round(time.perf_counter() - start, 4)
        start = time.perf_counter()

    log_probs = torch.log_softmax(torch.randn(4, 50, 129).to(device), -1)
    lap("context")
    reason = runtime().why_not(runtime().device_for(device))
    if reason is not None:
        raise RuntimeError(f"no kernels on {device}: {reason}")
    lap("libraries")
    decoder = FlexCTCBeam(128, 128, FlexCTCConfig(backend="cuda"))
    for name in ("first_decode", "next_decode"):
        decoder.decode(log_probs, [50, 40, 30, 0])
        lap(name)
    return seconds


if __name__ == "__main__":
    print(json.dumps(measure_first_use(torch.device(sys.argv[1]))))
