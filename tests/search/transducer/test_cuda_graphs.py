"""Steps run plainly or in a graph with a loop: with fakes of graphs, then with kernels that the host plays."""

import gc
import logging
import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.cuda.driver import DriverError
from nemo_gpu_decoding.cuda.launch import as_records, runtime
from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.search.transducer import cuda_graphs, cuda_workspace, records
from nemo_gpu_decoding.search.transducer.cuda_engine import merge_bytes
from nemo_gpu_decoding.search.transducer.cuda_graphs import LOOP, PLAIN, GraphRunner
from nemo_gpu_decoding.search.transducer.cuda_workspace import RunWorkspace
from nemo_gpu_decoding.search.transducer.networks import StatelessNetworks
from nemo_gpu_decoding.search.transducer.records import ACTIVE, FULL, IDLE
from tests.contract.subject import all_facts
from tests.random_models import random_boosting
from tests.search.transducer.table_networks import STRATEGIES, random_fusion
from tests.search.transducer.test_cuda_networks import ENCODER, V, lstm_networks, relu_networks, stateless_networks

pytestmark = pytest.mark.slow

emulated = pytest.mark.usefixtures("emulated_runtime", "small_blocks")

GPU = torch.device("cuda", 0)


class CountingStep:
    def __init__(self, work, steps: int, key: str = "step") -> None:
        self.work, self.runs, self.key = work, 0, key
        work.left = steps

    @property
    def left(self):
        return self.work.left

    def load(self, *, in_loop):
        pass

    def run(self, *, in_loop=False, handle=None):
        assert in_loop or handle is None
        self.work.has_loaded = in_loop
        self.runs += 1
        self.work.beams += self.left > 0
        self.work.left = max(0, self.left - 1)

    def look(self):
        return self.work.beams.numpy().tobytes() if self.left else None


class FakeGraph:
    def __init__(self, replay):
        self.replays, self._replay = 0, replay

    def replay(self):
        self.replays += 1
        self._replay()


def new_work(device=GPU):
    return SimpleNamespace(shape=SimpleNamespace(device=device), beams=torch.zeros(1, dtype=torch.int64), graphs={})


@pytest.fixture
def work():
    return new_work()


