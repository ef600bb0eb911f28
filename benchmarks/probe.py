"""Measurements that need a separate process: memory, and the time of starting."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.options import BenchOptions
from nemo_gpu_decoding.jit import CACHE_VARIABLE

MEMORY_BEAMS = (4, 16, 64, 256)
POLL_SECONDS = 0.05
# For glibc: large arrays get their own pages. Otherwise memory that was freed after loading the LM would be reused,
# and growth would not be visible.
GIVE_BACK_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def in_process(
    name: str, options: BenchOptions, environment: dict[str, str] | None = None, **arguments: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Call a function of this folder, "module:function", in a fresh process.

    Returns:
        Its dict, and the cost: {"seconds": {"cpu", "wall"}, with imports and compilation, "memory": {"peak_rss": with
        mapped files, "peak_anonymous": without pages that the system can drop or write out}, in bytes; None without
        /proc}.

    Raises:
        RuntimeError: the process failed; the message contains its stderr.
    """
    request = {"name": name, "options": asdict(options), "arguments": arguments}
    child = subprocess.Popen(
        [sys.executable, "-m", __name__, json.dumps(request)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=os.environ | (environment or {}),
    )  # fmt: skip
    peak, output = None, None
    while output is None:
        with suppress(OSError, RuntimeError):  # no /proc here, or the process has just ended
            peak = max(peak or 0, status_bytes("RssAnon", Path(f"/proc/{child.pid}/status")))
        with suppress(subprocess.TimeoutExpired):
            output, errors = child.communicate(timeout=POLL_SECONDS)
    if child.returncode:
        raise RuntimeError(f"{name} failed in a process of its own:\n{errors}")
    answer, took = json.loads(output.splitlines()[-1])
    took["memory"]["peak_anonymous"] = peak
    return answer, took


def main() -> None:
    """The child's side: a request as argument, the answer in the last line of stdout."""
    began = time.perf_counter()
    request = json.loads(sys.argv[1])
    module, _, function = request["name"].partition(":")
    call = getattr(importlib.import_module(f"benchmarks.{module}"), function)
    answer = call(BenchOptions(**request["options"]), **request["arguments"])
    memory = {"peak_rss": status_bytes("VmHWM") if STATUS.exists() else None}
    seconds = {"cpu": time.process_time(), "wall": time.perf_counter() - began}
    print(json.dumps([answer, {"seconds": seconds, "memory": memory}]))


def probe_process(kind: str, options: BenchOptions) -> dict[str, Any]:
    """Run a probe, "memory" or "start", in fresh processes; a dict for the header of a result."""
    if kind == "memory":
        return in_process("probe:measure_memory", options, GIVE_BACK_FREED_MEMORY)[0]
    with tempfile.TemporaryDirectory() as folder:
        runs = [in_process("probe:measure_start", options, {CACHE_VARIABLE: folder})[0] for _ in range(2)]
    return {"first_ever": runs[0], "later": runs[1]}


def measure_memory(options: BenchOptions) -> dict[str, Any]:
    """Growth of the process while flexctc_beam decodes a batch with an LM, for several beam sizes.

    Returns:
        `peak_bytes`: beam size -> peak above the level before the first call;
        `bytes_per_frame_and_slot`: growth from the second largest to the largest beam, divided by
        B * T * (difference of K). A search that stored K * V numbers per frame would show 4 * V here.
    """
    from benchmarks.ours import flexctc_beam
    from benchmarks.peers.base import Setting
    from benchmarks.sources import make_tasks

    if not CLEAR_REFS.exists():
        return {"skipped": "peak memory is read from Linux's /proc"}
    task = make_tasks(options)[0]
    decoders = {
        k: flexctc_beam(options, task, Setting(k, task.lm is not None, 0, options.threads)) for k in MEMORY_BEAMS
    }
    decoders[MEMORY_BEAMS[0]].run(task.inputs[:1, :20], task.lengths[:1].clamp(max=20))  # compiles
    before, peaks = status_bytes("VmRSS"), {}
    for beam, decoder in decoders.items():  # from small to large, so that freed memory hides nothing
        CLEAR_REFS.write_text("5")  # resets VmHWM, the peak
        decoder.run(task.inputs, task.lengths)
        peaks[beam] = status_bytes("VmHWM") - before
    *_, smaller, largest = MEMORY_BEAMS
    slots = task.inputs.shape[0] * task.inputs.shape[1] * (largest - smaller)
    growth = (peaks[largest] - peaks[smaller]) / slots
    return {"peak_bytes": peaks, "bytes_per_frame_and_slot": round(growth, 2)}


def status_bytes(field: str, status: Path = STATUS) -> int:
    """A memory size of a process, as reported by Linux.

    Raises:
        OSError: there is no such process, or no /proc.
        RuntimeError: it has no such size, since it has ended.
    """
    for line in status.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{status} has no {field}")


def measure_start(options: BenchOptions) -> dict[str, float]:
    """Seconds of each step until the first results, in a fresh process.

    Returns:
        `import`, then `load` (LM and utterance, which are not made up anew), on a GPU `context`
        (torch's and the driver's own start) and `libraries` (finding cuda-python and NVRTC),
        `first_decode` (code is compiled, or read from the cache, and run) and `next_decode`.
    """
    start, seconds = time.perf_counter(), dict[str, float]()

    def lap(name: str) -> None:
        nonlocal start
        seconds[name] = round(time.perf_counter() - start, 4)
        start = time.perf_counter()

    import torch

    from benchmarks.clock import find_hardware
    from benchmarks.ours import flexctc_beam
    from benchmarks.peers.base import Setting
    from benchmarks.sources import make_tasks

    lap("import")
    task = make_tasks(replace(options, utterances=1, device="cpu"))[0].first(1)
    setting = Setting(max(options.beams), task.lm is not None, 0, options.threads)
    decoder = flexctc_beam(options, task, setting)
    lap("load")
    if options.device != "cpu":
        task = task.on(options.device)
        torch.cuda.synchronize()
        lap("context")
        find_hardware(options.device, options.threads)
        lap("libraries")
    for name in ("first_decode", "next_decode"):
        decoder.run(task.inputs, task.lengths)
        lap(name)
    return seconds


if __name__ == "__main__":
    main()
