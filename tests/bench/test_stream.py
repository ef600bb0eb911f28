"""Live streams: the simulated queue against the formula, the decoders behind it, rows and plots."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.run import run
from nemo_gpu_decoding.bench.stream.queueing import Chunk, draw_arrivals, md1, simulate
from nemo_gpu_decoding.bench.stream.replay import Replay, Tape, equal_results
from nemo_gpu_decoding.bench.stream.run import frames_of_chunk

FIXED = 0.01  # seconds


@pytest.fixture
def options(tiny_options):
    return replace(
        tiny_options, mode="stream", streams=[2, 3], stream_seconds=2.0, graph_sentences=300,
        encoder_width=64, prediction_width=64, transducers=["tdt"],
    )  # fmt: skip


# --------------------------------------------------------------------------------------- the queue


def test_chunks_wait_for_the_batch_before_them_and_go_together():
    arrivals = [Chunk(0.0, 0), Chunk(0.1, 1), Chunk(0.2, 2), Chunk(0.3, 1), Chunk(5.0, 0)]
    batches = []

    def serve(streams):
        batches.append(streams)
        return 1.0

    seen = simulate(arrivals, serve)
    assert batches == [[0], [1, 2], [1], [0]]  # never two chunks of a stream at once
    assert seen.queue == pytest.approx([0.0, 0.9, 0.8, 1.7, 0.0])
    assert seen.compute.tolist() == [1.0] * 5
    assert seen.total == pytest.approx(seen.queue + 1.0)
    assert seen.batches.tolist() == [1, 2, 1, 1]
    assert (seen.busy, seen.span) == (4.0, 6.0)
    assert seen.utilisation == pytest.approx(4 / 6)


def test_batches_have_a_limit_and_the_longest_waiting_go_first():
    arrivals = [Chunk(0.0, stream) for stream in range(5)]
    batches = []
    simulate(arrivals, lambda streams: batches.append(streams) or 1.0, max_batch=2)
    assert batches == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("utilisation", [0.2, 0.5, 0.8])
def test_without_batching_the_queue_is_the_formulas(utilisation):
    rate = utilisation / FIXED
    arrivals = draw_arrivals(8, 8 / rate, 40_000 / rate, np.random.default_rng(0))
    seen = simulate(arrivals, lambda streams: FIXED, max_batch=1)
    formula = md1(rate, FIXED)
    assert formula["utilisation"] == pytest.approx(utilisation)
    assert seen.utilisation == pytest.approx(utilisation, rel=0.03)
    assert seen.queue.mean() == pytest.approx(formula["queue"], rel=0.1)
    assert seen.total.mean() == pytest.approx(formula["total"], rel=0.06)


def test_batching_keeps_up_where_one_by_one_cannot():
    rate = 2 / FIXED
    formula = md1(rate, FIXED)
    assert formula["queue"] is None
    assert formula["total"] is None
    arrivals = draw_arrivals(100, 100 / rate, 10.0, np.random.default_rng(1))
    seen = simulate(arrivals, lambda streams: FIXED)
    assert seen.total.max() < 3 * FIXED


def test_arrivals_are_a_poisson_process_of_all_streams():
    arrivals = draw_arrivals(10, 0.4, 400.0, np.random.default_rng(2))
    times = np.array([chunk.time for chunk in arrivals])
    gaps = np.diff(times)
    assert (gaps >= 0).all()
    assert len(arrivals) == pytest.approx(10_000, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)  # as exponential gaps have it
    counts = np.bincount([chunk.stream for chunk in arrivals], minlength=10)
    assert counts.min() > 800


# ------------------------------------------------------------------------------------ the decoders


class Counting:
    """A decoder that remembers what it was given."""

    def __init__(self):
        self.pushed, self.asked = [], 0

    def open(self, n):
        return n

    def push(self, streams, log_probs, lengths):
        self.pushed.append((log_probs.clone(), lengths.tolist()))

    def partial(self, streams):
        self.asked += 1


def test_streams_hear_the_tape_from_their_own_utterance_on(tiny_task):
    tape, decoder = Tape(tiny_task), Counting()
    replay = Replay(decoder, tape, 3, 5, texts="none", threads=1)
    for streams in ([0, 1], [1], [2, 1]):
        assert replay.serve(streams) >= 0
    assert [lengths for _, lengths in decoder.pushed] == [[5, 5, 0], [0, 5, 0], [0, 5, 5]]
    first, second = tiny_task.log_probs
    assert torch.equal(decoder.pushed[0][0][0], first[:5])
    heard = torch.cat([chunk[1] for chunk, _ in decoder.pushed])
    assert torch.equal(heard, second[:15])
    assert torch.equal(decoder.pushed[2][0][2], first[:5])  # of two utterances stream 2 has the first
    begin, end = tiny_task.lengths.tolist()
    assert torch.equal(tape.read(1, end - 1, 2), torch.stack([second[end - 1], first[0]]))
    assert torch.equal(tape.read(0, begin, 1), second[:1])
    assert decoder.asked == 0


@pytest.mark.parametrize(("texts", "pushes", "asked"), [("none", 2, 0), ("all", 2, 2), ("own", 3, 3)])
def test_partial_results_are_asked_for_after_each_batch(tiny_task, texts, pushes, asked):
    decoder = Counting()
    replay = Replay(decoder, Tape(tiny_task), 2, 5, texts=texts, threads=2)
    replay.serve([1])
    replay.serve([0, 1])
    assert len(decoder.pushed) == pushes
    assert decoder.asked == asked
    _, second = tiny_task.log_probs
    assert torch.equal(decoder.pushed[-1][0][-1], second[5:10])


def test_decoders_that_tell_single_streams_hear_all_of_them_together(tiny_task):
    asked = []

    class Telling(Counting):
        def partial(self, streams, rows):
            asked.append(rows)

    decoder = Telling()
    replay = Replay(decoder, Tape(tiny_task), 2, 5, texts="own", threads=1, tells_rows=True)
    replay.serve([1])
    replay.serve([0, 1])
    assert [lengths for _, lengths in decoder.pushed] == [[0, 5], [5, 5]]
    assert asked == [[1], [0, 1]]


@pytest.mark.parametrize("strategy", ["flexctc_beam", "cuda_wfst", "alsd_pp"])
def test_rows_of_all_strategies(options, strategy, tmp_path, capsys):
    if strategy == "cuda_wfst":
        pytest.importorskip("kaldifst")
    out, plot = tmp_path / "r.json", tmp_path / "r.png"
    texts = ["none", "own", "all"]
    rows = run(replace(options, strategy=strategy, texts=texts, out=str(out), plot=str(plot)))
    written = json.loads(out.read_text())
    assert written["rows"] == rows
    assert written["mode"] == "stream"
    assert "event-driven" in written["clock"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert [(row["streams"], row["texts"]) for row in rows] == [
        (2, "none"), (3, "none"), (2, "own"), (3, "own"), (2, "all"), (3, "all"),
    ]  # fmt: skip
    for row in rows:
        assert row["verified"], row["verified_by"]
        assert row["chunk_seconds"] == pytest.approx(0.4)
        latency = row["latency"]
        total = latency["compute"]["mean"] + latency["queue"]["mean"]
        assert latency["total"]["mean"] == pytest.approx(total)
        assert 0 < latency["compute"]["p50"] <= latency["compute"]["p99"] <= latency["total"]["p99"]
        assert 0 < row["utilisation"] <= 1
        assert row["md1"]["alone"]["service"] > 0
        assert ("networks" in row) is (strategy == "alsd_pp")
    printed = capsys.readouterr().out
    assert "M/D/1 alone" in printed
    assert "streams of 400 ms chunks" in printed


def test_a_stream_that_was_harmed_is_not_verified(tiny_task, tiny_options):
    from nemo_gpu_decoding.bench.peers.base import Setting
    from nemo_gpu_decoding.bench.strategies import FlexCTC

    ours = FlexCTC(tiny_options)
    ours.prepare(tiny_task, Setting(4, lm=True))
    replay = Replay(ours.decoder, Tape(tiny_task), 2, 5, texts="none", threads=1)
    for _ in range(3):
        replay.serve([0, 1])
    replay._heard[1] -= 5  # a chunk that should not have been there
    assert equal_results(replay) == (False, "equal to decoding in one piece: 1 of 2 streams")


def test_results_of_streams_have_a_name_of_their_own(options, tmp_path):
    pytest.importorskip("kaldifst")
    changes = {"strategy": "cuda_wfst", "streams": [1], "texts": ["none"], "out": str(tmp_path)}
    run(replace(options, **changes))
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("cuda_wfst-stream-")


# ------------------------------------------------------------------------------------- bad options


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "live"}, "mode is 'live', expected batch or stream"),
        ({"texts": ["some"]}, r"texts is \['some'\], expected any of none, own, all"),
        ({"streams": [0]}, r"streams is \[0\]"),
        ({"chunk_ms": 0.0}, "chunk_ms is 0.0, expected a number > 0"),
        ({"stream_seconds": float("inf")}, "stream_seconds is inf"),
        ({"max_batch": 0}, "max_batch is 0"),
    ],
)
def test_bad_options_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        BenchOptions(**changes)


def test_a_chunk_is_a_whole_number_of_frames():
    assert frames_of_chunk(400.0, 0.08) == 5
    assert frames_of_chunk(160.0, 0.04) == 4
    for chunk_ms in (100.0, 20.0):
        with pytest.raises(ValueError, match="expected a whole number of frames of 80 ms"):
            frames_of_chunk(chunk_ms, 0.08)


def test_too_little_audio_for_a_chunk_is_an_error(options):
    with pytest.raises(ValueError, match=r"stream_seconds is 0.0001, in which no chunk came"):
        run(replace(options, stream_seconds=0.0001))
