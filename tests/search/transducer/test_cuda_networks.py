"""Prediction networks on the GPU: fused weights and kernels compute what the torch modules compute."""

import logging
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from nemo_gpu_decoding.search.transducer import fused_weights
from nemo_gpu_decoding.search.transducer.cuda_networks import (
    LSTM,
    STATELESS,
    TORCH,
    FusedJoint,
    JointPaths,
    PredictionPaths,
    TorchJoint,
)
from nemo_gpu_decoding.search.transducer.cuda_workspace import RunWorkspace, WorkspaceShape, kind_of
from nemo_gpu_decoding.search.transducer.engine import Predictions
from nemo_gpu_decoding.search.transducer.fused_weights import FusedWeights
from nemo_gpu_decoding.search.transducer.networks import LSTMNetworks, StatelessNetworks
from nemo_gpu_decoding.search.transducer.records import NO_ROW
from tests.oracles.transducer import PRECISIONS, PlainLSTMNetworks, precision
from tests.search.transducer.table_networks import STRATEGIES, assert_same, random_fusion

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("emulated_runtime", "small_blocks")]

V, WIDTH, JOINT, ENCODER = 12, 10, 7, 6
UTTERANCES, BEAM, ENTRIES = 2, 4, 16
CPU = torch.device("cpu")
CHECKED = pytest.mark.parametrize("emulated_runtime", [{"check": True}], indirect=True, ids=["checked"])


def joint_parts(durations=(), bias=True):
    output = nn.Linear(JOINT, V + 1 + len(durations))
    with torch.no_grad():
        output.weight.mul_(6.0)
        output.bias[V] += 1.5
    projection = nn.Linear(WIDTH, JOINT, bias=bias)
    return nn.Linear(ENCODER, JOINT), projection, nn.Sequential(nn.Tanh(), output)


def lstm_networks(layers=1, bias=True, durations=(), seed=0):
    torch.manual_seed(seed)
    lstm = nn.LSTM(WIDTH, WIDTH, num_layers=layers, bias=bias)
    with torch.no_grad():
        for weight in lstm.parameters():
            weight.mul_(2.0)
    parts = joint_parts(durations, bias)
    return LSTMNetworks(nn.Embedding(V + 1, WIDTH), lstm, *parts, durations=durations)


NORMS = {
    "identity": nn.Identity,
    "layer": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
    "affine": lambda: nn.LayerNorm(WIDTH, eps=0.1),
}


def stateless_networks(sizes=(6, 3, 1), norm="layer", durations=(), seed=0):
    torch.manual_seed(seed)
    embeddings = [nn.Embedding(V + 1, size) for size in sizes]
    normed = NORMS[norm]()
    for weight in normed.parameters():
        nn.init.normal_(weight)
    return StatelessNetworks(embeddings, normed, *joint_parts(durations), durations=durations)


def lstm_output(networks, text):
    """[J], by nn.LSTM itself."""
    whole, _ = networks.lstm(networks.embedding(torch.tensor([V, *text])))
    return networks.prediction_projection(whole[-1])


def stateless_output(networks, text):
    context = ([V] * len(networks.embeddings) + text)[::-1]
    parts = [e.weight[label] for e, label in zip(networks.embeddings, context, strict=False)]
    return networks.prediction_projection(networks.norm(torch.cat(parts)))


class TextsInMemory:
    """A workspace with random texts to compute, as `merge` leaves them, and the texts of its entries."""

    def __init__(self, networks, seed=0):
        self.random = np.random.default_rng(seed)
        predictions = Predictions.start(networks, UTTERANCES, ENTRIES)
        parts = predictions.outputs, *predictions.state
        kinds = tuple(map(kind_of, parts))
        self.work = RunWorkspace(
            WorkspaceShape(CPU, UTTERANCES, BEAM, BEAM, ENTRIES, UTTERANCES * BEAM, kinds[0], kinds)
        )
        self.work.take_predictions(parts)
        self.texts = {b * ENTRIES: [] for b in range(UTTERANCES)}

    def request(self):
        """Every hypothesis reads an entry of the old beam; some write one that is free, some nothing."""
        for b in range(UTTERANCES):
            entries = range(b * ENTRIES, (b + 1) * ENTRIES)
            known = [entry for entry in self.texts if entry in entries]  # the last written one last
            old = self.random.permutation(known[-BEAM:])
            free = [entry for entry in entries if entry not in old]
            for k, target in enumerate(self.random.choice(free, BEAM, replace=False)):
                source, label = int(self.random.choice(old)), int(self.random.integers(V))
                if self.random.random() < 0.3:
                    source, target, label = NO_ROW, NO_ROW, 0
                self.work.labels[b * BEAM + k] = label
                self.work.sources[b * BEAM + k] = source
                self.work.targets[b * BEAM + k] = int(target)
                if target != NO_ROW:
                    text = [*self.texts[source], label]
                    self.texts.pop(int(target), None)
                    self.texts[int(target)] = text

    def run(self, prediction, steps=8):
        prediction.begin()
        for _ in range(steps):
            self.request()
            prediction.run()
        return self


