"""A stage of work in a process of its own, so that its memory is its own, too.

python -m nemo_gpu_decoding.bench.scale.process < request.json
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.probe import STATUS, status_bytes

POLL_SECONDS = 0.05


def run_stage(stage: str, options: BenchOptions, folder: Path, **arguments: Any) -> dict[str, Any]:
    """Run a stage (see `stages.py`) in a fresh process.

    Returns:
        what the stage says, and what it took:
        `seconds`: {"cpu", "wall"}, imports and compiled code included;
        `memory`: {"peak_rss": mapped files included, "peak_anonymous": without what the system can drop
        or write out at any time}, bytes; None where there is no /proc.

    Raises:
        RuntimeError: the stage failed; with its stderr.
    """
    request = {"stage": stage, "options": asdict(options), "folder": str(folder), "arguments": arguments}
    with ExitStack() as stack:
        asked, output, errors = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3))
        asked.write(json.dumps(request))
        asked.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=asked, stdout=output, stderr=errors, text=True
        )
        peak = _watch(child)
        if child.returncode:
            errors.seek(0)
            raise RuntimeError(f"the stage {stage} failed:\n{errors.read()}")
        output.seek(0)
        result = json.loads(output.read().splitlines()[-1])
    result["memory"]["peak_anonymous"] = peak
    return result


def _watch(child: subprocess.Popen[str]) -> int | None:
    """The most anonymous memory of a process that was seen until its end, bytes."""
    status, peak = Path(f"/proc/{child.pid}/status"), None
    while child.poll() is None:
        with suppress(OSError, RuntimeError):  # no /proc here, or the process has just ended
            peak = max(peak or 0, status_bytes("RssAnon", status))
        time.sleep(POLL_SECONDS)
    return peak


def main() -> None:
    """The child's side: a request on stdin, the answer in the last line of stdout."""
    began = time.perf_counter()
    from nemo_gpu_decoding.bench.scale.stages import STAGES

    request = json.load(sys.stdin)
    options, folder = BenchOptions(**request["options"]), Path(request["folder"])
    answer = STAGES[request["stage"]](options, folder, **request["arguments"])
    answer["seconds"] = {"cpu": time.process_time(), "wall": time.perf_counter() - began}
    answer["memory"] = {"peak_rss": status_bytes("VmHWM") if STATUS.exists() else None}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
