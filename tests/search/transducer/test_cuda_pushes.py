"""What surrounds the steps of a push: copies, launches, the workspace that streams hold."""

import gc

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.search.transducer import cuda_engine, cuda_workspace
from nemo_gpu_decoding.search.transducer.cuda_graphs import LOOP
from tests.contract.subject import all_facts
from tests.search.pushes import operators
from tests.search.transducer.table_networks import STRATEGIES, TableNetworks, assert_same, random_frames, random_fusion
from tests.search.transducer.test_cuda_networks import ENCODER, V, lstm_networks, relu_networks, stateless_networks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("emulated_runtime", "small_blocks")]

T, LENGTHS = 14, [14, 0, 9]
KINDS = {"lstm": lstm_networks, "stateless": stateless_networks}
PRODUCTS = {"addmm", "mm"}  # of the replayed steps
NO_COPIES = {"flatten", "to"}  # of contiguous tensors on the device


def decoders(networks, strategy="alsd_pp", **options):
    make, config = STRATEGIES[strategy]
    options = {"beam_size": 4, "n_best": 4, **options}
    return (make(networks, config(backend=backend, **options), random_fusion(V)) for backend in ("cuda", "cpu"))


def push_all(decoder, frames, lengths, size=1):
    streams = decoder.open(len(frames))
    for begin in range(0, frames.shape[1], size):
        chunk = frames[:, begin : begin + size]
        decoder.push(streams, chunk, [max(0, min(length - begin, size)) for length in lengths])
    return streams


