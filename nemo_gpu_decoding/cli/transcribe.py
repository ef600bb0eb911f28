"""`nemo-gpu-decoding transcribe` turns audio files into text with any strategy."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from nemo_gpu_decoding import __version__
from nemo_gpu_decoding.audio import check_channel_selector, part_of
from nemo_gpu_decoding.cli import decoding
from nemo_gpu_decoding.container import written_whole
from nemo_gpu_decoding.live import subtitles
from nemo_gpu_decoding.manifest import Utterance, find_utterances
from nemo_gpu_decoding.metrics import UNITS
from nemo_gpu_decoding.nemo_plugin.cutting import MIN_PAUSE, Cutting
from nemo_gpu_decoding.plain_text import path_of
from nemo_gpu_decoding.schema import checked_options, option

if TYPE_CHECKING:
    from nemo_gpu_decoding.cluster.run import Workers
    from nemo_gpu_decoding.nemo_plugin.model import Model
    from nemo_gpu_decoding.nemo_plugin.transcribing import Log
    from nemo_gpu_decoding.transcript import Totals, Transcript

EXAMPLES = (
    "model=model.nemo audio=talk.wav",
    "model=model.nemo audio=recordings/ lm=lm.arpa lm_weight=0.5 phrases=names.txt out=hyps.jsonl",
    "model=model.nemo manifest=dev.json preset=best.yaml timestamps=true n_best=5 beam_size=16",
    "model=model.nemo manifest=calls.json lms.news=news.arpa lms.law=law.arpa lm_weight=0.5",
    "model=hybrid.nemo audio=talk.wav strategy=alsd_pp lm=lm.arpa",
    "model=model.nemo audio=talk.wav strategy=cuda_wfst lm=words.arpa phrases=names.txt",
    "model=model.nemo audio=talk.wav strategy=paged_biglm lm=small.arpa large_lm=large.packed",
    "model=model.nemo audio='*.flac' strategy=greedy_batch",
    "model=model.nemo audio=hours.flac out=hours.json subtitles=srt,vtt",
    "model=model.nemo audio=talk.wav decoding.beam.beam_threshold=12",
    "model=model.nemo manifest='corpus/*.jsonl.gz' out=transcripts/ workers=16 ray=auto",
    "model=model.nemo manifest=s3://corpus/dev.json out=s3://corpus/transcripts/ batch_seconds=120",
)
_END = 1 << 20  # bytes of a large file's beginning and end in its digest
FIRST = ("model", "audio", "manifest", "out", "preset", "lm", "lm_weight", "phrases", "boosting_weight", "timestamps")
FILE_OPTIONS = ("model", "preset", *decoding.FILES, "rescore")  # and `lms`
# options that may change when a run is resumed; the corpus and partition_seconds are compared elsewhere
NOT_IN_TRANSCRIPTS = {"audio", "manifest", "out", "device", "verbose"}


@dataclass
class RecordingOptions(decoding.DecodingOptions):
    """Options for the input of `transcribe` and for its output files."""

    topic = "input and output"

    # Audio to transcribe: a file, a folder, a pattern in quotes ('*.wav') or a list [a.wav,b.flac].
    audio: Any = None
    # Instead of audio: a NeMo manifest, JSON lines with audio_filepath (relative to the manifest). A line with offset
    # is the part of the file from there, duration seconds long, or up to the end of the file. Times of its words begin
    # at the part. Without offset, a line is the whole file. Lines with `text` are scored: word error rate per line in
    # `out`, and the total at the end. A list `phrases` in a line replaces the option phrases for that utterance, and
    # `lm` is the name of its LM in lms (none: no LM). allowed_scripts, allowed_tokens, allowed_price, grammar (a list
    # of sentences) and grammar_price in a line replace those of the decoding. With a folder as `out`, manifest may
    # also be a list, a pattern, compressed files and URLs, such as s3://corpus/*.jsonl.gz.
    manifest: Any = None
    # For files with several channels: average, or the number of the channel to decode, from 0. null: average, with a
    # warning.
    channel_selector: Any = None
    # Output file, one JSON object per utterance: the fields of its manifest row, audio_filepath, duration, pred_text,
    # score and seconds (processing time; for a batch, on its first line). Where they apply also n_best, words (with
    # start, end and confidence), text and wer, which is null if only the reference is empty. An utterance that fails
    # has `error` in place of pred_text; the others are transcribed. Decoded batches are kept in the hidden file
    # .OUT.run until the end: the same command, run again, continues after them. A folder or URL that ends with / gets
    # partitions, which are resumed likewise.
    out: str | None = None
    # Hypotheses per utterance in `out`, >= 1; for beam searches at most beam_size.
    n_best: int = option(1, low=1)
    # LM that reorders the n_best hypotheses in a second pass: a word n-gram LM, as a file of pack-lm or ARPA.
    rescore: str | None = None
    # Weight of the second-pass LM, >= 0.
    rescore_weight: float = option(0.5, low=0, needs="rescore=FILE")
    # Factor of the first LM's scores in the second pass, >= 0; 0 drops them.
    rescore_lm_share: float = option(1.0, low=0, needs="rescore=FILE")
    # Add the start and end of every word, in seconds, and its confidence, in [0, 1], to `out`.
    timestamps: bool = False
    # The head of a hybrid model: ctc or rnnt. null: the head that the strategy decodes; otherwise ctc if the model
    # has it.
    head: str | None = option(None, choices=("ctc", "rnnt"))


@dataclass
class PartitionOptions:
    """Options that only apply if `out` is a folder, which receives the output in partitions."""

    topic = "runs with a folder as out"

    # Processes that decode partitions into the folder `out`; each loads the model. [2,64]: Ray chooses the number.
    # More than one process needs Ray: pip install 'nemo-gpu-decoding[cluster]'.
    workers: Any = 1
    # Where the workers run: local (this machine), auto (the Ray cluster of this machine), or an address, such as
    # ray://head:10001. null: local if there are several workers. A single worker runs in this process without Ray.
    ray: str | None = None
    # GPUs per worker; with 0.5 two workers share one. null: one if the cluster has GPUs.
    gpus_per_worker: float | None = option(None, low=0)
    # Seconds of audio per partition, > 0. If a worker dies, its partition is decoded again.
    partition_seconds: float = option(600.0, above=0)
    # For partitions, in place of batch_size: seconds of audio per batch, padding included, > 0.
    batch_seconds: float | None = option(None, above=0)
    # For partitions: stop when more utterances than this have failed, >= 0. null: never.
    max_errors: int | None = option(100, low=0)
    # Decode partitions with failed utterances again.
    retry_errors: bool = False
    # The tar files of a tarred data set, as in NeMo: a pattern, a list or shards/audio_{0..127}.tar. The field
    # shard_id of a row gives the number of its tar; without it the k-th manifest belongs to the k-th tar.
    tarred_audio: Any = None


@checked_options
@dataclass
class TranscribeOptions(Cutting, PartitionOptions, RecordingOptions):
    """Options of `transcribe`. null keeps the value of the preset, or NeMo's default."""

    # Also write a file with lines and their times per recording: srt, vtt, tsv (milliseconds) or txt (no times), or
    # several, srt,vtt. The files have the names of the recordings, and are in the folder of `out`, or here. Parts of a
    # file share one, with times in the file. The option implies timestamps.
    subtitles: list[str] | None = option(None, choices=subtitles.FORMATS)

    def check_rules(self) -> None:
        decoding.check_rescoring(self)
        check_channel_selector(self.channel_selector)
        fewest_and_most(self.workers)
        self._check_partitioned()

    def _check_partitioned(self) -> None:
        """Raise a ValueError for options without effect: `PartitionOptions` need a folder as `out`, others a file."""
        if self.is_partitioned:
            if self.subtitles:
                raise ValueError(f"subtitles={','.join(self.subtitles)} needs a file as out, or none, not a folder")
            return
        for field in fields(PartitionOptions):
            if (value := getattr(self, field.name)) != field.default:
                given = f"{field.name}={value} is for partitions, out is {self.out!r}"
                raise ValueError(f"{given}, expected a folder or URL that ends with /")

    @property
    def is_partitioned(self) -> bool:
        """Return whether `out` is a folder, so that the input is decoded in partitions."""
        return self.out is not None and (self.out.endswith("/") or path_of(self.out).is_dir())


