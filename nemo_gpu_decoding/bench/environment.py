"""What a measurement was made on: without it a number means nothing."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nemo_gpu_decoding import __version__
from nemo_gpu_decoding.bench.measure import ratio_clock
from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.task import Utterances

PACKAGES = (
    "torch",
    "numpy",
    "numba",
    "llvmlite",
    "nemo_toolkit",
    "flashlight-text",
    "pyctcdecode",
    "kenlm",
    "kaldi-decoder",
    "kaldifst",
    "kaldialign",
    "cuda-bindings",
    "triton",
)
FILE_OPTIONS = (
    "data", "tokenizer", "lm", "word_lm", "lexicon", "model", "manifest", "out", "plot", "folder",
)  # fmt: skip


def describe_run(options: BenchOptions, task: Utterances) -> dict[str, Any]:
    """The header of a result file. Files are named without their folders."""
    clock = f"{ratio_clock(options.threads)} seconds"
    asked = asdict(options)
    for name in FILE_OPTIONS:
        asked[name] = Path(asked[name]).name if asked[name] else None
    return {
        "strategy": options.strategy,
        "device": "cpu",
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": {"bench": options.threads, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")},
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": package_versions(),
        "ratio": f"peer / ours, medians of {clock} over up to {options.repeats} repetitions, warm",
        "task": {
            "name": task.name,
            "utterances": len(task.texts),
            "frames": [int(task.lengths.min()), int(task.lengths.max())],
            "vocab_size": task.vocab_size,
            "audio_seconds": round(task.audio_seconds, 2),
        },
        "options": asked,
    }


def package_versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "nemo_gpu_decoding": __version__,
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return versions


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
