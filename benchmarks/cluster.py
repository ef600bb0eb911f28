"""`python -m benchmarks mode=cluster`: the cost of Ray per utterance, compared with one process without it.

A run is that of `transcribe`, with `Partition`s, files and markers. The encoder is a look-up of emissions, and
utterances are short, so that the engine is a large part of the measured time. All runs must write the same bytes.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.options import BenchOptions
from benchmarks.ours import OURS
from benchmarks.peers.base import Setting
from benchmarks.report import Row
from benchmarks.sources import make_tasks
from benchmarks.tasks import Task
from nemo_gpu_decoding.cluster.corpus import Folder, RunPlan, find_corpus, open_run
from nemo_gpu_decoding.cluster.run import Job, Workers, transcribe_corpus
from nemo_gpu_decoding.nemo_plugin.model import Outputs
from nemo_gpu_decoding.transcript import Totals, Transcript

RUNS = {
    "no Ray, 1 process": Workers(),
    "Ray, 1 worker": Workers("local", 1, 1, gpus=0),
    "Ray, 2 workers": Workers("local", 2, 2, gpus=0),
}
SAMPLES = 800  # of each file, 50 ms: short, so that reading takes little time
WARM_UP = 0.2  # share of the partitions that finish first and are not counted, because workers start one by one


class EmissionModel:
    """Replaces a `Model`: emissions of a task, looked up by the number in the file's name, and the search."""

    def __init__(self, options: BenchOptions) -> None:
        torch.set_num_threads(options.threads)
        (self.task,) = make_tasks(options)
        setting = Setting(max(options.beams), threads=options.threads)
        self.search = OURS[options.strategy](options, self.task, setting)

    def encode(self, files: Sequence[Path | np.ndarray], batch_size: int) -> Iterator[Outputs]:
        count = len(self.task.lengths)
        numbers = [int(file.stem) if isinstance(file, Path) and file.stem.isdigit() else 0 for file in files]
        chosen = torch.tensor(numbers) % count
        lengths = self.task.lengths[chosen]
        yield {"inputs": self.task.inputs[chosen, : int(lengths.max())], "lengths": lengths}

    def decode(self, outputs: Outputs, requests: Any = ()) -> Iterator[Transcript]:
        for best, *_ in self.search.hypotheses(outputs["inputs"], outputs["lengths"]):
            yield Transcript(self.task.vocabulary.text(best.labels), round(float(best.score), 4))


class Timing(NamedTuple):
    """Times of a run, without its first partitions."""

    start: float  # seconds until the first partition was finished
    per_utterance: float  # seconds, of all processes together
    work: float  # of these, what workers spent on partitions


def load(options: BenchOptions) -> Any:
    return EmissionModel(options)


def measure(options: BenchOptions, tasks: Sequence[Task]) -> Iterator[Row]:
    """A row for every kind of run.

    Raises:
        ValueError: two runs have written different transcripts.
    """
    import soundfile

    os.environ.setdefault("RAY_worker_niceness", "0")  # as a process without Ray has it
    (task,) = tasks
    with tempfile.TemporaryDirectory(prefix="nemo-gpu-decoding-", dir=options.folder) as folder:
        rows = []
        for number in range(options.partitions * options.partition_size):
            soundfile.write(Path(folder) / f"{number}.wav", np.zeros(SAMPLES), 16000)
            rows.append(
                {"audio_filepath": f"{number}.wav", "duration": 1.0, "text": task.texts[number % len(task.texts)]}
            )
        manifest = Path(folder) / "corpus.json"
        manifest.write_text("\n".join(map(json.dumps, rows)))
        expected: bytes | None = None
        for name, workers in RUNS.items():
            timings = []
            for repeat in range(options.repeats):
                out = Path(folder) / f"{name}, {repeat}"
                plan = open_run(Folder(str(out)), find_corpus(None, str(manifest)), float(options.partition_size), {})
                timings.append(timed(options, out, plan, workers))
                written = b"".join(part.read_bytes() for part in sorted(out.glob("part-*.jsonl")))
                if b'"error"' in written:
                    raise ValueError(f"{name} has written errors in place of transcripts, see the parts in {out}")
                expected = expected or written
                if written != expected:
                    raise ValueError(f"{name} has written other transcripts than {next(iter(RUNS))}")
            best = min(timings, key=lambda timing: timing.per_utterance - timing.work)
            yield {
                **{"strategy": options.strategy, "task": task.name, "run": name, "beam": max(options.beams)},
                **{"utterances": len(rows), "partition_size": options.partition_size, "repetitions": len(timings)},
                **{"start": best.start, "per_utterance": best.per_utterance, "work": best.work},
                **{"verified": True, "verified_by": "same bytes as without Ray"},
            }


def finished(out: Path) -> list[tuple[float, str]]:
    """The partitions of a run in the order in which they were finished: seconds, name of the marker."""
    return sorted((marker.stat().st_mtime, marker.name) for marker in out.glob("*.done"))


def timed(options: BenchOptions, out: Path, plan: RunPlan, workers: Workers) -> Timing:
    """Transcribe into a new folder; the times of the markers give the time per partition."""
    job = Job(str(out), partial(load, options), tuple(plan.shards), batch_size=8)
    begun = time.time()
    totals: dict[int, Totals] = {each.number: each for each in transcribe_corpus(job, plan, workers)}
    markers = finished(out)
    first = int(WARM_UP * len(markers))
    counted = [totals[int(name[len("part-") : -len(".done")])] for _, name in markers[first + 1 :]]
    taken = workers.most * (markers[-1][0] - markers[first][0])
    rows = sum(each.rows for each in counted)
    return Timing(markers[0][0] - begun, taken / rows, sum(each.work for each in counted) / rows)
