"""Run a benchmark or a script for GPUs on the emulator, to its last line, on a small input.

    python -m tests.gpu.rehearse benchmarks device=cuda ...
    python -m tests.gpu.rehearse scripts/gpu_host/first_figures.py NAME ...

Tasks are cut to two utterances of a few frames, and the options of `SMALL` replace those that are given. Results are
compared with those of the CPU search, as on a GPU. The times mean nothing.
"""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks import __main__ as benchmarks
from benchmarks import run, sources
from benchmarks.clock import Hardware, HostClock
from benchmarks.options import BenchOptions
from benchmarks.tasks import Task
from nemo_gpu_decoding.cuda.launch import use_runtime
from nemo_gpu_decoding.nemo_plugin.model import Model
from nemo_gpu_decoding.search.flexctc_beam import cuda_engine
from nemo_gpu_decoding.search.transducer import cuda_graphs, records
from nemo_gpu_decoding.search.word_graph import kernel_abi
from tests.assets import load_script
from tests.cuda_emulator.emulator import EmulatedRuntime
from tests.cuda_emulator.graphs import captured_while

EMULATED_GPU = Hardware(torch.device("cpu"), "Emulated GPU", HostClock(), "wall", True, copy_buffer_bytes=1 << 20)
UTTERANCES, FRAMES = 2, 6
make_tasks, load_model = sources.make_tasks, Model.load
SMALL = (
    f"batches=[1,{UTTERANCES}]", f"check_utterances={UTTERANCES}", "beams=[2]", "repeats=1", "pair_seconds=0.01",
    "encoder_layers=1", "encoder_width=16", "prediction_width=16", "encoder_precision=float32", "many_phrases=0",
)  # fmt: skip
THREADS = {
    cuda_engine: ("THREADS", "FINISH_THREADS"),
    records: ("EXPAND_THREADS", "MERGE_THREADS", "MOVE_THREADS"),
    kernel_abi: ("THREADS",),
}


def short_tasks(options: BenchOptions) -> list[Task]:
    """The benchmark's tasks, cut to `UTTERANCES` of at most `FRAMES` frames."""
    tasks = [task.first(UTTERANCES) for task in make_tasks(options)]
    return [
        replace(task, inputs=task.inputs[:, :FRAMES].contiguous(), lengths=task.lengths.clamp(max=FRAMES))
        for task in tasks
    ]


def rehearse(target: str, arguments: Sequence[str]) -> int:
    """Run the benchmarks or a script with the emulator in the place of the GPU; returns its exit status."""
    with ExitStack() as places:
        for module, names in THREADS.items():
            for name in names:
                places.enter_context(patch.object(module, name, 32))
        places.enter_context(patch.object(cuda_graphs, "capture_while", captured_while))
        places.enter_context(patch.object(Task, "repeated", lambda task, _: task.first(UTTERANCES)))
        places.enter_context(patch.object(Model, "load", lambda file, device: load_model(file, device="cpu")))
        places.enter_context(use_runtime(EmulatedRuntime()))
        if target == "benchmarks":
            main, names, given = benchmarks.main, run, [*arguments, *SMALL]
        else:
            names = load_script(Path(target))
            main, given = names.main, list(arguments)
            places.enter_context(patch.object(names, "REPEATS", 1))
        places.enter_context(patch.object(names, "make_tasks", short_tasks))
        places.enter_context(patch.object(names, "find_hardware", lambda device, threads: EMULATED_GPU))
        return main(given)


if __name__ == "__main__":
    sys.exit(rehearse(sys.argv[1], sys.argv[2:]))