def fewest_and_most(workers: Any) -> tuple[int, int]:
    """Return the least and greatest number of processes in `workers`, N or [FEWEST,MOST]; else a ValueError."""
    ends = workers if isinstance(workers, list) else [workers] * 2
    whole = all(isinstance(end, int) and not isinstance(end, bool) for end in ends)
    if len(ends) != 2 or not whole or not 1 <= ends[0] <= ends[1]:
        raise ValueError(f"workers is {workers!r}, expected an integer >= 1, or [FEWEST,MOST]")
    return ends[0], ends[1]


OPTIONS = TranscribeOptions


def run(options: TranscribeOptions) -> int:
    """Write texts to stdout, JSON lines to the file `out`, and progress, errors and totals to stderr.

    If `out` is a folder, the texts are written to files in it, and a table of totals to stdout.

    Returns:
        The exit status: 1 if an utterance failed. With a folder as `out`: 0 for up to `max_errors` failures.
    """
    if options.is_partitioned:
        return run_partitions(options)
    if options.manifest is not None and not isinstance(options.manifest, str):
        raise ValueError(f"manifest={options.manifest} needs a folder as out, one that ends with /")
    from nemo_gpu_decoding.jit import compilation, working_seconds
    from nemo_gpu_decoding.nemo_plugin.transcribing import Log

    utterances = find_utterances(options.audio, options.manifest)
    requests = (utterance.request for utterance in utterances)
    has_own_phrases = any(request is not None and request.phrases is not None for request in requests)
    config = build_decoding(options)
    decoding.check_weights(config, options, has_own_phrases=has_own_phrases)
    out = decoding.writable_file("out", options.out) if options.out else None
    if options.subtitles:
        _check_names(utterances)
    recordings = {utterance.path for utterance in utterances}
    inputs: list[tuple[str, Any]] = [("decoding", OmegaConf.to_container(config))]
    inputs += [("manifest" if options.audio is None else "audio", recording) for recording in recordings]
    written = {str(subtitle_file(options, file, kind)) for file in recordings for kind in options.subtitles or ()}
    written_besides = [("subtitles", file) for file in sorted(written)]
    decoding.check_outputs(options, inputs, written_besides + [("out", str(kept_file(out)))] * bool(out))
    model = load(options)
    log = Log(kept_file(out), options_of_transcripts(options), partial(tqdm.write, file=sys.stderr))
    started, compiled = working_seconds(), compilation.seconds
    with ExitStack() as run:  # a run that is killed does not change an older file
        sink = run.enter_context(run.enter_context(written_whole(out)).open("w", encoding="utf-8")) if out else None
        transcripts = _transcripts(model, utterances, options, log)
        if options.subtitles:
            transcripts = _subtitled(utterances, transcripts, options)
        totals = emit(utterances, transcripts, sink)
    log.remove()
    if log.utterances:
        print(f"{log.utterances} utterances are those of an interrupted run", file=sys.stderr)
    report(totals, working_seconds() - started, model.device_name)
    if compiled < compilation.seconds:
        print(f"compiled in {compilation.seconds - compiled:.1f} s besides, once per machine", file=sys.stderr)
    return int(totals.errors > 0)


