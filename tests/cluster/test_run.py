"""Runs with a model that needs no NeMo: resumed, damaged, killed; here and on a Ray of two workers."""

import contextlib
import functools
import gzip
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import fsspec
import numpy as np
import pytest

from nemo_gpu_decoding.cache import is_held
from nemo_gpu_decoding.cluster.corpus import MAX_ROWS, Folder, find_corpus, open_run
from nemo_gpu_decoding.cluster.run import Job, Worker, Workers, batches, summary, transcribe_corpus
from nemo_gpu_decoding.jit import cache_folder
from nemo_gpu_decoding.manifest import Utterance
from tests.assets import ROOT
from tests.cluster import fake

soundfile = pytest.importorskip("soundfile")


@pytest.fixture
def corpus(tmp_path):
    """A function that writes n files of 1, 2, 3, 1, 2, 3 ... seconds and a manifest of them."""

    def write(count, name="corpus.json", **more):
        (tmp_path / "audio").mkdir(exist_ok=True)
        rows = []
        for n in range(count):
            seconds = 1 + n % 3
            file = tmp_path / "audio" / f"{name.split('.')[0]}_{n:03d}.wav"
            soundfile.write(file, np.zeros(4000 * seconds), 4000)
            row = {"audio_filepath": f"audio/{file.name}", "duration": seconds, "text": file.stem}
            rows.append({**row, **more.get(str(n), {})})
        text = "\n".join(map(json.dumps, rows))
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return str(path)

    return write


class Run:
    """A folder, and what it takes to go on with it."""

    def __init__(
        self, tmp_path, manifest, *, audio=None, tars=None, partition_seconds=10, load=None, out="out", **options
    ):
        self.out = out if "://" in out else str(tmp_path / out)
        (tmp_path / "pids").mkdir(exist_ok=True)
        self.plan = open_run(Folder(self.out), find_corpus(audio, manifest, tars), partition_seconds, options)
        load = load or functools.partial(fake.load, str(tmp_path / "pids"))
        self.job = Job(self.out, load, tuple(self.plan.shards), batch_size=4)

    def go(self, workers=Workers(), **options):  # noqa: B008  (a NamedTuple)
        return transcribe_corpus(self.job, self.plan, workers, **options)

    def rows(self):
        fs, path = fsspec.core.url_to_fs(self.out)
        parts = sorted(fs.glob(f"{path}/part-*.jsonl"))
        return [json.loads(line) for part in parts for line in fs.cat_file(part).splitlines()]


def expected(*counts):
    return [f"{name}_{n:03d}" for name, count in counts for n in range(count)]


def test_run_writes_every_utterance_once_in_order(tmp_path, corpus):
    manifests = [corpus(20, "first.json"), corpus(7, "second.json.gz")]
    run = Run(tmp_path, manifests)
    totals = run.go()
    assert [row["pred_text"] for row in run.rows()] == expected(("first", 20), ("second", 7))
    assert [row["manifest"] for row in run.rows()] == [manifests[0]] * 20 + [manifests[1]] * 7
    assert [row["line"] for row in run.rows()] == [*range(1, 21), *range(1, 8)]
    assert [partition.seconds for partition in run.plan.partitions] == [12, 12, 12, 3, 12, 1]
    assert [line.split()[1] for line in summary(totals, run.plan.shards).splitlines()[2:5]] == ["20", "7", "27"]


def test_resumed_run_keeps_finished_partitions(tmp_path, corpus):
    run = Run(tmp_path, corpus(20))
    run.go()
    before = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in Folder(run.out).names()}
    rows = run.rows()
    (tmp_path / "out" / "part-00002.done").unlink()
    (tmp_path / "out" / "part-00001.jsonl.tmp").write_text("half a li")
    again = Run(tmp_path, str(tmp_path / "corpus.json"))
    assert sum(totals.rows for totals in again.go()) == 20
    assert again.rows() == rows
    changed = {name for name, when in before.items() if (tmp_path / "out" / name).stat().st_mtime_ns != when}
    assert changed == {"part-00002.done", "part-00002.jsonl"}
    assert Run(tmp_path, str(tmp_path / "corpus.json"), load=fake.broken).go()  # no worker is needed any more


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"lm_weight": 0.7}, "holds a run with lm_weight=0.5, this one has lm_weight=0.7"),
        ({"lm_weight": 0.5, "head": "ctc"}, "holds a run with head=null, this one has head=ctc"),
        ({"lm_weight": 0.5, "partition_seconds": 20}, "with partition_seconds=10, this one has partition_seconds=20"),
    ],
)
def test_a_run_with_other_options_is_refused(options, problem, tmp_path, corpus):
    manifest = corpus(3)
    Run(tmp_path, manifest, lm_weight=0.5)
    with pytest.raises(ValueError, match=problem):
        Run(tmp_path, manifest, **options)