def after_a_run(networks, path):
    """The memory behind a run, which took this path."""
    memory, paths = TextsInMemory(networks), PredictionPaths(networks)
    memory.run(paths.on(memory.work))
    assert paths.path == path
    return memory


def assert_outputs(memory, expected, atol=1e-5, rtol=1e-5):
    """Every text that is in memory has the output that `expected` computes from the text alone."""
    assert max(map(len, memory.texts.values())) >= 4
    for entry, text in memory.texts.items():
        torch.testing.assert_close(memory.work.cache[0][entry], expected(text), atol=atol, rtol=rtol)


@CHECKED
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_lstm_steps_are_those_of_the_module(layers, bias):
    networks = lstm_networks(layers, bias)
    with torch.inference_mode():
        memory = TextsInMemory(networks)
        paths = PredictionPaths(networks)
        memory.run(paths.on(memory.work))
        assert paths.path == LSTM
        assert_outputs(memory, lambda text: lstm_output(networks, text))
        # a second run on the same workspace begins with the states of the first one
        memory.run(paths.on(memory.work))
        assert_outputs(memory, lambda text: lstm_output(networks, text))


@CHECKED
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("name", list(PRECISIONS))
def test_lstm_steps_are_those_of_the_formulas_in_any_precision(name, layers):
    networks = lstm_networks(layers)
    with precision(networks, name) as dtype, torch.inference_mode():
        memory = after_a_run(networks, LSTM)
        plain = PlainLSTMNetworks(networks, dtype)
    assert [part.dtype for part in memory.work.cache] == [dtype, dtype, torch.float32]

    def expected(text):
        output, state = plain.start()
        for label in text:
            output, state = plain.predict(torch.tensor([label]), state)
        return output[0]

    step = torch.finfo(dtype).eps  # products are rounded to it, and what was rounded goes on
    assert_outputs(memory, expected, atol=4 * step, rtol=4 * step)


@CHECKED
@pytest.mark.parametrize("norm", list(NORMS))
@pytest.mark.parametrize("sizes", [(10,), (7, 3), (6, 3, 1)], ids=str)
def test_stateless_steps_are_those_of_the_modules(sizes, norm):
    networks = stateless_networks(sizes, norm)
    with torch.inference_mode():
        assert_outputs(after_a_run(networks, STATELESS), lambda text: stateless_output(networks, text))


# ------------------------------------------------------------------------------- whole searches
def on_both(networks, strategy="alsd_pp", fusion=None, **options):
    make, config = STRATEGIES[strategy]
    return (make(networks, config(**{"beam_size": 4, **options}, backend=b), fusion) for b in ("cuda", "cpu"))


def frames_of(seed=3):
    return torch.randn(2, 14, ENCODER, generator=torch.Generator().manual_seed(seed))


def results(decoder, chunks=None):
    frames, lengths = frames_of(), [14, 9]
    if chunks is None:
        return decoder.decode(frames, lengths)
    streams = decoder.open(2)
    for begin in range(0, 14, 5):
        sizes = [max(0, min(length - begin, 5, 14 - begin)) for length in lengths]
        decoder.push(streams, frames[:, begin : begin + 5], sizes)
    return decoder.close(streams)


