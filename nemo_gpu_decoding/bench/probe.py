"""What can only be measured in a process of its own: peak memory, and the cost of starting.

python -m nemo_gpu_decoding.bench.probe memory < options.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.jit import CACHE_VARIABLE

MEMORY_BEAMS = (4, 16, 64, 256)
# For glibc: large arrays get pages of their own, else what loading the LM has freed would be used again
# and no growth be seen.
GIVE_BACK_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def probe_process(kind: str, options: BenchOptions) -> dict[str, Any]:
    """Run a probe ("memory" or "start") in fresh processes; a dict for the header of a result."""
    if kind == "memory":
        return _child("memory", options, GIVE_BACK_FREED_MEMORY)
    with tempfile.TemporaryDirectory() as folder:
        environment = {CACHE_VARIABLE: folder}
        first, later = (_child("start", options, environment) for _ in range(2))
    return {"first_ever": first, "later": later}


def _child(kind: str, options: BenchOptions, environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", __name__, kind],
        input=json.dumps(asdict(options)),
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"probe {kind} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_memory(options: BenchOptions) -> dict[str, Any]:
    """Growth of the process while a batch is decoded, for several beam sizes, LM included.

    Returns:
        `peak_bytes`: beam size -> peak above the level before the first call;
        `bytes_per_frame_and_slot`: growth from the second largest to the largest beam, divided by
        B * T * (difference of K). A search that stored K * V numbers per frame would show 4 * V here.
    """
    from nemo_gpu_decoding.bench.peers.base import Setting
    from nemo_gpu_decoding.bench.sources import make_task
    from nemo_gpu_decoding.bench.strategies import STRATEGIES

    if not CLEAR_REFS.exists():
        return {"skipped": "peak memory is read from Linux's /proc"}
    task = make_task(options)
    decoders = {}
    for beam in MEMORY_BEAMS:
        decoders[beam] = STRATEGIES[options.strategy](options)
        decoders[beam].prepare(task, Setting(beam, lm=task.lm is not None, threads=options.threads))
    decoders[MEMORY_BEAMS[0]].decode(task.log_probs[:1, :20], task.lengths[:1].clamp(max=20))  # compiles
    before = status_bytes("VmRSS")
    peaks = {}
    for beam, decoder in decoders.items():  # from small to large, so that freed memory hides nothing
        CLEAR_REFS.write_text("5")  # resets VmHWM, the peak
        decoder.decode(task.log_probs, task.lengths)
        peaks[beam] = status_bytes("VmHWM") - before
    *_, smaller, largest = MEMORY_BEAMS
    slots = task.log_probs.shape[0] * task.log_probs.shape[1] * (largest - smaller)
    growth = (peaks[largest] - peaks[smaller]) / slots
    return {"peak_bytes": peaks, "bytes_per_frame_and_slot": round(growth, 2)}


def status_bytes(field: str, status: Path = STATUS) -> int:
    """A memory size of a process, as Linux tells it.

    Raises:
        OSError: there is no such process, or no /proc.
        RuntimeError: it has no such size, since it has ended.
    """
    for line in status.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{status} has no {field}")


def measure_start(options: BenchOptions) -> dict[str, float]:
    """Seconds until the first result: import, loading the LM, the first call (which may compile)."""
    start = time.perf_counter()
    from nemo_gpu_decoding.bench.peers.base import Setting
    from nemo_gpu_decoding.bench.sources import make_task
    from nemo_gpu_decoding.bench.strategies import STRATEGIES

    seconds = {"import": time.perf_counter() - start}
    task = make_task(replace(options, utterances=1))
    decoder = STRATEGIES[options.strategy](options)
    start = time.perf_counter()
    decoder.prepare(task, Setting(max(options.beams), lm=task.lm is not None, threads=options.threads))
    seconds["load_lm"] = time.perf_counter() - start
    start = time.perf_counter()
    decoder.decode(task.log_probs, task.lengths)
    seconds["first_decode"] = time.perf_counter() - start
    return {name: round(value, 3) for name, value in seconds.items()}


if __name__ == "__main__":
    probes = {"memory": measure_memory, "start": measure_start}
    print(json.dumps(probes[sys.argv[1]](BenchOptions(**json.load(sys.stdin)))))