def test_another_corpus_is_refused(tmp_path, corpus):
    manifest = corpus(3)
    Run(tmp_path, manifest)
    with pytest.raises(ValueError, match=r"holds a run of .*corpus.json, this one has .*other.json"):
        Run(tmp_path, corpus(3, "other.json"))
    with pytest.raises(ValueError, match="holds a run of 1 manifests, this one has 2"):
        Run(tmp_path, [manifest, manifest])
    corpus(4)
    with pytest.raises(ValueError, match="its content has changed"):
        Run(tmp_path, manifest)
    with pytest.raises(ValueError, match=r"holds .* and no run.json, expected a new or empty folder"):
        Run(tmp_path, manifest, out="audio")


def test_bad_audio_is_an_error_of_its_row_only(tmp_path, corpus):
    manifest = corpus(8)
    (tmp_path / "audio" / "corpus_001.wav").write_bytes(b"RIFF")
    (tmp_path / "audio" / "corpus_003.wav").unlink()
    soundfile.write(tmp_path / "audio" / "corpus_004.wav", np.zeros(0), 4000)
    (tmp_path / "audio" / "corpus_005.wav").rename(tmp_path / "audio" / "encoder_fails.wav")
    (tmp_path / "audio" / "corpus_006.wav").rename(tmp_path / "audio" / "search_fails.wav")
    text = (tmp_path / "corpus.json").read_text().replace("audio/corpus_005", "audio/encoder_fails")
    (tmp_path / "corpus.json").write_text(text.replace("audio/corpus_006", "audio/search_fails"))
    run = Run(tmp_path, manifest)
    assert sum(each.errors for each in run.go()) == 5
    errors = {row["audio_filepath"]: row["error"] for row in run.rows() if "error" in row}
    names = ("corpus_001", "corpus_003", "corpus_004", "encoder_fails", "search_fails")
    assert list(errors) == [f"audio/{name}.wav" for name in names]
    assert [text.split(": ")[-1] for text in list(errors.values())[2:]] == [
        "audio/corpus_004.wav has no samples",
        "this audio is no good",
        "no such state",
    ]
    assert all("cannot be read as audio" in text for text in list(errors.values())[:2])
    assert [row.get("pred_text") for row in run.rows() if "error" not in row] == [f"corpus_00{n}" for n in (0, 2, 7)]
    with pytest.raises(ValueError, match=r"max_errors=4, but 5 utterances failed, .*: RuntimeError: no such state"):
        run.go(max_errors=4)
    soundfile.write(tmp_path / "audio" / "corpus_001.wav", np.zeros(4000), 4000)
    assert sum(each.errors for each in run.go(retry_errors=True)) == 4


def test_file_name_that_is_not_utf_8_is_an_error_of_its_row_only(tmp_path, corpus):
    corpus(3)
    (tmp_path / "audio" / "corpus_001.wav").rename(tmp_path / "audio" / os.fsdecode(b"corpus_\xe9.wav"))
    run = Run(tmp_path, None, audio=str(tmp_path / "audio"))
    assert [(each.rows, each.errors) for each in run.go()] == [(3, 1)]
    (row,) = (row for row in run.rows() if "error" in row)
    assert row["audio_filepath"] == f"{tmp_path}/audio/corpus_\\xe9.wav"
    assert "is not UTF-8; rename the file" in row["error"]