@pytest.mark.parametrize("name", list(PRECISIONS))
@pytest.mark.parametrize(
    ("make", "path"), [(lstm_networks, LSTM), (stateless_networks, STATELESS)], ids=["lstm", "stateless"]
)
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_searches_find_what_the_cpu_finds_in_any_precision(strategy, make, path, name):
    networks = make()
    with torch.no_grad():  # a token in some frames: what rounding does to a text of hundreds says nothing
        networks.output[1].bias[V] += 4.0
    with precision(networks, name) as dtype:
        device, host = on_both(networks, strategy, n_best=1)
        expected = results(host)
        assert_same(results(device), expected, score=32 * torch.finfo(dtype).eps)
        assert_same(results(device, chunks=3), expected, score=32 * torch.finfo(dtype).eps)
    assert device.device_modes["prediction"] == path


def test_another_precision_than_that_of_the_cache_is_left_to_torch():
    networks = lstm_networks()
    with torch.no_grad():
        networks.output[1].bias[V] += 4.0
    device, host = on_both(networks)
    found, frames = [], frames_of()
    for decoder in (device, host):
        streams = decoder.open(2)
        decoder.push(streams, frames[:, :7], [7, 7])
        if decoder is device:
            assert device.device_modes["prediction"] == LSTM
        with torch.autocast("cpu", torch.bfloat16):
            decoder.push(streams, frames[:, 7:], [7, 2])
            found.append(decoder.close(streams))
        assert device.device_modes["prediction"] == TORCH
    assert_same(*found, score=0.2)


@pytest.mark.parametrize("durations", [(), (0, 1, 2)], ids=["rnnt", "tdt"])
@pytest.mark.parametrize(
    ("make", "path"), [(lstm_networks, LSTM), (stateless_networks, STATELESS)], ids=["lstm", "stateless"]
)
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_searches_find_what_the_cpu_finds(strategy, make, path, durations):
    device, host = on_both(make(durations=durations), strategy, random_fusion(V), n_best=4)
    assert device.device_modes == {"graphs": None, "prediction": None}
    expected = results(host)
    assert sum(len(nbest.best.tokens) for nbest in expected) >= 6
    assert_same(results(device), expected)
    assert_same(results(device, chunks=3), expected)
    assert device.device_modes == {"graphs": "plain", "prediction": path}


def test_results_in_the_middle_of_a_stream_change_nothing():
    """What the kernels keep besides the states is made of the states; a look changes none of it."""
    device, host = on_both(lstm_networks(2, durations=(0, 1, 2)))
    streams, frames = device.open(2), frames_of()
    for t in range(14):
        device.push(streams, frames[:, t : t + 1], [1, int(t < 9)])
        assert_same(device.close(replace(streams)), host.decode(frames, [t + 1, min(t + 1, 9)]))
    assert_same(device.close(streams), host.decode(frames, [14, 9]))


def relu_networks(make, **options):
    networks = make(**options)
    networks.output = nn.Sequential(nn.ReLU(), nn.Dropout(0.5), networks.output[-1])
    with torch.no_grad():
        networks.output[-1].bias[V] += 4.0
    return networks


@pytest.mark.parametrize(("durations", "name"), [((0, 1, 2), None), *(((), name) for name in PRECISIONS)])
def test_joints_of_relu_and_a_linear_layer_are_fused(durations, name, monkeypatch):
    """The search finds what it finds on the CPU; no module of the joint is called in its steps."""
    networks = relu_networks(lstm_networks, durations=durations)
    with nullcontext(torch.float32) if name is None else precision(networks, name) as dtype:
        device, host = on_both(networks)
        expected = results(host)
        monkeypatch.setattr(networks, "join", None)
        assert_same(results(device, chunks=3), expected, score=max(1e-4, 32 * torch.finfo(dtype).eps))
    assert sum(len(nbest.best.tokens) for nbest in expected) >= 2


def test_fused_joint_reports_nan():
    networks = relu_networks(lstm_networks)
    with torch.no_grad():
        networks.prediction_projection.bias[0] = float("nan")
    device, _ = on_both(networks)
    with pytest.raises(ValueError, match="networks give NaN"):
        results(device)


def joint_of_two_layers(networks):
    networks.output = nn.Sequential(nn.ReLU(), nn.Linear(JOINT, JOINT), networks.output[-1])


