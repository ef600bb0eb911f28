"""Live streams, LMs of any size, and what is measured in processes of their own."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import cluster, probe, scale
from benchmarks.clock import find_hardware
from benchmarks.live import Chunk, InSlots, OneByOne, Queue, Server, frames_of_chunk
from benchmarks.ours import flexctc_beam
from benchmarks.peers.base import Setting
from benchmarks.probe import probe_process
from benchmarks.run import run

pytestmark = pytest.mark.slow
FIXED = 0.01  # seconds
CPU = find_hardware("cpu", 1)
needs_proc = pytest.mark.skipif(not probe.CLEAR_REFS.exists(), reason="reads Linux's /proc")


@pytest.fixture
def live_options(tiny_options):
    return replace(
        tiny_options, mode="live", streams=[3], live_seconds=2.0, sentences=300, encoder_width=64,
        prediction_width=64, transducers=["tdt"], peers=["nemo"], utterances=4,
    )  # fmt: skip


# --------------------------------------------------------------------------------------- the queue
def chunk_at(time: float, stream: int) -> Chunk:
    return Chunk(time, stream, 0, 0, 5, is_last=False)


def served(queue: Queue) -> Queue:
    queue.run()
    return queue


def test_queue_batches_waiting_chunks():
    chunks = [chunk_at(*c) for c in ((0.0, 0), (0.1, 1), (0.2, 2), (0.3, 1), (5.0, 0))]
    steps = []
    queue = served(Queue(chunks, lambda batch: steps.append([c.stream for c in batch]) or 1.0))
    assert steps == [[0], [1, 2], [1], [0]]  # never two chunks of a stream at once
    assert [one.begin - one.chunk.time for one in queue.served] == pytest.approx([0.0, 0.9, 0.8, 1.7, 0.0])
    assert [one.end - one.begin for one in queue.served] == pytest.approx([1.0] * 5)
    assert [one.batch for one in queue.served] == [1, 2, 2, 1, 1]
    figures = queue.figures()
    assert figures["load"] == pytest.approx(4 / 6)
    assert figures["batch"] == {"mean": pytest.approx(5 / 4), "max": 2}
    assert figures["latency"]["partial"]["p50"] == pytest.approx(1.8)
    assert figures["latency"]["final"] == {"p50": None, "p99": None}
    assert figures["mean"] == {"queue": pytest.approx(3.4 / 5), "compute": pytest.approx(1.0)}
    assert queue.streams_per_core(0.08) == pytest.approx(5 * 5 * 0.08 / 4)


def test_queue_that_cannot_keep_up_is_given_up():
    chunks = [chunk_at(0.1 * i, i) for i in range(1000)]
    queue = served(Queue(chunks, lambda batch: 0.2, 1))
    assert not queue.keeps_up
    assert len(queue.served) < 50
    assert queue.figures()["latency"]["partial"] == {"p50": None, "p99": None}
    assert queue.figures()["mean"] == {"queue": None, "compute": None}
    assert queue.figures()["load"] == pytest.approx(1.0)
    assert queue.streams_per_core(0.08) == pytest.approx(5 * 0.08 / 0.2)
    assert served(Queue(chunks, lambda batch: 0.2)).keeps_up  # as steps of several chunks


@pytest.mark.parametrize("load", [0.2, 0.5, 0.8])
def test_queue_wait_equals_the_md1_formula(load):
    """M/D/1 [CUDA-WFST, Kendall 1953]: of chunks that all take D the mean wait is load * D / (2 * (1 - load))."""
    rng, rate = np.random.default_rng(0), load / FIXED
    times = np.cumsum(rng.exponential(1 / rate, 40_000))
    queue = served(Queue([chunk_at(time, i) for i, time in enumerate(times)], lambda batch: FIXED, 1))
    waited = np.mean([one.begin - one.chunk.time for one in queue.served])
    assert waited == pytest.approx(load * FIXED / (2 * (1 - load)), rel=0.1)
    assert queue.figures()["load"] == pytest.approx(load, rel=0.03)


# ------------------------------------------------------------------------------------- the decoders
@pytest.mark.parametrize("strategy", ["flexctc_beam", "alsd_pp"])
def test_live_rows_are_verified_and_have_latencies(live_options, strategy, tmp_path, capsys):
    pytest.importorskip("nemo")
    rows = run(replace(live_options, strategy=strategy, out=str(tmp_path)))
    (path,) = tmp_path.iterdir()
    assert path.name.startswith(f"{strategy}-live-")
    written = json.loads(path.read_text())
    assert (written["rows"], written["mode"]) == (rows, "live")
    assert [row["peer"] for row in rows] == [strategy, "one_by_one", "nemo_greedy"]
    for row in rows:
        assert row["verified"], row["verified_by"]
        assert row["chunk_seconds"] == pytest.approx(0.4)
        assert row["keeps_up"]
        for text in row["latency"].values():
            assert 0 < text["p50"] <= text["p99"]
        assert 0 < row["load"] < 1
        assert row["streams_per_core"] > 0
        assert row["networks"] == ("tdt" if strategy == "alsd_pp" else None)
    assert (rows[0]["ratio"], rows[1]["batch"]["max"]) == (1.0, 1)
    assert "partial p99" in capsys.readouterr().out


class Deaf(InSlots):
    def step(self, streams, chunks, over):
        if len(chunks) > 1:
            chunks = [chunks[0][:0], *chunks[1:]]
        return super().step(streams, chunks, over)


@pytest.mark.parametrize("kind", [InSlots, OneByOne, Deaf])
def test_lost_chunk_is_not_verified(tiny_task, tiny_options, kind):
    decoder = flexctc_beam(tiny_options, tiny_task, Setting(4, lm=True)).decoder
    server = Server(kind(decoder, 2) if kind is not OneByOne else OneByOne(decoder, 2), tiny_task, CPU)
    # of two utterances of one text one is heard from its middle on, one is not over
    for begin, is_last in ((0, False), (10, True)):
        chunks = [Chunk(0.0, 0, 0, begin, begin + 10, False), Chunk(0.0, 1, 1, 10 + begin, 20 + begin, is_last)]
        for some in [chunks] if kind is not OneByOne else [[chunk] for chunk in chunks]:
            assert server.serve(some) >= 0
    assert list(server.equal_to_one_piece()) == ([False, True] if kind is Deaf else [True, True])


def test_chunk_ms_without_whole_frames_is_refused(live_options):
    assert frames_of_chunk(400.0, 0.08) == 5
    assert frames_of_chunk(160.0, 0.04) == 4
    for chunk_ms in (100.0, 20.0):
        with pytest.raises(ValueError, match="expected a whole number of frames of 80 ms"):
            frames_of_chunk(chunk_ms, 0.08)
    with pytest.raises(ValueError, match=r"live_seconds is 0.0001, in which no chunk came"):
        run(replace(live_options, live_seconds=0.0001))


# ----------------------------------------------------------------------------------- LMs of any size
def test_scale_rows_of_all_stages(tiny_options, tmp_path, monkeypatch, capsys):
    pytest.importorskip("kaldifst")

    def in_this_process(name, options, **arguments):
        answer = getattr(scale, name.partition(":")[2])(options, **arguments)
        return answer, {"seconds": {"cpu": 1.0, "wall": 1.0}, "memory": {"peak_rss": 1 << 30, "peak_anonymous": None}}

    monkeypatch.setattr(scale, "in_process", in_this_process)
    out = tmp_path / "r.json"
    changes = {"ngrams": 2000, "graph_beams": [20], "weights": {"small_share": 0.05}, "tasks": ["peaked", "hard"]}
    rows = run(replace(
        tiny_options, strategy="paged_biglm", mode="scale", folder=str(tmp_path), out=str(out), **changes
    ))  # fmt: skip
    written = json.loads(out.read_text())
    assert written["rows"] == json.loads(json.dumps(rows))
    assert written["mode"] == "scale"
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
    by_stage = {row["stage"]: row for row in rows if row["task"] == "peaked"}
    assert len(by_stage) == 5
    assert len(rows) == 10
    generated, packed, graph = (by_stage[stage] for stage in ("generate", "pack", "graph"))
    assert packed["ngrams"] == sum(generated["counts"])
    assert 0.95 * changes["ngrams"] < packed["ngrams"] <= changes["ngrams"]
    assert packed["repaired"] == 0  # the suffixes of each n-gram are in the LM
    assert graph["graph"]["ngrams"] < packed["ngrams"] / 10
    assert packed["bytes"] < generated["bytes"]
    share = 1 - packed["arrays"]["arcs"] / sum(packed["arrays"].values())
    assert packed["paged"]["device_share"] == pytest.approx(share)
    assert by_stage["paged_biglm"]["work_per_frame"]["look_ups"] > 0
    assert by_stage["small_lm"]["work_per_frame"] == {}
    for row in rows:
        if row["stage"] in ("small_lm", "paged_biglm"):
            assert row["verified"], row["verified_by"]
            assert row["frames_per_second"] > 0
            assert 0 <= row["wer"] <= 100
    printed = capsys.readouterr().out
    assert "% of it on a GPU if paged" in printed
    assert "look-ups per frame, verified: yes" in printed


# ------------------------------------------------------------------------- processes of their own
@pytest.fixture
def runs(tiny_options, tmp_path, monkeypatch):
    """mode=cluster with two runs, neither of which needs Ray."""
    monkeypatch.setattr(cluster, "RUNS", dict.fromkeys(("alone", "again"), cluster.Workers()))
    changes = {"partitions": 10, "partition_size": 3, "repeats": 1, "tasks": tiny_options.tasks[:1]}
    return replace(
        tiny_options, mode="cluster", beams=[4], folder=str(tmp_path), out=str(tmp_path / "r.json"), **changes
    )


def test_cluster_rows_have_seconds_per_utterance(runs, tmp_path, capsys):
    run(runs)
    assert "ms per utterance, all processes" in capsys.readouterr().out
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [(row["run"], row["utterances"], row["verified"]) for row in rows] == [
        ("alone", 30, True),
        ("again", 30, True),
    ]
    assert all(0 < row["work"] < row["per_utterance"] and row["start"] > 0 for row in rows)


def test_cluster_runs_with_other_transcripts_are_refused(runs, monkeypatch):
    decode, seen = cluster.EmissionModel.decode, []

    def decoded(model, outputs, **others):
        for transcript in decode(model, outputs, **others):
            seen.append(transcript)
            yield replace(transcript, text="x") if len(seen) == 50 else transcript

    monkeypatch.setattr(cluster.EmissionModel, "decode", decoded)
    with pytest.raises(ValueError, match="again has written other transcripts than alone"):
        run(runs)


@needs_proc
def test_memory_grows_with_frames_and_beam_but_not_with_the_vocabulary(tiny_options):
    options = replace(tiny_options, utterances=16, vocab_size=512, min_frames=100, max_frames=200, sentences=50)
    result = probe_process("memory", options)  # in a process that has no freed memory to hide it in
    assert set(result["peak_bytes"]) == {str(beam) for beam in probe.MEMORY_BEAMS}
    assert 4 < result["bytes_per_frame_and_slot"] < 64  # the vocabulary would cost 512 * 4
