"""Live streams, LMs of any size, and what is measured in processes of their own."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.bench import cluster, probe, scale, streams
from nemo_gpu_decoding.bench.clock import find_hardware
from nemo_gpu_decoding.bench.ours import flexctc_beam
from nemo_gpu_decoding.bench.peers.base import Setting
from nemo_gpu_decoding.bench.probe import STATUS, in_process, measure_memory, measure_start, probe_process
from nemo_gpu_decoding.bench.run import run
from nemo_gpu_decoding.bench.streams import (
    Chunk,
    Recording,
    Replay,
    draw_arrivals,
    frames_of_chunk,
    md1,
    measure_streams,
    simulate,
)

FIXED = 0.01  # seconds
CPU = find_hardware("cpu", 1)
needs_proc = pytest.mark.skipif(not probe.CLEAR_REFS.exists(), reason="reads Linux's /proc")


@pytest.fixture
def live(tiny_options):
    return replace(
        tiny_options, mode="stream", streams=[2, 3], stream_seconds=2.0, sentences=300, encoder_width=64,
        prediction_width=64, transducers=["tdt"],
    )  # fmt: skip


# --------------------------------------------------------------------------------------- the queue


def test_chunks_wait_for_the_batch_before_them_and_go_together():
    arrivals = [Chunk(0.0, 0), Chunk(0.1, 1), Chunk(0.2, 2), Chunk(0.3, 1), Chunk(5.0, 0)]
    batches = []
    seen = simulate(arrivals, lambda streams: batches.append(streams) or 1.0)
    assert batches == [[0], [1, 2], [1], [0]]  # never two chunks of a stream at once
    assert seen.queue == pytest.approx([0.0, 0.9, 0.8, 1.7, 0.0])
    assert seen.compute.tolist() == [1.0] * 5
    assert seen.batches.tolist() == [1, 2, 1, 1]
    assert (seen.busy, seen.span) == (4.0, 6.0)


def test_batches_have_a_limit_and_the_longest_waiting_go_first():
    batches = []
    arrivals = [Chunk(0.0, stream) for stream in range(5)]
    simulate(arrivals, lambda streams: batches.append(streams) or 1.0, max_batch=2)
    assert batches == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("utilisation", [0.2, 0.5, 0.8])
def test_without_batching_the_queue_is_the_formulas(utilisation):
    rate = utilisation / FIXED
    arrivals = draw_arrivals(8, 8 / rate, 40_000 / rate, np.random.default_rng(0))
    seen = simulate(arrivals, lambda streams: FIXED, max_batch=1)
    formula = md1(rate, FIXED)
    assert formula["utilisation"] == pytest.approx(utilisation)
    assert seen.busy / seen.span == pytest.approx(utilisation, rel=0.03)
    assert seen.queue.mean() == pytest.approx(formula["queue"], rel=0.1)
    assert (seen.queue + seen.compute).mean() == pytest.approx(formula["total"], rel=0.06)


def test_batching_keeps_up_where_one_by_one_cannot():
    rate = 2 / FIXED
    assert (md1(rate, FIXED)["queue"], md1(rate, FIXED)["total"]) == (None, None)
    arrivals = draw_arrivals(100, 100 / rate, 10.0, np.random.default_rng(1))
    seen = simulate(arrivals, lambda streams: FIXED)
    assert (seen.queue + seen.compute).max() < 3 * FIXED


def test_arrivals_are_a_poisson_process_of_all_streams():
    arrivals = draw_arrivals(10, 0.4, 400.0, np.random.default_rng(2))
    gaps = np.diff([chunk.time for chunk in arrivals])
    assert (gaps >= 0).all()
    assert len(arrivals) == pytest.approx(10_000, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)  # as exponential gaps have it
    assert np.bincount([chunk.stream for chunk in arrivals], minlength=10).min() > 800


# ------------------------------------------------------------------------------------- the decoders


class Counting:
    """A decoder that remembers what it was given."""

    def __init__(self):
        self.pushed, self.asked = [], []

    def open(self, n):
        return n

    def push(self, streams, log_probs, lengths):
        self.pushed.append((log_probs.clone(), lengths.tolist()))

    def partial(self, streams, rows=None):
        self.asked.append(rows)


def test_streams_hear_the_tape_from_their_own_utterance_on(tiny_task):
    recording, decoder = Recording(tiny_task), Counting()
    replay = Replay(decoder, recording, 3, 5, "none", CPU)
    for speaking in ([0, 1], [1], [2, 1]):
        assert replay.serve(speaking) >= 0
    assert [lengths for _, lengths in decoder.pushed] == [[5, 5, 0], [0, 5, 0], [0, 5, 5]]
    first, second = tiny_task.inputs
    assert torch.equal(decoder.pushed[0][0][0], first[:5])
    assert torch.equal(torch.cat([chunk[1] for chunk, _ in decoder.pushed]), second[:15])
    assert torch.equal(decoder.pushed[2][0][2], first[:5])  # of two utterances stream 2 has the first
    begin, end = tiny_task.lengths.tolist()
    assert torch.equal(recording.read(1, end - 1, 2), torch.stack([second[end - 1], first[0]]))
    assert torch.equal(recording.read(0, begin, 1), second[:1])
    assert decoder.asked == []


@pytest.mark.parametrize(("texts", "asked"), [("none", []), ("all", [None, None]), ("own", [[1], [0, 1]])])
def test_partial_results_are_asked_for_after_each_batch(tiny_task, texts, asked):
    decoder = Counting()
    replay = Replay(decoder, Recording(tiny_task), 2, 5, texts, CPU)
    replay.serve([1])
    replay.serve([0, 1])
    assert [lengths for _, lengths in decoder.pushed] == [[0, 5], [5, 5]]
    assert decoder.asked == asked


@pytest.mark.parametrize("strategy", ["flexctc_beam", "cuda_wfst", "alsd_pp"])
def test_streams_of_all_strategies(live, strategy, tmp_path, monkeypatch, capsys):
    if strategy == "cuda_wfst":
        pytest.importorskip("kaldifst")
    monkeypatch.setattr(streams, "ALONE", 8)
    texts = ["none", "own", "all"]
    rows = run(replace(live, strategy=strategy, texts=texts, out=str(tmp_path), tasks=["synthetic", "speech"]))
    (path,) = tmp_path.iterdir()
    assert path.name.startswith(f"{strategy}-stream-")
    written = json.loads(path.read_text())
    assert written["rows"] == rows
    assert written["mode"] == "stream"
    expected = [(n, kind) for _ in range(2) for kind in texts for n in (2, 3)]
    assert [(row["streams"], row["texts"]) for row in rows] == expected
    for row in rows:
        assert row["verified"], row["verified_by"]
        assert row["chunk_seconds"] == pytest.approx(0.4)
        latency = row["latency"]
        total = latency["compute"]["mean"] + latency["queue"]["mean"]
        assert latency["total"]["mean"] == pytest.approx(total)
        assert 0 < latency["compute"]["p50"] <= latency["compute"]["p99"] <= latency["total"]["p99"]
        assert 0 < row["utilisation"] <= 1
        assert row["md1"]["alone"]["service"] > 0
        assert row["networks"] == ("tdt" if strategy == "alsd_pp" else None)
    printed = capsys.readouterr().out
    assert "M/D/1 alone" in printed
    assert "event-driven, fed with the cpu seconds" in printed


def test_a_stream_that_was_harmed_is_not_verified(tiny_task, live, monkeypatch):
    decoder = flexctc_beam(live, tiny_task, Setting(4, lm=True)).decoder
    close = Replay.close

    def harmed(self):
        self._heard[1] -= 5  # a chunk that should not have been there
        return close(self)

    monkeypatch.setattr(Replay, "close", harmed)
    row = measure_streams(live, decoder, tiny_task, CPU, 2, "none")
    assert not row["verified"]
    assert row["verified_by"] == "equal to decoding in one piece: 1 of 2 streams"


def test_a_chunk_is_a_whole_number_of_frames():
    assert frames_of_chunk(400.0, 0.08) == 5
    assert frames_of_chunk(160.0, 0.04) == 4
    for chunk_ms in (100.0, 20.0):
        with pytest.raises(ValueError, match="expected a whole number of frames of 80 ms"):
            frames_of_chunk(chunk_ms, 0.08)


def test_too_little_audio_for_a_chunk_is_an_error(live):
    with pytest.raises(ValueError, match=r"stream_seconds is 0.0001, in which no chunk came"):
        run(replace(live, stream_seconds=0.0001))


# ----------------------------------------------------------------------------------- LMs of any size


def test_rows_of_all_stages(tiny_options, tmp_path, monkeypatch, capsys):
    pytest.importorskip("kaldifst")

    def in_this_process(name, options, **arguments):
        answer = getattr(scale, name.partition(":")[2])(options, **arguments)
        memory = {"peak_rss": 1 << 30, "peak_anonymous": None}
        return answer, {"seconds": {"cpu": 1.0, "wall": 1.0}, "memory": memory}

    monkeypatch.setattr(scale, "in_process", in_this_process)
    out = tmp_path / "r.json"
    changes = {"ngrams": 2000, "graph_beams": [20], "weights": {"small_share": 0.05}, "tasks": ["synthetic", "speech"]}
    rows = run(replace(
        tiny_options, strategy="paged_biglm", mode="scale", folder=str(tmp_path), out=str(out), **changes
    ))  # fmt: skip
    written = json.loads(out.read_text())
    assert written["rows"] == json.loads(json.dumps(rows))
    assert written["mode"] == "scale"
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
    by_stage = {(row["stage"], row.get("layout")): row for row in rows if row["task"] == "synthetic"}
    assert len(by_stage) == 7
    assert len(rows) == 14
    generated, graph = by_stage["generate", None], by_stage["graph", None]
    exact, quantised = by_stage["pack", "exact"], by_stage["pack", "quantised"]
    assert exact["ngrams"] == quantised["ngrams"] == sum(generated["counts"])
    assert graph["graph"]["ngrams"] < exact["ngrams"] / 10
    assert quantised["bytes"] < exact["bytes"] < generated["bytes"]
    for row in (exact, quantised):
        share = 1 - row["arrays"]["arcs"] / sum(row["arrays"].values())
        assert row["paged"]["device_share"] == pytest.approx(share)
    assert by_stage["paged_biglm", "exact"]["work_per_frame"]["look_ups"] > 0
    assert by_stage["small_lm", None]["work_per_frame"] == {}
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


def test_what_an_engine_costs_beside_one_process(runs, tmp_path, capsys):
    run(runs)
    assert "ms per utterance, all processes" in capsys.readouterr().out
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [(row["run"], row["utterances"], row["verified"]) for row in rows] == [
        ("alone", 30, True),
        ("again", 30, True),
    ]
    assert all(0 < row["work"] < row["per_utterance"] and row["start"] > 0 for row in rows)


def test_runs_that_differ_are_no_benchmark(runs, monkeypatch):
    decode, seen = cluster.EmissionModel.decode, []

    def decoded(model, outputs, **others):
        for transcript in decode(model, outputs, **others):
            seen.append(transcript)
            yield replace(transcript, text="x") if len(seen) == 50 else transcript

    monkeypatch.setattr(cluster.EmissionModel, "decode", decoded)
    with pytest.raises(ValueError, match="again has written other transcripts than alone"):
        run(runs)


def test_a_stage_has_a_process_of_its_own(tiny_options, tmp_path):
    options = replace(tiny_options, ngrams=2000)
    answer, took = in_process("scale:generate", options, folder=str(tmp_path), task="synthetic")
    assert answer["bytes"] == (tmp_path / scale.LARGE).stat().st_size
    assert took["seconds"]["cpu"] > 0
    if STATUS.exists():
        memory = took["memory"]
        assert 1 << 20 < memory["peak_anonymous"] < memory["peak_rss"]


def test_a_process_that_fails_shows_why(tiny_options, tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho no space left >&2\nexit 1\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(RuntimeError, match=r"scale:pack failed in a process of its own:\nno space left"):
        in_process("scale:pack", tiny_options)
    with pytest.raises(RuntimeError, match="probe:measure_memory failed"):
        probe_process("memory", tiny_options)


@needs_proc
def test_memory_grows_with_frames_and_beam_but_not_with_the_vocabulary(tiny_options):
    options = replace(tiny_options, utterances=16, vocab_size=512, min_frames=100, max_frames=200, sentences=50)
    result = probe_process("memory", options)  # in a process that has no freed memory to hide it in
    assert set(result["peak_bytes"]) == {str(beam) for beam in probe.MEMORY_BEAMS}
    assert 4 < result["bytes_per_frame_and_slot"] < 64  # the vocabulary would cost 512 * 4


def test_a_system_without_proc_is_told_so(tiny_options, monkeypatch, tmp_path):
    monkeypatch.setattr(probe, "CLEAR_REFS", tmp_path / "nothing")
    assert "skipped" in measure_memory(tiny_options)


def test_starting_is_timed_by_its_parts(tiny_options):
    seconds = measure_start(tiny_options)
    assert list(seconds) == ["import", "load", "first_decode", "next_decode"]
    assert all(value >= 0 for value in seconds.values())
