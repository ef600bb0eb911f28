"""Measure a few searches on this machine's GPU in under a minute: a JSON line each, as soon as it is known.

    python scripts/gpu_host/first_figures.py [NAME ...]

The names are those of `FIGURES`, all of them by default. Emissions and LMs are those of the benchmarks' task `hard`;
a batch repeats its utterances. A line has the device, medians over `REPEATS` batches, and for how many of the first
utterances the tokens equal those of the CPU search in fp32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from benchmarks.clock import Hardware, find_hardware
from benchmarks.options import BenchOptions
from benchmarks.ours import OURS
from benchmarks.peers.base import Setting
from benchmarks.sources import make_tasks
from benchmarks.tasks import Task
from nemo_gpu_decoding.search.transducer.cuda_graphs import LOOP, PLAIN

REPEATS, COMPARED = 10, 2


class Figure(NamedTuple):
    """One measurement, always with the LM."""

    strategy: str
    batch: int
    beam: int
    mode: str | None = None  # of a transducer's launches
    dtype: torch.dtype = torch.float32  # autocast's, of a transducer's networks


FIGURES = {
    "flexctc_beam-32": Figure("flexctc_beam", 32, 16),
    "flexctc_beam-128": Figure("flexctc_beam", 128, 16),
    "cuda_wfst-32": Figure("cuda_wfst", 32, 12),
} | {
    f"alsd_pp-{mode}-{name}": Figure("alsd_pp", 32, 4, mode, dtype)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    for mode in (LOOP, PLAIN)
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the lines; returns 0 if every figure was measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", default=list(FIGURES), help=", ".join(FIGURES))
    names = parser.parse_args(arguments).names
    unknown = sorted(set(names) - set(FIGURES))
    if unknown:
        parser.error(f"NAME is {unknown[0]}, expected one of {', '.join(FIGURES)}")
    return run(names, find_hardware("cuda", 1))


def run(names: Sequence[str], hardware: Hardware) -> int:
    """Print the figures' lines; one that fails has the error, and the others follow."""
    failed, expected = 0, {}
    for name in names:
        figure = FIGURES[name]
        line = {"figure": name, "device": hardware.name, **figure._asdict(), "dtype": str(figure.dtype)}
        try:
            if figure.strategy not in expected:
                expected[figure.strategy] = tokens_on_cpu(figure)
            line |= measured(figure, hardware, expected[figure.strategy])
        except Exception as error:  # the first session on a GPU may meet any
            line["error"], failed = f"{type(error).__name__}: {error}", failed + 1
        print(json.dumps(line), flush=True)
    return int(failed > 0)


def tokens_on_cpu(figure: Figure) -> list[Any]:
    """What the CPU search finds in the first utterances."""
    options, task = task_of(figure, "cpu")
    ready = OURS[figure.strategy](options, task, Setting(figure.beam, lm=True))
    return ready.read(ready.run(task.inputs[:COMPARED], task.lengths[:COMPARED]))


def task_of(figure: Figure, device: str) -> tuple[BenchOptions, Task]:
    """Options and task of a figure; the task's tensors are on the host."""
    options = BenchOptions(strategy=figure.strategy, tasks=["hard"], transducers=["rnnt"], device=device)
    return options, make_tasks(options)[0]


def measured(figure: Figure, hardware: Hardware, expected: list[Any]) -> dict[str, Any]:
    """The figures themselves."""
    options, task = task_of(figure, "cuda")
    task = task.repeated(figure.batch).on(hardware.device)
    ready = OURS[figure.strategy](options, task, Setting(figure.beam, lm=True))
    if figure.mode is not None:
        ready.decoder._shared.graphs.first_mode = figure.mode

    def batch() -> Any:
        with autocast(figure.dtype, hardware.device):
            return ready.run(task.inputs, task.lengths)

    found = ready.read(batch())[:COMPARED]  # compiles and captures
    seconds = [hardware.clock.measure(batch, 1) for _ in range(REPEATS)]
    wall = statistics.median(second.wall for second in seconds)
    modes = getattr(ready.decoder, "device_modes", {})
    return {
        "ms_per_batch": wall * 1e3,
        "gpu_ms_per_batch": statistics.median(second.device for second in seconds) * 1e3,
        "us_per_frame": wall * 1e6 / int(task.lengths.max()),
        "times_real_time": task.audio_seconds / wall,
        "took": modes.get("graphs"),
        "equal_to_cpu": f"{sum(a == b for a, b in zip(found, expected, strict=True))} of {len(expected)}",
    }


def autocast(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[None]:
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


if __name__ == "__main__":
    sys.exit(main())