def load(options: TranscribeOptions) -> Model:
    """Load the model and set its decoding strategy and its second pass."""
    from nemo_gpu_decoding.search.rescoring import Rescoring, load_scorer

    model = decoding.load_model(options, build_decoding, options.head, options.channel_selector)
    if options.rescore:
        model.second = Rescoring(load_scorer(options.rescore), options.rescore_weight, options.rescore_lm_share)
    return model


def run_partitions(options: TranscribeOptions) -> int:
    """Transcribe the input in partitions into the folder `out`, or resume an interrupted run there."""
    from nemo_gpu_decoding.cluster.corpus import Folder, find_corpus, open_run
    from nemo_gpu_decoding.cluster.run import Job, summary, transcribe_corpus

    out = str(options.out).rstrip("/")
    if "://" not in out:
        out = str(path_of(out).absolute())
    decoding.check_weights(build_decoding(options), options, has_own_phrases=options.manifest is not None)
    corpus = find_corpus(options.audio, options.manifest, options.tarred_audio)
    plan = open_run(Folder(out), corpus, options.partition_seconds, options_of_transcripts(options))
    cutting, limits = decoding.fields_of(Cutting, options), (options.batch_size, options.batch_seconds)
    job = Job(out, partial(load, options), tuple(plan.shards), cutting, *limits)
    started = time.perf_counter()
    totals = transcribe_corpus(job, plan, workers_of(options), options.max_errors, options.retry_errors)
    print(summary(totals, plan.shards))
    count, files = sum(partition.rows for partition in totals), f"{out}/part-*.jsonl"
    print(f"{count} utterances in {files}; {time.perf_counter() - started:.1f} s", file=sys.stderr)
    return 0


