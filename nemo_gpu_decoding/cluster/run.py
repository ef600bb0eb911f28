"""Run workers that decode the partitions of a corpus, in this process or on Ray, with a progress bar and totals.

A worker needs no Ray: it loads the model once, and writes one file of transcripts per partition.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from nemo_gpu_decoding.audio import AudioPart
from nemo_gpu_decoding.cache import one_process_at_a_time
from nemo_gpu_decoding.cluster.corpus import Folder, Partition, RunPlan, local_audio
from nemo_gpu_decoding.extras import require
from nemo_gpu_decoding.jit import cache_folder
from nemo_gpu_decoding.manifest import FAULT, Utterance, opened, part_in
from nemo_gpu_decoding.metrics import UNITS
from nemo_gpu_decoding.nemo_plugin.cutting import Cutting
from nemo_gpu_decoding.nemo_plugin.model import Model, Outputs
from nemo_gpu_decoding.nemo_plugin.transcribing import Transcriber, is_fatal, named
from nemo_gpu_decoding.plain_text import format_table
from nemo_gpu_decoding.transcript import Totals, Transcript, one_line, row_of


class Workers(NamedTuple):
    """The number of workers, and where they run: in this process, or on Ray at an address.

    Args:
        address: address of Ray, "auto" (the cluster of this machine) or "local" (a cluster is started for the run);
            None means one worker in this process, without Ray.
        most: maximum number of workers; the run starts when `least` of them are ready.
        gpus: GPUs per worker; None means one if the cluster has GPUs.
    """

    address: str | None = None
    least: int = 1
    most: int = 1
    gpus: float | None = None
    verbose: bool = False


@dataclass(frozen=True)
class Job:
    """The options that all workers of a run share.

    Args:
        out: folder of the run.
        load: loads the model; pickled by its name.
        shards: names of the manifests.
        cutting: where long recordings are cut.
        batch_size: utterances per batch of the encoder.
        batch_seconds: seconds of audio per batch, padding included, in place of `batch_size`; None means no limit.
    """

    out: str
    load: Callable[[], Model]
    shards: tuple[str, ...]
    cutting: Cutting = field(default_factory=Cutting)
    batch_size: int = 8
    batch_seconds: float | None = None


class Worker(Transcriber):
    """A worker that decodes partitions and writes their transcripts to the folder of the run."""

    def __init__(self, job: Job) -> None:
        super().__init__(job.load(), job.cutting, job.batch_size)
        self.job, self.folder = job, Folder(job.out)
        # Decode a second of silence, so that one worker per machine compiles kernels and builds the graph. The other
        # workers wait for the files in the cache. Wrong decoding options raise errors here.
        cache_folder().mkdir(parents=True, exist_ok=True)
        with one_process_at_a_time(cache_folder() / "workers.lock"):
            for outputs in self.model.encode([np.zeros(16000, np.float32)], batch_size=1):
                list(self.model.decode(outputs))

    def transcribe(self, partition: Partition) -> Totals:
        """Decode a partition in batches; write its transcripts or errors in the order of rows, then its marker."""
        started = time.perf_counter()
        totals = Totals(partition.number, partition.shard)
        shard = self.job.shards[partition.shard]
        lines = self.folder.read("rows.jsonl", partition.begin, partition.num_bytes).splitlines()
        written: dict[int, str] = {}  # by position in the partition
        with local_audio([json.loads(line) for line in lines]) as audio:
            utterances = [self.checked(_opened(*pair)) for pair in audio]
            for batch in batches(utterances, self.job.batch_size, self.job.batch_seconds):
                for n, transcript in zip(batch, self.transcripts([utterances[n] for n in batch]), strict=True):
                    row = row_of(utterances[n], transcript, totals)
                    row |= {"manifest": shard, "line": audio[n][0]["line"]}
                    written[n] = json.dumps(row, ensure_ascii=False) + "\n"
        totals.work = round(time.perf_counter() - started, 3)
        self.folder.write(partition.file("jsonl"), "".join(written[n] for n in sorted(written)).encode())
        self.folder.write_json(partition.file("done"), vars(totals))
        return totals

    def decode(self, utterances: Sequence[Utterance], outputs: Outputs | str) -> list[Transcript | str]:
        """Decode a batch by `Transcriber.decode`; if that raises an error, decode each utterance alone."""
        try:
            return super().decode(utterances, outputs)
        except Exception as error:
            if is_fatal(error) or isinstance(outputs, str):
                raise
            if len(utterances) == 1:
                return [named(utterances[0], one_line(error))]
        alone = ({name: rows[n : n + 1] for name, rows in outputs.items()} for n in range(len(utterances)))
        pairs = zip(utterances, alone, strict=True)
        return [found for utterance, own in pairs for found in self.decode([utterance], own)]


def _opened(entry: dict[str, Any], file: Path | str) -> Utterance:
    """Return an utterance whose `fault` is the error of its audio, if the audio cannot be read."""
    row = {FAULT: file, **entry["row"]} if isinstance(file, str) else entry["row"]
    utterance = opened(row["audio_filepath"], AudioPart(Path(file), *part_in(row)), row, f"line {entry['line']}")
    if utterance.fault:
        utterance = replace(utterance, duration=entry["seconds"], fault=one_line(ValueError(utterance.fault)))
    return utterance


def batches(utterances: Sequence[Utterance], batch_size: int, batch_seconds: float | None) -> Iterator[list[int]]:
    """Yield batches of utterance indices: first utterances with a fault, then all others, from long to short.

    Batches of utterances with similar durations have little padding, and the first batch needs most memory.
    `batch_seconds` limits the audio of a batch, padding included; a batch has at least one utterance.
    """
    yield [n for n, utterance in enumerate(utterances) if utterance.fault]
    ready = [n for n, utterance in enumerate(utterances) if not utterance.fault]
    ordered = sorted(ready, key=lambda n: (-utterances[n].duration, n))
    while ordered:
        longest = utterances[ordered[0]].duration
        count = batch_size if batch_seconds is None else max(1, int(batch_seconds / max(longest, 1e-3)))
        yield ordered[:count]
        ordered = ordered[count:]


def transcribe_corpus(
    job: Job, plan: RunPlan, workers: Workers, max_errors: int | None = None, retry_errors: bool = False
) -> list[Totals]:
    """Decode all partitions that have no marker; return the totals of all partitions, in the order of numbers.

    Args:
        max_errors: number of utterances that may fail; None means no limit.
        retry_errors: also decode partitions with failed utterances.

    Raises:
        ValueError: more utterances failed, or the model or its decoding is invalid.
    """
    folder = Folder(job.out)
    totals = {done.number: done for done in finished(folder, plan.partitions)}
    if retry_errors:
        totals = {number: done for number, done in totals.items() if not done.errors}
    todo = [partition for partition in plan.partitions if partition.number not in totals]
    shown: dict[str, Any] = {"unit": " partitions", "desc": "transcribing", "disable": None, "file": sys.stderr}
    with tqdm(total=len(plan.partitions), initial=len(totals), **shown) as bar:
        _check_errors(totals.values(), max_errors)
        new_totals: Iterable[Totals] = ()
        if todo:
            new_totals = _on_ray(job, todo, workers) if workers.address else map(Worker(job).transcribe, todo)
        for done in new_totals:
            totals[done.number] = done
            bar.update()
            bar.set_postfix(errors=sum(partition.errors for partition in totals.values()))
            _check_errors(totals.values(), max_errors)
    return [totals[number] for number in sorted(totals)]


def finished(folder: Folder, partitions: Sequence[Partition]) -> list[Totals]:
    """Return the totals of all finished partitions, which have a marker."""
    names = folder.names()
    markers = [partition.file("done") for partition in partitions]
    return [Totals(**folder.read_json(marker)) for marker in markers if marker in names]


def _check_errors(totals: Any, max_errors: int | None) -> None:
    failed = [partition for partition in totals if partition.errors]
    count = sum(partition.errors for partition in failed)
    if max_errors is not None and count > max_errors:
        raise ValueError(
            f"max_errors={max_errors}, but {count} utterances failed, the last one with: {failed[-1].last_error}; "
            "mend that and run again with retry_errors=true, or allow more"
        )


# ------------------------------------------------------------------------------------------------- Ray


class RayWorker:
    """A Ray Data actor around a `Worker`: a call decodes the partition in its batch and returns the totals.

    Errors that end the run are returned as `fault`, because Ray retries after exceptions; the driver prints them.
    """

    def __init__(self, job: Job) -> None:
        self.fault = ""
        try:
            self.worker = Worker(job)
        except (ValueError, OSError, ImportError) as error:
            self.fault = str(error)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        partition = Partition(*(batch[name][0].item() for name in Partition._fields))
        if self.fault:
            return {"fault": [self.fault], "totals": [""]}
        return {"fault": [""], "totals": [json.dumps(vars(self.worker.transcribe(partition)))]}


def _on_ray(job: Job, todo: Sequence[Partition], workers: Workers) -> Iterator[Totals]:
    """Decode partitions in Ray actors; yield their totals in the order in which the partitions finish."""
    ray = _connected(workers)
    gpus = workers.gpus
    if gpus is None:
        gpus = 1.0 if ray.cluster_resources().get("GPU", 0) else 0.0
    try:
        dataset = ray.data.from_items([partition._asdict() for partition in todo], override_num_blocks=len(todo))
        # Ray Data restarts dead actors by default, and their partitions are decoded again
        dataset = dataset.map_batches(
            RayWorker, fn_constructor_args=(job,), batch_size=1, num_cpus=1, num_gpus=gpus,
            compute=ray.data.ActorPoolStrategy(min_size=workers.least, max_size=workers.most),
        )  # fmt: skip
        for row in dataset.iter_rows():
            if row["fault"]:
                raise ValueError(row["fault"])
            yield Totals(**json.loads(row["totals"]))
    finally:
        if workers.address == "local":
            ray.shutdown()


def _connected(workers: Workers) -> Any:
    """Connect to the Ray cluster at `workers.address`, and return the module `ray`."""
    if not workers.verbose:
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # hides messages about actors that Ray restarts
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray must not change CUDA_VISIBLE_DEVICES
    require("cluster")
    import ray
    import ray.data

    level = logging.INFO if workers.verbose else logging.ERROR
    if not ray.is_initialized():
        where: dict[str, Any] = {"address": workers.address}
        if workers.address == "local":
            where |= {"num_cpus": max(workers.most, os.cpu_count() or 1), "include_dashboard": workers.verbose}
        try:
            ray.init(**where, log_to_driver=workers.verbose, logging_level=level)
        except ConnectionError as error:
            raise ValueError(f"ray={workers.address}: there is no such cluster: {error}") from error
    for name in ("ray.data", "ray"):
        logging.getLogger(name).setLevel(level)
    ray.data.DataContext.get_current().enable_progress_bars = workers.verbose
    return ray


# --------------------------------------------------------------------------------------------- summary


def summary(totals: Sequence[Totals], shards: Sequence[str]) -> str:
    """Return a table of utterances, hours and error rates, with a row per manifest and a row for all of them."""
    rate = _sum(totals).rate_name
    header = ["manifest", "utterances", "hours", "errors", f"{rate} %", UNITS[rate], "sub", "del", "ins"]
    rows = [_summary_row(name, [part for part in totals if part.shard == n]) for n, name in enumerate(shards)]
    if len(rows) > 1:
        rows.append(_summary_row("all", totals))
    shown = [n for n in range(len(header)) if any(row[n] != "" for row in rows)]
    return format_table([header[n] for n in shown], [[row[n] for n in shown] for row in rows])


def _sum(totals: Sequence[Totals]) -> Totals:
    numbers = [part.name for part in fields(Totals) if isinstance(part.default, int | float)]
    return Totals(**{field: sum(getattr(part, field) for part in totals) for field in numbers})


def _summary_row(name: str, totals: Sequence[Totals]) -> list[Any]:
    both = _sum(totals)
    row = [name, both.rows, f"{both.audio / 3600:.3f}", both.errors]
    if not both.scored:
        return [*row, *[""] * 5]
    return [*row, f"{100 * both.word_errors.wer:.2f}", *vars(both.word_errors).values()]