@pytest.mark.parametrize("audio", ["audio", "audio/*.wav", ["audio/c*_00[0-3].wav", "audio/c*_00[4-7].wav"]])
def test_runs_of_folders_and_patterns_can_be_resumed(audio, tmp_path, corpus, monkeypatch):
    corpus(8)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "audio" / "corpus_001.wav").write_bytes(b"RIFF")
    run = Run(tmp_path, None, audio=audio)
    run.go()
    rows = run.rows()
    assert [Path(row["audio_filepath"]).stem for row in rows] == expected(("corpus", 8))
    assert [row.get("pred_text") for row in rows] == ["corpus_000", None, *expected(("corpus", 8))[2:]]
    assert rows[1]["error"].startswith(f"{tmp_path}/audio/corpus_001.wav cannot be read as audio")
    (tmp_path / "out" / "part-00001.done").unlink()
    again = Run(tmp_path, None, audio=audio)
    again.go()
    assert again.rows() == rows
    assert {row["manifest"] for row in rows} == {"audio"}
    (tmp_path / "audio" / "corpus_007.wav").unlink()
    with pytest.raises(ValueError, match="its content has changed"):
        Run(tmp_path, None, audio=audio)
    with pytest.raises(ValueError, match="give either audio"):
        Run(tmp_path, None)


def test_phrases_are_per_utterance(tmp_path, corpus):
    run = Run(tmp_path, corpus(5, **{"1": {"phrases": ["Castellano"]}, "3": {"phrases": []}}))
    run.go()
    assert [row["pred_text"] for row in run.rows()][:2] == ["corpus_000", "corpus_001 Castellano"]
    other = Run(tmp_path, corpus(5, "other.json", **{"2": {"phrases": "x"}}), out="other")
    other.go()
    (error,) = (row["error"] for row in other.rows() if "error" in row)
    assert "line 3: phrases is 'x', expected a list of texts" in error


def test_run_on_another_file_system(tmp_path, corpus):
    fs = fsspec.filesystem("memory")
    for line in (tmp_path / "x", tmp_path / "y"):
        line.touch()
    corpus(4, "a.json")
    fs.pipe("/corpus/a.json", (tmp_path / "a.json").read_bytes())
    for file in (tmp_path / "audio").iterdir():
        fs.pipe(f"/corpus/audio/{file.name}", file.read_bytes())
    try:
        run = Run(tmp_path, "memory://corpus/*.json", out="memory://corpus/out")
        run.go()
        assert [row["pred_text"] for row in run.rows()] == expected(("a", 4))
        assert sum(part.rows for part in Run(tmp_path, "memory://corpus/*.json", out="memory://corpus/out").go()) == 4
    finally:
        fs.rm("/corpus", recursive=True)