def options_of_transcripts(options: TranscribeOptions) -> dict[str, Any]:
    """Return the options on which transcripts depend; digests of files replace file names."""
    resumable = {option.name for option in fields(PartitionOptions)} - {"batch_seconds"} | NOT_IN_TRANSCRIPTS
    given = {name: value for name, value in vars(options).items() if name not in resumable}
    for name in FILE_OPTIONS:
        if given[name] is not None:
            given[name] = content_of(str(given[name]))
    given["lms"] = {name: content_of(str(file)) for name, file in options.lms.items()}
    return {**given, "version": __version__}


def content_of(path: str) -> str:
    """Return name, size and digest (of begin and end) of a file; return other texts unchanged.

    >>> content_of("no_such_file")
    'no_such_file'
    """
    file = path_of(path)
    if not file.is_file():
        return path
    size = file.stat().st_size
    with file.open("rb") as content:
        ends = content.read(_END)
        content.seek(max(_END, size - _END))
        ends += content.read(_END)
    return f"{file.name} ({size} bytes, sha256 {hashlib.sha256(ends).hexdigest()[:16]})"


def kept_file(out: Path | None) -> Path | None:
    """Return the hidden log file beside `out`, from which a run can resume; None if `out` is None or a device."""
    return None if out is None or (out.exists() and not out.is_file()) else out.with_name(f".{out.name}.run")


def workers_of(options: TranscribeOptions) -> Workers:
    """Return the number of worker processes and the address of Ray, if Ray is used."""
    from nemo_gpu_decoding.cluster.run import Workers

    least, most = fewest_and_most(options.workers)
    address = options.ray or ("local" if most > 1 else None)
    return Workers(address, least, most, options.gpus_per_worker, options.verbose)


def build_decoding(options: TranscribeOptions, default_head: str = "ctc") -> DictConfig:
    """Return NeMo's `decoding` section for the options of `transcribe`."""
    config = decoding.config_with_n_best(options, options.head or default_head, options.n_best)
    if options.timestamps or options.subtitles or options.min_confidence:
        config.compute_timestamps = True
        OmegaConf.update(config, "confidence_cfg.preserve_word_confidence", True, force_add=True)
    return decoding.with_decoding(config, options)


