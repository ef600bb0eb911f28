"""How steps are launched: plainly, in chunks, in one graph; with fakes in the place of CUDA's graphs."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from nemo_gpu_decoding.search.transducer import cuda_graphs
from nemo_gpu_decoding.search.transducer.config import ALSDConfig
from nemo_gpu_decoding.search.transducer.cuda_graphs import CHUNKS, LOOP, PLAIN, GraphRunner
from nemo_gpu_decoding.search.transducer.cuda_workspace import Workspace, WorkspacePool, bucket

GPU = torch.device("cuda", 0)


class CountingStep:
    """`steps` steps are to be done; runs into `work.active` as the kernels do."""

    def __init__(self, work, steps: int, key: str = "step") -> None:
        self.work, self.left, self.runs, self.key = work, steps, 0, key

    def run(self):
        self.runs += 1
        self.left = max(0, self.left - 1)

    def count_active(self):
        self.work.active.fill_(int(self.left > 0))

    def set_condition(self, handle):
        raise AssertionError("only a graph decides")


class FakeGraph:
    """Repeats what was captured."""

    def __init__(self, replay):
        self.replays, self._replay = 0, replay

    def replay(self):
        self.replays += 1
        self._replay()


@pytest.fixture
def work():
    return SimpleNamespace(
        shape=SimpleNamespace(device=GPU), active=torch.zeros(1, dtype=torch.int32), graphs={}
    )


@pytest.fixture
def captures(monkeypatch):
    """Graphs that were captured, by mode."""
    made: dict[str, list[FakeGraph]] = {LOOP: [], CHUNKS: []}

    def loop(device, decide, body):
        def replay():
            while body.__self__.left:
                body()

        made[LOOP].append(FakeGraph(replay))
        return made[LOOP][-1]

    def chunk(device, body):
        made[CHUNKS].append(FakeGraph(body))
        return made[CHUNKS][-1]

    monkeypatch.setattr(cuda_graphs, "capture_while", loop)
    monkeypatch.setattr(cuda_graphs, "capture_chunk", chunk)
    monkeypatch.setattr(cuda_graphs, "why_no_while_graphs", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


def networks_with_weights():
    return SimpleNamespace(joint=torch.nn.Linear(2, 2), others=[torch.zeros(1)])


def test_one_replay_does_all_steps(work, captures):
    runner, step = GraphRunner(networks_with_weights(), allowed=True), CountingStep(work, 40)
    runner.run(step, work)
    assert (step.left, step.runs, runner.mode) == (0, 40, LOOP)
    assert [graph.replays for graph in captures[LOOP]] == [1]


def test_chunks_are_replayed_until_nobody_goes_on(work, captures, monkeypatch, caplog):
    monkeypatch.setattr(cuda_graphs, "why_no_while_graphs", lambda device: "the driver is old")
    runner, step = GraphRunner(networks_with_weights(), allowed=True), CountingStep(work, 40)
    with caplog.at_level(logging.INFO):
        runner.run(step, work)
    assert (step.left, runner.mode) == (0, CHUNKS)
    assert [graph.replays for graph in captures[CHUNKS]] == [3]  # one step came before
    assert "the driver is old" in caplog.text


@pytest.mark.parametrize("broken", [[LOOP], [LOOP, CHUNKS]])
def test_what_does_not_work_is_said_once_and_replaced(work, captures, monkeypatch, caplog, broken):
    caplog.set_level(logging.WARNING, "nemo_gpu_decoding")

    def fail(device, *work):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    for mode in broken:
        monkeypatch.setattr(cuda_graphs, f"capture_{'while' if mode == LOOP else 'chunk'}", fail)
    runner = GraphRunner(networks_with_weights(), allowed=True)
    for _ in range(2):
        step = CountingStep(work, 20, key=str(_))
        runner.run(step, work)
        assert step.left == 0
    assert runner.mode == (CHUNKS if broken == [LOOP] else PLAIN)
    assert len(caplog.records) == len(broken)
    assert "operation not permitted when stream is capturing" in caplog.text
    assert "more" not in caplog.text


def test_a_graph_is_used_again_until_something_changes(work, captures):
    networks = networks_with_weights()
    runner = GraphRunner(networks, allowed=True)
    for _ in range(3):
        step = CountingStep(work, 5)
        runner.run(step, work)
    assert len(captures[LOOP]) == 1
    with torch.no_grad():
        networks.joint.weight.add_(1.0)  # trained in between
    runner.run(CountingStep(work, 5), work)
    assert len(captures[LOOP]) == 2
    networks.joint = torch.nn.Linear(2, 2)
    runner.run(CountingStep(work, 5), work)
    runner.run(CountingStep(work, 5, key="another LM"), work)
    assert len(captures[LOOP]) == 4
    assert len(work.graphs) == cuda_graphs.MOST_GRAPHS


def test_networks_without_visible_weights_are_run_plainly(work, captures):
    runner, step = GraphRunner(SimpleNamespace(), allowed=True), CountingStep(work, 9)
    runner.run(step, work)
    assert (step.left, runner.mode) == (0, PLAIN)


def test_graphs_may_be_forbidden(work, captures):
    runner, step = GraphRunner(networks_with_weights(), allowed=False), CountingStep(work, 9)
    runner.run(step, work)
    assert (step.left, runner.mode) == (0, PLAIN)
    assert step.runs == 2 * cuda_graphs.STEPS_PER_LOOK
    with pytest.raises(ValueError, match="allow_cuda_graphs is 1, expected True or False"):
        ALSDConfig(allow_cuda_graphs=1)


def test_nothing_runs_where_nothing_is_to_be_done(work, captures):
    runner, step = GraphRunner(networks_with_weights(), allowed=True), CountingStep(work, 0)
    runner.run(step, work)
    assert step.runs == 0
    assert not captures[LOOP]


# ---------------------------------------------------------------------- workspaces


def test_sizes_share_workspaces():
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 32, 33)] == [1, 2, 4, 4, 8, 32, 64]


def test_a_workspace_serves_one_run_at_a_time(monkeypatch):
    pool = WorkspacePool()
    monkeypatch.setattr("nemo_gpu_decoding.search.transducer.cuda_workspace.Workspace", _Named)
    with pool.borrowed("a") as first, pool.borrowed("a") as second:
        assert first is not second
    with pool.borrowed("a") as third, pool.borrowed("b") as fourth:
        assert third in (first, second)
        assert fourth.shape == "b"


class _Named(Workspace):
    def __init__(self, shape):
        self.shape = shape