def test_tarred_audio_as_nemo_writes_it(tmp_path, corpus):
    corpus(6, **{str(n): {"shard_id": n // 4} for n in range(6)})
    rows = [json.loads(line) for line in (tmp_path / "corpus.json").read_text().splitlines()]
    for row in rows:
        row["audio_filepath"] = row["audio_filepath"].removeprefix("audio/")
        if row["audio_filepath"] != "corpus_002.wav":
            with tarfile.open(tmp_path / f"audio_{row['shard_id']}.tar", "a") as archive:
                archive.add(tmp_path / "audio" / row["audio_filepath"], row["audio_filepath"])
    (tmp_path / "corpus.json").write_text("\n".join(map(json.dumps, rows)))
    run = Run(tmp_path, str(tmp_path / "corpus.json"), tars=f"{tmp_path}/audio__OP_0..1_CL_.tar", partition_seconds=1)
    run.go()
    assert [partition.rows for partition in run.plan.partitions] == [4, 2]  # a partition per tar
    lost = f"{tmp_path}/audio_0.tar has no such member"
    assert [row.get("error", row.get("audio_filepath")) for row in run.rows()][:4] == [
        "corpus_000.wav",
        "corpus_001.wav",
        lost,
        "corpus_003.wav",
    ]
    other = Run(tmp_path, str(tmp_path / "corpus.json"), tars=f"{tmp_path}/audio_0.tar", out="other")
    other.go()
    errors = [row["error"] for row in other.rows() if "error" in row]
    assert sum("shard_id is 1, expected 0 .. 0, a file of tarred_audio" in error for error in errors) == 2


@pytest.mark.parametrize("place", ["files", "urls", "tar"])
def test_parts_of_a_file_are_rows_of_their_own(place, tmp_path, corpus, monkeypatch):
    corpus(3)
    name = {"files": "audio/corpus_002.wav", "urls": "memory://audio/corpus_002.wav", "tar": "corpus_002.wav"}[place]
    parts = [{"offset": 0.5, "duration": 1}, {"offset": 1.5}, {"offset": 3.25, "duration": 1}, {"duration": 1}]
    names = [name, name.replace(".wav", "-sub1.wav"), name.replace(".wav", "-sub2.wav"), name]
    names = names if place == "tar" else [name] * 4
    rows = [{"audio_filepath": own, "speaker": n, **part} for n, (own, part) in enumerate(zip(names, parts))]  # noqa: B905
    (tmp_path / "parts.json").write_text("\n".join(map(json.dumps, rows)))
    fs = fsspec.filesystem("memory")
    fs.put_file(str(tmp_path / "audio" / "corpus_002.wav"), "/audio/corpus_002.wav")
    with tarfile.open(tmp_path / "audio.tar", "w") as archive:
        archive.add(tmp_path / "audio" / "corpus_002.wav", "corpus_002.wav")
    run = Run(tmp_path, str(tmp_path / "parts.json"), tars=f"{tmp_path}/audio.tar" if place == "tar" else None)
    assert sum(part.seconds for part in run.plan.partitions) == (3 if place == "tar" else 4.5)
    fetched, get_file = [], type(fs).get_file
    monkeypatch.setattr(type(fs), "get_file", lambda *given, **more: fetched.append(1) or get_file(*given, **more))
    try:
        (totals,) = run.go()
    finally:
        fs.rm("/audio", recursive=True)
    assert len(fetched) == (place == "urls")
    first, rest, behind, whole = run.rows()
    stem = "0" if place == "tar" else "corpus_002"
    assert [row["pred_text"] for row in (first, rest, whole)] == [f"{stem} at 0.5 - 1.5 s", f"{stem} at 1.5 s", stem]
    assert [row["duration"] for row in (first, rest, behind, whole)] == [1, 1.5, 1, 3]
    assert [row.get("offset") for row in (first, rest, behind, whole)] == [0.5, 1.5, 3.25, None]
    assert behind["error"] == f"line 3: offset is 3.25, expected a number < 3.0, the seconds of {names[2]}"
    assert (totals.rows, totals.errors, totals.audio) == (4, 1, 5.5)


def test_damaged_tar_loses_only_members_after_the_damage(tmp_path, corpus):
    manifest = corpus(6)
    tar = tmp_path / "audio.tar"
    with tarfile.open(tar, "w") as archive:
        for n in range(6):
            name = f"audio/corpus_{n:03d}.wav"
            archive.add(tmp_path / name, name)
    tar.write_bytes(tar.read_bytes()[:60000])
    run = Run(tmp_path, manifest, tars=str(tar))
    (totals,) = run.go()
    assert 1 <= totals.errors <= 5
    rows = run.rows()
    assert [row["text"] for row in rows] == expected(("corpus", 6))
    assert all(str(tar) in row["error"] for row in rows[-totals.errors :])
    with pytest.raises(ValueError, match=r"audio\.tar needs the manifest of the tar files, manifest is null"):
        Run(tmp_path, None, audio=str(tmp_path / "audio"), tars=str(tar), out="other")


@pytest.mark.parametrize("tarred", [None, "audio.tar"])
def test_bad_rows_cost_themselves_only(tarred, tmp_path, corpus):
    manifest = Path(corpus(2))
    names = [json.loads(line)["audio_filepath"] for line in manifest.read_text().splitlines()]
    if tarred:
        with tarfile.open(tmp_path / tarred, "w") as tar:
            for name in names:
                tar.add(tmp_path / name, name)
    bad = {
        "not JSON": "{",
        "has no audio_filepath": json.dumps({"uid": 3}),
        "duration is -1": json.dumps({"audio_filepath": names[0], "duration": -1, "uid": 4}),
        "phrases is 5": json.dumps({"audio_filepath": names[0], "phrases": 5}),
        "offset is '1'": json.dumps({"audio_filepath": names[0], "offset": "1"}),
        "half of a surrogate pair": json.dumps({"audio_filepath": names[0], "note": "\ud83d"}),
    }
    if tarred:
        bad["shard_id is 7"] = json.dumps({"audio_filepath": names[0], "shard_id": 7, "duration": 1})
    good = manifest.read_text().splitlines()
    manifest.write_text("\n".join([good[0], *bad.values(), good[1]]))
    run = Run(tmp_path, str(manifest), **({"tars": str(tmp_path / tarred)} if tarred else {}))
    run.go()
    rows = run.rows()
    assert [row["line"] for row in rows] == list(range(1, len(bad) + 3))
    assert [bool(row.get("pred_text")) for row in rows] == [True, *[False] * len(bad), True]
    for row, problem in zip(rows[1:-1], bad, strict=True):
        assert f"line {row['line']}: " in row["error"]
        assert problem in row["error"]
    assert (rows[2]["uid"], rows[3]["uid"]) == (3, 4)


def test_partitions_limit_rows_without_durations(tmp_path):
    row = json.dumps({"audio_filepath": "nowhere.wav"})
    (tmp_path / "many.json").write_text(f"{row}\n" * (MAX_ROWS + 1))
    assert [part.rows for part in Run(tmp_path, str(tmp_path / "many.json")).plan.partitions] == [MAX_ROWS, 1]


def test_batches_have_similar_durations():
    durations = [1.0, 9.0, 2.0, 8.0, 30.0, 1.5]
    utterances = [Utterance("", ROOT, seconds) for seconds in durations] + [Utterance("", ROOT, 9.0, fault="damaged")]
    assert list(batches(utterances, 2, None)) == [[6], [4, 1], [3, 2], [5, 0]]
    assert list(batches(utterances, 2, 20.0)) == [[6], [4], [1, 3], [2, 5, 0]]  # 30; 2 * 9; 3 * 2 seconds


# ---------------------------------------------------------------------------------- on a Ray of two workers
DRIVER = """
import sys
from pathlib import Path
from nemo_gpu_decoding.cluster.run import Workers
from tests.cluster.test_run import Run

Run(Path(sys.argv[1]), sys.argv[2], partition_seconds=2).go(Workers("local", 2, 2))
"""


def family_of(pid):
    """A process and all below it."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def wait_for(what, seconds=180):  # busy machines start Ray slowly
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def resumed(command, **options):
    """Exit status of a run that goes on. A Ray that does not start is killed once: the run goes on from there."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return subprocess.run(command, check=False, timeout=180, **options).returncode
    return subprocess.run(command, check=False, timeout=180, **options).returncode


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks for processes in /proc")
def test_killed_workers_and_driver_lose_no_utterance(tmp_path, corpus):
    pytest.importorskip("ray.data")
    manifest = corpus(240)
    environment = {**os.environ, "RAY_worker_niceness": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", DRIVER, str(tmp_path), manifest]

    def done():
        return len(list((tmp_path / "out").glob("part-*.done")))

    driver = subprocess.Popen(command, env=environment, cwd=ROOT)
    wait_for(lambda: done() >= 3 or driver.poll() is not None)
    worker, *others = map(int, os.listdir(tmp_path / "pids"))
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: len(os.listdir(tmp_path / "pids")) >= 2 + len(others))  # another one has taken its place
    family = family_of(driver.pid)
    for pid in [driver.pid, *(family - {driver.pid})]:  # the driver, and Ray's processes: the machine is gone
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert driver.wait() == -signal.SIGKILL
    assert 3 <= done() < 120
    assert resumed(command, env=environment, cwd=ROOT) == 0
    run = Run(tmp_path, manifest, partition_seconds=2, load=fake.broken)
    assert [row["pred_text"] for row in run.rows()] == expected(("corpus", 240))
    assert sum(totals.rows for totals in run.go()) == 240


@pytest.mark.slow
def test_error_of_a_worker_takes_one_line(tmp_path, corpus, monkeypatch):
    pytest.importorskip("ray.data")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    run = Run(tmp_path, corpus(2), load=fake.broken)
    with pytest.raises(ValueError, match=r"beam\.beam_size is 0"):
        run.go()
    with pytest.raises(ValueError, match=r"beam\.beam_size is 0"):
        run.go(Workers("local", 2, 2))


def test_missing_ray_is_named(tmp_path, corpus, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'nemo-gpu-decoding\[cluster\]'"):
        Run(tmp_path, corpus(2)).go(Workers("local", 2, 2))


def test_the_first_decoding_of_a_machine_is_that_of_one_process(tmp_path):
    """Other workers wait for it, so that one of them compiles."""
    held = []

    class Noting(fake.FakeModel):
        def encode(self, files, batch_size):
            held.append(is_held(cache_folder() / "workers.lock"))
            return super().encode(files, batch_size)

        def decode(self, outputs, requests=()):
            held.append(is_held(cache_folder() / "workers.lock"))
            return super().decode(outputs, requests)

    Worker(Job(str(tmp_path), Noting, ()))
    assert held == [True, True]
    assert not is_held(cache_folder() / "workers.lock")