def encoded(batch, seed=1):
    return torch.randn(batch, T, ENCODER, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_a_push_is_one_upload_one_launch_a_replay_and_one_copy_back(played_graphs, emulated_runtime, strategy, kind):
    """From the second push on; the frames are added up and projected by torch."""
    networks, frames = relu_networks(KINDS[kind], durations=(0, 1, 2)), encoded(3)
    device, host = decoders(networks, strategy)
    device._shared.graphs.first_mode = LOOP
    streams = device.open(3)
    for t in range(T):
        chunk, lengths = frames[:, t : t + 1].contiguous(), [int(t < length) for length in LENGTHS]
        work = streams.engine and streams.engine._held.work
        before, rounds, graphs = emulated_runtime.launches, _rounds(work), list(work.graphs.values()) if work else []
        with operators() as done:
            device.push(streams, chunk, lengths)
        assert streams.engine._held.work is work or t == 0
        if t > 1:
            assert list(work.graphs.values()) == graphs
            assert emulated_runtime.launches - before == 1 + (_rounds(work) - rounds) * _launches(work)
            others = [name for name in done.work if name not in PRODUCTS | NO_COPIES]
            assert others == ["sum", "_linear_pointwise", "copy_", "copy_"]
            assert done.moves == ["to", "to"]  # of the frames and of their sum
    assert_same(device.close(streams), host.decode(frames, LENGTHS))
    assert device.device_modes == {"graphs": LOOP, "prediction": kind}


def _rounds(work):
    return sum(graph.rounds for graph in work.graphs.values()) if work else 0


def _launches(work):
    """Kernels in a round of the only graph."""
    (graph,) = work.graphs.values()
    return sum(not hasattr(act, "func") or act.func.__name__ != "_repeat" for act in graph._body)


@pytest.mark.parametrize("kind", list(KINDS))
def test_reopened_stream_begins_with_the_empty_text(kind):
    """What the workspace keeps of the first entry of the prediction cache is that of another text."""
    device, host = decoders(KINDS[kind](durations=(0, 1, 2)))
    streams, expected = device.open(2), host.decode(encoded(2, seed=2))
    for turn in range(3):
        for chunk in encoded(2, seed=turn).split(1, dim=1):
            device.push(streams, chunk)
        found = device.close(streams)
        device.reopen(streams, [0, 1])
    assert_same(found, expected)
    assert any(len(nbest.best.tokens) > 2 for nbest in found)


def test_push_without_active_hypotheses_runs_no_step(monkeypatch):
    """Tokens and blanks take four frames each."""
    device, host = decoders(TableNetworks(V, (4,), seed=1))
    steps, run = [], cuda_engine._Step.run
    monkeypatch.setattr(cuda_engine._Step, "run", lambda *given, **more: steps.append(1) or run(*given, **more))
    frames, streams = random_frames(1, T, seed=2), device.open(1)
    ran = []
    for t in range(T):
        steps.clear()
        device.push(streams, frames[:, t : t + 1])
        ran.append(bool(steps))
    assert ran == [t % 4 == 0 for t in range(T)]
    assert all_facts(device.close(streams)) == all_facts(host.decode(frames))


@pytest.mark.parametrize("most", [0, 1])
def test_streams_without_a_workspace_borrow_one_for_each_push(monkeypatch, most):
    monkeypatch.setattr(cuda_workspace, "MOST_HELD", most)
    device, host = decoders(TableNetworks(V, (0, 1, 2), seed=1))
    inputs = [random_frames(3, T, seed=seed) for seed in (1, 2)]
    every = [(push_all(device, frames, LENGTHS, 3), frames) for frames in inputs]
    assert sum(streams.engine._held is not None for streams, _ in every) == most
    for streams, frames in every:
        assert all_facts(device.close(streams)) == all_facts(host.decode(frames, LENGTHS))


def test_workspaces_return_to_the_decoder_with_their_last_stream():
    device, _ = decoders(TableNetworks(V, (0, 1, 2), seed=1))
    for _ in range(cuda_workspace.MOST_HELD + 2):
        streams = push_all(device, random_frames(3, 3, seed=1), [3, 3, 3])
        work = streams.engine._held.work
        del streams
        gc.collect()
        again = push_all(device, random_frames(3, 3, seed=2), [3, 3, 3])
        assert again.engine._held.work is work
        del again
        gc.collect()


def test_a_workspace_of_a_run_that_failed_is_not_used_again(monkeypatch):
    device, host = decoders(TableNetworks(V, (0, 1, 2), seed=1))
    frames = random_frames(3, T, seed=1)
    streams = push_all(device, frames[:, :5], LENGTHS)
    work = streams.engine._held.work
    with monkeypatch.context() as patch:
        patch.setattr(cuda_engine._Step, "run", lambda *_, **more: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            device.push(streams, frames[:, 5:6])
    with pytest.raises(ValueError, match="streams is closed"):
        device.push(streams, frames[:, 6:7])
    del streams
    gc.collect()
    streams = push_all(device, frames, LENGTHS)
    assert streams.engine._held.work is not work
    assert device._shared.workspaces._held == 1
    assert all_facts(device.close(streams)) == all_facts(host.decode(frames, LENGTHS))


def test_frames_whose_sum_overflows_are_accepted():
    device, host = decoders(TableNetworks(V, (0, 1, 2), seed=1))
    frames = random_frames(1, T, seed=1).double()
    frames[0, 3] = 1.5e308
    assert all_facts(device.close(push_all(device, frames, [T]))) == all_facts(host.decode(frames))


@pytest.mark.parametrize("size", [1, 4])
def test_a_bad_frame_changes_nothing_on_the_device(size):
    device, host = decoders(TableNetworks(V, (0, 1, 2), seed=1))
    frames, streams = random_frames(3, T, seed=1), device.open(3)
    for begin in range(0, T, size):
        chunk = frames[:, begin : begin + size]
        bad = chunk.clone()
        bad[2, 0, 1] = float("inf")
        with pytest.raises(ValueError, match=r"encoder_output\[2, 0, 1\] is inf"):
            device.push(streams, bad)
        device.push(streams, chunk)
    assert all_facts(device.close(streams)) == all_facts(host.decode(frames))


def test_frames_that_wait_move_in_their_buffer_and_it_grows(monkeypatch):
    monkeypatch.setattr(cuda_engine, "FRAMES_THAT_WAIT", 0)
    device, host = decoders(TableNetworks(V, (3, 1), seed=3))
    frames, sizes, columns = random_frames(2, 40, seed=5), [1, 1, 2, 1, 6, 1, 1, 12, 3, 1, 1, 10], []
    streams, begin = device.open(2), 0
    for size in sizes:
        device.push(streams, frames[:, begin : begin + size])
        columns.append(streams.engine._held.work.columns)
        begin += size
    assert begin == 40
    assert len(set(columns)) > 2
    assert columns == sorted(columns)
    assert columns[-1] <= 32
    assert all_facts(device.close(streams)) == all_facts(host.decode(frames))


def test_rows_of_padding_are_projected_unless_there_are_many(monkeypatch):
    frames, lengths = torch.arange(12.0).view(3, 4, 1), np.array([4, 0, 1])
    rows, first = cuda_engine._rows(frames, lengths)
    assert rows.shape == (12, 1)
    assert first.tolist() == [0, 4, 8]
    monkeypatch.setattr(cuda_engine, "MOST_PADDING", 4)
    rows, first = cuda_engine._rows(frames, lengths)
    assert rows[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 8.0]
    assert first.tolist() == [0, 4, 4]