def other_class(networks):
    networks.__class__ = type("Asking", (type(networks),), {})


@pytest.mark.parametrize("change", [lambda n: n.output.__setitem__(0, nn.Sigmoid()), joint_of_two_layers, other_class])
def test_other_joints_are_left_to_torch(change):
    networks = relu_networks(stateless_networks)
    before = JointPaths(networks)
    work = TextsInMemory(networks).work
    work.take_frames(torch.zeros(1, 1, JOINT))
    assert isinstance(before.on(work), FusedJoint)
    change(networks)
    assert isinstance(before.on(work), TorchJoint)
    device, host = on_both(networks, "aes_pp")
    assert_same(results(device), results(host))


# ------------------------------------------------------------------------- when weights are fused
@pytest.mark.parametrize("make", [lstm_networks, stateless_networks])
def test_changed_weights_are_fused_anew(make):
    networks = make()
    projection, weights = networks.prediction_projection, FusedWeights(networks)
    seen = [weights.current()]
    assert weights.current() is seen[0]
    with torch.no_grad():
        projection.weight.mul_(2.0)
    seen.append(weights.current())
    before = projection.weight.data
    for values in (torch.zeros(JOINT, WIDTH), before):  # exchanged, and back again
        projection.weight.data = values
        seen.append(weights.current())
        assert weights.current() is seen[-1]
    assert len(set(map(id, seen))) == 4


def inference_weights(networks):
    with torch.inference_mode():
        networks.prediction_projection.weight = nn.Parameter(torch.zeros(JOINT, WIDTH))


@pytest.mark.parametrize(
    ("make", "change", "reason"),
    [
        (lstm_networks, lambda n: n.lstm.half(), "torch.float16 on cpu and torch.float32 on cpu, not"),
        (stateless_networks, lambda n: n.embeddings[1].bfloat16(), "torch.bfloat16 on cpu and"),
        (
            lstm_networks,
            lambda n: weight_norm(n.prediction_projection),
            "the networks have a ParametrizedLinear in place of a plain Linear",
        ),
        (stateless_networks, lambda n: setattr(n, "norm", nn.GroupNorm(2, WIDTH)), "the norm is GroupNorm"),
        (stateless_networks, lambda n: setattr(n, "norm", nn.LayerNorm((2, WIDTH))), "the norm is LayerNorm"),
        (lstm_networks, other_class, "Asking are called through methods of their own"),
        (lstm_networks, inference_weights, "changes cannot be detected"),
    ],
)
def test_network_that_is_not_fused_has_a_reason(make, change, reason):
    networks = make()
    change(networks)
    assert reason in FusedWeights(networks).why_not(CPU)


@pytest.mark.parametrize("make", [lstm_networks, stateless_networks])
def test_large_tables_are_not_fused(make, monkeypatch):
    size = (V + 1) * (4 * WIDTH if make is lstm_networks else 3 * JOINT) * 4
    monkeypatch.setattr(fused_weights.nets, "MAX_TABLE_BYTES", size)
    assert FusedWeights(make()).why_not(CPU) is None
    monkeypatch.setattr(fused_weights.nets, "MAX_TABLE_BYTES", size - 1)
    assert f"of {size} bytes exceed" in FusedWeights(make()).why_not(CPU)


def test_each_precision_has_its_weights():
    weights = FusedWeights(lstm_networks())
    own = weights.current()
    with torch.autocast("cpu", torch.bfloat16):
        cast = weights.current()
        assert weights.current() is cast
        assert {part.dtype for part in (cast.table, *cast.weights)} == {torch.bfloat16}
        torch.testing.assert_close(cast.weights[0].float(), own.weights[0], rtol=2**-8, atol=0.0)
    assert weights.current() is own
    with torch.autocast("cpu", torch.bfloat16):
        assert weights.current() is cast


def test_torch_prediction_is_logged_once(caplog):
    networks = lstm_networks()
    other_class(networks)
    device, host = on_both(networks, beam_size=3)
    with caplog.at_level(logging.INFO, "nemo_gpu_decoding"):
        assert_same(results(device), results(host))
        results(device)
    assert caplog.text.count("on the GPU, torch runs the prediction network: Asking") == 1
    assert device.device_modes["prediction"] == TORCH