def emit(utterances: Sequence[Utterance], transcripts: Iterable[Transcript | str], sink: TextIO | None) -> Totals:
    """Print each text or error and write its JSON line as soon as the utterance is decoded; return the totals.

    If there are several utterances, each text is printed after the utterance's name and a tab.
    """
    from nemo_gpu_decoding.jit import working_seconds
    from nemo_gpu_decoding.transcript import Totals, error_of, row_of

    totals, before = Totals(), working_seconds()
    for utterance, transcript in zip(utterances, transcripts, strict=True):
        if not isinstance(transcript, str):
            name = f"{utterance.label}\t" if len(utterances) > 1 else ""
            tqdm.write(name + transcript.text, file=sys.stdout)
        if error := error_of(transcript):
            tqdm.write(error, file=sys.stderr)
        row = row_of(utterance, transcript, totals)
        now = working_seconds()
        if sink:
            sink.write(json.dumps({**row, "seconds": round(now - before, 4)}, ensure_ascii=False) + "\n")
        before = now
    return totals


def report(totals: Totals, seconds: float, device: str) -> None:
    """Print RTFx (seconds of audio per second of work, without compilation) and WER of successful utterances."""
    if totals.errors:
        print(f"{totals.errors} of {totals.rows} utterances failed", file=sys.stderr)
    print(
        f"{totals.rows - totals.errors} utterances, {totals.audio:.1f} s of audio in {seconds:.2f} s on {device}: "
        f"RTFx {totals.audio / max(seconds, 1e-9):.1f}",
        file=sys.stderr,
    )
    if totals.scored:
        errors = totals.word_errors
        print(
            f"{totals.rate_name} {100 * errors.wer:.2f} % of {errors.words} {UNITS[totals.rate_name]} "
            f"(sub {errors.substitutions}, del {errors.deletions}, ins {errors.insertions})",
            file=sys.stderr,
        )


def _transcripts(
    model: Model, utterances: Sequence[Utterance], options: TranscribeOptions, log: Log
) -> Iterator[Transcript | str]:
    """Decode the utterances with a progress bar; yield a transcript or an error message for each."""
    from nemo_gpu_decoding.nemo_plugin.transcribing import Transcriber

    seconds, size = sum(utterance.duration for utterance in utterances), options.batch_size
    with tqdm(total=seconds, unit="s", unit_scale=True, desc="transcribing", disable=None, file=sys.stderr) as bar:
        transcriber = Transcriber(model, decoding.fields_of(Cutting, options), size, log, bar.update)
        for begin in range(0, len(utterances), size):
            yield from transcriber.transcripts([*map(transcriber.checked, utterances[begin : begin + size])])


def _check_names(utterances: Sequence[Utterance]) -> None:
    """Raise a ValueError if the subtitle files of two recordings would have the same name."""
    read = [part_of(utterance.audio) for utterance in utterances if not utterance.fault]
    files = [*(part.path for part in read if part.is_whole), *{part.path for part in read if not part.is_whole}]
    if len({file.stem for file in files}) < len(files):
        raise ValueError("subtitles have the names of the recordings, but two recordings have one name")


def _subtitled(
    utterances: Sequence[Utterance], transcripts: Iterable[Transcript | str], options: TranscribeOptions
) -> Iterator[Transcript | str]:
    """Yield the transcripts unchanged, and write the subtitles of an audio file after its last utterance."""
    last = {utterance.path: n for n, utterance in enumerate(utterances)}
    of_parts: dict[Path, list[tuple[float, Transcript]]] = {}
    for n, (utterance, transcript) in enumerate(zip(utterances, transcripts, strict=True)):
        if not isinstance(transcript, str):
            offset = part_of(utterance.audio).offset
            of_parts.setdefault(utterance.path, []).append((offset, transcript.later(offset)))
        if n == last[utterance.path] and utterance.path in of_parts:
            parts = [part for _, part in sorted(of_parts.pop(utterance.path), key=itemgetter(0))]
            for file_format in options.subtitles or ():
                content = subtitles.subtitles(parts, file_format, MIN_PAUSE)
                subtitle_file(options, utterance.path, file_format).write_text(content, encoding="utf-8")
        yield transcript


def subtitle_file(options: TranscribeOptions, recording: Path, file_format: str) -> Path:
    """Return the path of the subtitle file of a recording, in the folder of `out`."""
    folder = path_of(options.out).parent if options.out else Path()
    return folder / f"{recording.stem}.{file_format}"