@pytest.fixture
def captures(monkeypatch, work):
    made: list[FakeGraph] = []

    def loop(device, body):
        assert work.has_loaded  # nothing may be loaded while capturing

        def replay():
            while work.left:
                body(7)

        made.append(FakeGraph(replay))
        return made[-1]

    monkeypatch.setattr(cuda_graphs, "capture_while", loop)
    monkeypatch.setattr(cuda_graphs, "why_no_while_graphs", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


def networks_with_weights():
    return SimpleNamespace(joint=torch.nn.Linear(2, 2), others=[torch.zeros(1)])


def test_one_replay_does_all_steps(work, captures):
    runner, step = GraphRunner(networks_with_weights(), allowed=True), CountingStep(work, 40)
    runner.run(step, work)
    assert (step.left, runner.mode) == (0, LOOP)
    assert [graph.replays for graph in captures] == [1]
    assert step.runs == 41  # ten rounds of four, after the first step


@pytest.mark.parametrize(
    ("name", "fake", "level", "reason"),
    [
        ("why_no_while_graphs", lambda device: "the driver is old", logging.INFO, "the driver is old"),
        # what is captured on a stream of another device
        ("capture_while", lambda *_: FakeGraph(lambda: None), logging.WARNING, "a replay changes nothing"),
    ],
    ids=["old driver", "empty graph"],
)
def test_old_driver_and_empty_graph_get_plain_launches(name, fake, level, reason, work, captures, monkeypatch, caplog):
    monkeypatch.setattr(cuda_graphs, name, fake)
    runner, step = GraphRunner(networks_with_weights(), allowed=True), CountingStep(work, 40)
    with caplog.at_level(level, "nemo_gpu_decoding"):
        runner.run(step, work)
    assert (step.left, runner.mode, captures, work.graphs) == (0, PLAIN, [], {})
    assert reason in caplog.text


@pytest.mark.parametrize("kind", [RuntimeError, TypeError, ValueError, OSError])
def test_failing_capture_is_reported_once_and_steps_run_plainly(work, captures, monkeypatch, caplog, kind):
    """cuda-python has a TypeError for a signature that has changed and a ValueError for a bad value."""
    caplog.set_level(logging.WARNING, "nemo_gpu_decoding")

    def fail(device, *work):
        raise kind("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(cuda_graphs, "capture_while", fail)
    runner = GraphRunner(networks_with_weights(), allowed=True)
    for key in "ab":
        step = CountingStep(work, 20, key)
        runner.run(step, work)
        assert step.left == 0
    assert runner.mode == PLAIN
    (record,) = caplog.records
    assert record.getMessage().endswith("operation not permitted when stream is capturing")


def test_mode_is_tried_again_after_one_failure(work, captures, monkeypatch, caplog):
    """Such as another thread that waits for the device, or a lack of memory."""
    runner, capture, left = GraphRunner(networks_with_weights(), allowed=True), cuda_graphs.capture_while, [1]

    def fails_once(device, body):
        if left.pop() if left else 0:
            raise RuntimeError("operation failed due to a previous error during capture")
        return capture(device, body)

    monkeypatch.setattr(cuda_graphs, "capture_while", fails_once)
    modes = []
    with caplog.at_level(logging.WARNING, "nemo_gpu_decoding"):
        for key in "abc":
            runner.run(CountingStep(work, 20, key), work)
            modes.append(runner.mode)
            assert work.left == 0
    assert modes == [PLAIN, LOOP, LOOP]
    assert len(caplog.records) == 1


def test_failing_step_is_not_repeated(work, captures):
    """Half a step may have changed the beams, so that another mode would go on from a wrong state."""

    class Failing(CountingStep):
        def run(self, **options):
            super().run(**options)
            raise RuntimeError("out of memory")

    runner, step = GraphRunner(networks_with_weights(), allowed=True), Failing(work, 40)
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.run(step, work)
    assert step.runs == 1


@pytest.fixture
def arithmetic():
    """Sets what products are computed in: autocast to a type or none, and whether in TF32."""

    def choose(dtype=None, tf32=False):
        torch.set_autocast_enabled("cuda", dtype is not None)
        torch.set_autocast_dtype("cuda", dtype or torch.float16)
        torch.backends.cuda.matmul.allow_tf32 = tf32

    yield choose
    choose()


@pytest.mark.parametrize(
    ("first", "second"),
    [({}, {"dtype": torch.float16}), ({"dtype": torch.float16}, {"dtype": torch.bfloat16}), ({}, {"tf32": True})],
    ids=["autocast", "its type", "tf32"],
)
def test_graph_belongs_to_the_precision_of_its_capture(work, captures, arithmetic, first, second):
    runner = GraphRunner(networks_with_weights(), allowed=True)
    for _ in range(2):
        for options in (first, second):
            arithmetic(**options)
            runner.run(CountingStep(work, 5), work)
    assert len(captures) == 2


def test_graph_reads_no_weights_from_the_cache_of_autocast(work, captures, monkeypatch):
    keeps = []

    class Casting(CountingStep):
        def run(self, **options):
            keeps.append(torch.is_autocast_cache_enabled())
            super().run(**options)

    runner, step = GraphRunner(networks_with_weights(), allowed=True), Casting(work, 2)
    monkeypatch.setattr(cuda_graphs, "capture_while", lambda *_: step.run() or FakeGraph(lambda: None))
    runner.run(step, work)
    assert keeps == [False, False]  # the step before, and the captured one
    assert torch.is_autocast_cache_enabled()


def test_graph_is_reused_until_weights_networks_or_lm_change(work, captures):
    networks = networks_with_weights()
    runner = GraphRunner(networks, allowed=True)
    for _ in range(3):
        runner.run(CountingStep(work, 5), work)
    assert len(captures) == 1
    with torch.no_grad():
        networks.joint.weight.add_(1.0)  # trained in between
    runner.run(CountingStep(work, 5), work)
    assert len(captures) == 2
    networks.joint = torch.nn.Linear(2, 2)
    runner.run(CountingStep(work, 5), work)
    runner.run(CountingStep(work, 5, key="another LM"), work)
    assert len(captures) == 4
    assert len(work.graphs) == cuda_graphs.MOST_GRAPHS


@pytest.mark.parametrize(
    ("networks", "allowed"),
    [(SimpleNamespace(), True), (networks_with_weights(), False)],
    ids=["no weights", "forbidden"],
)
def test_steps_run_without_a_graph_if_weights_are_unknown_or_graphs_are_off(work, captures, networks, allowed):
    runner, step = GraphRunner(networks, allowed=allowed), CountingStep(work, 9)
    runner.run(step, work)
    assert (step.left, runner.mode) == (0, PLAIN)
    assert step.runs == 2 * cuda_graphs.STEPS_PER_LOOK


# ---------------------------------------------------------------------- the kernels in graphs
CPU = torch.device("cpu")
NETWORKS = {"lstm": partial(relu_networks, lstm_networks, layers=2), "stateless": stateless_networks}


def make_networks(kind="lstm", durations=(0, 1, 2)):
    return NETWORKS[kind](durations=durations, seed=1)


def decoder_in(mode, strategy, networks, **options):
    make, config = STRATEGIES[strategy]
    decoder = make(networks, config(beam_size=4, n_best=4, backend="cuda", **options), random_fusion(V))
    decoder._shared.graphs.first_mode = mode
    return decoder


def graphs_of(decoder):
    return [graph for work in decoder._shared.workspaces._idle for graph in work.graphs.values()]


def frames_of(batch, frames, seed):
    return torch.randn(batch, frames, ENCODER, generator=torch.Generator().manual_seed(seed))


@emulated
@pytest.mark.parametrize("kind", list(NETWORKS))
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_results_of_graphs_equal_those_of_plain_launches(played_graphs, strategy, kind):
    networks = make_networks(kind)
    decoder, plain = (decoder_in(m, strategy, networks) for m in (LOOP, PLAIN))
    for batch, frames in ((2, 9), (2, 5), (2, 14), (1, 6), (2, 9)):
        encoded, lengths = frames_of(batch, frames, seed=frames), [frames, frames // 2][:batch]
        requests = [Request(boosting=random_boosting(V, seed=frames)), None][:batch]
        found, expected = (each.decode(encoded, lengths, requests) for each in (decoder, plain))
        assert all_facts(found) == all_facts(expected)
        assert any(len(path.tokens) for nbest in found for path in nbest)
    assert decoder._shared.graphs.mode == LOOP
    assert sum(graph.replays for graph in graphs_of(decoder)) >= 2


@emulated
def test_graphs_stop_where_nodes_are_full_or_frames_end(played_graphs, monkeypatch):
    """Buffers of nodes that are full in the middle of a run; and streams, whose frames run out."""
    monkeypatch.setattr(cuda_workspace, "NODE_CAPACITY", 1)
    networks, frames = make_networks(), frames_of(2, 10, seed=4)
    decoder, plain = (decoder_in(m, "alsd_pp", networks, alignments=True) for m in (LOOP, PLAIN))
    streams = decoder.open(2)
    for begin in range(0, 10, 5):
        decoder.push(streams, frames[:, begin : begin + 5], [5, 3])
    found = decoder.close(streams)
    kept = torch.cat([frames[:1], frames[:1]])
    kept[1, :6] = frames[1, [0, 1, 2, 5, 6, 7]]
    assert all_facts(found) == all_facts(plain.decode(kept, [10, 6]))


@emulated
def test_kernels_of_a_loop_that_the_driver_refuses_are_replaced_by_plain_launches(
    played_graphs, emulated_runtime, monkeypatch, caplog
):
    """They refer to a function of the driver, unlike the other kernels."""
    caplog.set_level(logging.WARNING, "nemo_gpu_decoding")
    load = type(emulated_runtime).load

    def refusing(self, source, device, defines=None):
        if "LOOP" in (defines or {}):
            raise DriverError("cuModuleLoadData fails with CUDA_ERROR_INVALID_IMAGE")
        return load(self, source, device, defines)

    monkeypatch.setattr(type(emulated_runtime), "load", refusing)
    decoder = decoder_in(LOOP, "alsd_pp", make_networks())
    assert decoder.decode(frames_of(2, 9, seed=3), [9, 4])
    assert decoder._shared.graphs.mode == PLAIN
    assert "CUDA_ERROR_INVALID_IMAGE" in caplog.text


@emulated
def test_graphs_can_be_switched_off_and_on(played_graphs):
    networks, frames = make_networks(), frames_of(2, 6, seed=2)
    decoder = decoder_in(LOOP, "alsd_pp", networks)
    expected = all_facts(decoder.decode(frames, [6, 6]))
    kept = weakref.ref(graphs_of(decoder)[0])
    for allowed, mode in ((False, PLAIN), (True, LOOP)):
        decoder.allow_cuda_graphs(allowed)
        gc.collect()
        assert kept() is None
        assert not decoder._shared.workspaces._idle or allowed
        assert all_facts(decoder.decode(frames, [6, 6])) == expected
        assert decoder._shared.graphs.mode == mode
    forbidden = decoder_in(LOOP, "alsd_pp", networks, allow_cuda_graphs=False)
    forbidden.allow_cuda_graphs(True)
    forbidden.decode(frames, [6, 6])
    assert forbidden._shared.graphs.mode == PLAIN


@emulated
def test_decode_within_a_capture_of_the_caller_is_refused(monkeypatch):
    decoder, frames = decoder_in(PLAIN, "alsd_pp", make_networks()), frames_of(1, 5, seed=1)
    monkeypatch.setattr(cuda_graphs, "is_capturing", lambda device: captures)
    for captures in (True, False, True):
        if captures:
            with pytest.raises(ValueError, match="can't be decoded while a CUDA graph is captured"):
                decoder.decode(frames, [5])
        else:
            decoder.decode(frames, [5])


@emulated
def test_step_that_needs_a_value_on_the_host_is_not_captured(played_graphs, caplog):
    class Asking(StatelessNetworks):
        def predict(self, labels, state):
            assert (labels >= 0).all()
            return super().predict(labels, state)

    networks = make_networks("stateless")
    networks.__class__ = Asking
    decoder = decoder_in(LOOP, "alsd_pp", networks)
    with caplog.at_level(logging.WARNING, logger="nemo_gpu_decoding"):
        found = decoder.decode(frames_of(1, 5, seed=1), [5])
    assert all_facts(found) == all_facts(decoder_in(PLAIN, "alsd_pp", networks).decode(frames_of(1, 5, seed=1), [5]))
    assert decoder._shared.graphs.mode == PLAIN
    assert "gives the host a value" in caplog.text


# ---------------------------------------------------------------------- the condition itself
@emulated
@pytest.mark.parametrize(
    ("activities", "condition"),
    [
        ([ACTIVE], 1),
        ([IDLE], 0),
        ([FULL, IDLE], 0),  # the host has to fetch nodes first
        ([IDLE, FULL, ACTIVE], 1),
        ([IDLE] * 299 + [ACTIVE], 1),  # more utterances than threads
        ([ACTIVE] + [IDLE] * 299, 1),
        ([IDLE] * 300, 0),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else f"{len(value)} utterances",
)
@pytest.mark.parametrize("emulated_runtime", [{"check": True}], indirect=True, ids=["checked"])
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_condition_of_the_loop_is_whether_an_utterance_is_active(emulated_runtime, strategy, activities, condition):
    """Set by the last block of `merge`; every active utterance has one hypothesis, which stays as it is."""
    n = len(activities)
    work = RunWorkspace(cuda_workspace.WorkspaceShape(CPU, n, 1, 1, 4, n, (torch.float32, 2), ((torch.float32, 2),)))
    counters, streams = np.zeros(n, records.STREAM_COUNTERS), np.zeros(n, records.STREAM_PARAMS)
    counters["activity"], counters["size"], counters["node_count"] = activities, 1, 1
    streams["end"] = 9
    beams, extensions = np.zeros((n, 1), records.HYPOTHESIS), np.zeros((n, 1, 1), records.CANDIDATE)
    beams["open"], extensions["choice"] = 1, records.KEEP
    for name, values in (
        ("counters", counters), ("streams", streams), ("beams", beams), ("extensions", extensions),
    ):  # fmt: skip
        getattr(work, name).copy_(as_records(values))
    work.counts.fill_(1)
    make, config = STRATEGIES[strategy]
    decoder = make(make_networks(), config(beam_size=1))
    kernels = runtime().load(decoder.kernels, CPU, {"LOGIT": "float", "LOOP": 1})
    params = decoder._params._replace(max_extensions=1)
    options = {"grid": n, "block": 32, "shared_bytes": merge_bytes(params), "params": params}
    for _ in range(2):
        work.launch(kernels, records.MERGE, handle=np.uint64(5), sets_condition=1, **options)
        assert emulated_runtime.conditions == {5: condition}
        assert int(work.finished) == 0
    emulated_runtime.conditions.clear()
    work.launch(kernels, records.MERGE, handle=np.uint64(0), sets_condition=0, **options)
    assert emulated_runtime.conditions == {}
