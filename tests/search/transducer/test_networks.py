"""The adapters compute what the torch modules compute, and notice when these change."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

from nemo_gpu_decoding.search.transducer import networks as module
from nemo_gpu_decoding.search.transducer.alsd import ALSDPlusPlus
from nemo_gpu_decoding.search.transducer.config import ALSDConfig
from nemo_gpu_decoding.search.transducer.networks import LSTMNetworks, OneDNNLinear, StatelessNetworks, whole_blocks
from tests.contract.subject import all_facts, facts
from tests.oracles.transducer import PRECISIONS, PlainLSTMNetworks, precision

VOCAB, ENCODER, HIDDEN = 10, 6, 16


def joint_parts(durations=0):
    output = nn.Sequential(nn.ReLU(), nn.Dropout(0.5), nn.Linear(HIDDEN, VOCAB + 1 + durations))
    return nn.Linear(ENCODER, HIDDEN), nn.Linear(HIDDEN, HIDDEN), output


def lstm_networks(layers=2, bias=True, seed=0):
    torch.manual_seed(seed)
    lstm = nn.LSTM(HIDDEN, HIDDEN, num_layers=layers, bias=bias)
    return LSTMNetworks(nn.Embedding(VOCAB + 1, HIDDEN), lstm, *joint_parts())


def spoken(networks, labels):
    """Predictions [n, H] of one text, token by token, two copies of it side by side."""
    output, state = networks.start()
    outputs, state = [output], tuple(part.repeat(2, *[1] * (part.ndim - 1)) for part in state)
    for label in labels:
        output, state = networks.predict(torch.tensor([label, label]), state)
        assert torch.equal(output[0], output[1])
        outputs.append(output[:1])
    return torch.cat(outputs)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("table", [True, False])
def test_lstm_steps_are_those_of_the_module(layers, bias, table, monkeypatch):
    if not table:
        monkeypatch.setattr(module, "MAX_TABLE_BYTES", 0)
    networks = lstm_networks(layers, bias)
    with torch.no_grad():
        whole, _ = networks.lstm(networks.embedding(torch.tensor([VOCAB, 3, 1, 3, 9])))
        assert torch.allclose(spoken(networks, [3, 1, 3, 9]), networks.prediction_projection(whole), atol=1e-6)


def test_changed_weights_are_noticed():
    networks = lstm_networks()
    with torch.no_grad():
        before = spoken(networks, [3, 1])
        networks.embedding.weight.mul_(2.0)
        after = spoken(networks, [3, 1])
        whole, _ = networks.lstm(networks.embedding(torch.tensor([VOCAB, 3, 1])))
    assert not torch.allclose(before, after)
    assert torch.allclose(after, networks.prediction_projection(whole), atol=1e-6)


def test_stateless_networks_see_the_last_tokens():
    torch.manual_seed(0)
    embeddings = [nn.Embedding(VOCAB + 1, 10), nn.Embedding(VOCAB + 1, 6)]
    networks = StatelessNetworks(embeddings, nn.LayerNorm(HIDDEN), *joint_parts())
    with torch.no_grad():
        outputs = spoken(networks, [3, 1, 4])
        last, second_last = (e(torch.tensor(i)) for e, i in zip(embeddings, (4, 1), strict=True))
        expected = networks.prediction_projection(networks.norm(torch.cat([last, second_last])))
    assert torch.allclose(outputs[-1], expected, atol=1e-6)


def test_dropout_is_off_while_decoding_and_back_afterwards():
    networks = lstm_networks()
    networks.output.train()
    networks.output[2].eval()
    decoder = ALSDPlusPlus(networks, ALSDConfig(beam_size=4))
    frames = torch.randn(2, 8, ENCODER)
    assert len({decoder.decode(frames, [8, 5])[0].best.score for _ in range(3)}) == 1
    assert [part.training for part in networks.output] == [True, True, False]


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("name", list(PRECISIONS))
def test_a_search_computes_in_the_precision_of_its_networks(name, layers):
    """To the bit what the plain formulas give in that precision for each utterance alone."""
    networks = lstm_networks(layers)
    with torch.no_grad():
        networks.output[2].bias[VOCAB] += 2.0
        networks.output[2].weight.mul_(8.0)
    frames, lengths = torch.randn(3, 12, ENCODER), [12, 7, 1]
    config = ALSDConfig(beam_size=4, n_best=4, max_symbols=1)
    unchanged = ALSDPlusPlus(networks, config).decode(frames, lengths)
    with precision(networks, name) as dtype:
        found = ALSDPlusPlus(networks, config).decode(frames.to(dtype), lengths)
        assert networks.start()[0].dtype == networks.start()[1][0].dtype == dtype
        assert networks.start()[1][1].dtype == torch.float32
    plain = ALSDPlusPlus(PlainLSTMNetworks(networks, dtype), config)
    for b, length in enumerate(lengths):
        (expected,) = plain.decode(frames[b : b + 1].to(dtype), [length])
        assert facts(found[b]) == facts(expected)
        assert found[b].best.tokens.tolist() == unchanged[b].best.tokens.tolist()
        assert found[b].best.score == pytest.approx(unchanged[b].best.score, abs=0.2)
    assert [nbest.best.score for nbest in found] != [nbest.best.score for nbest in unchanged]
    if PRECISIONS[name][1]:  # nothing of it remains
        assert all_facts(ALSDPlusPlus(networks, config).decode(frames, lengths)) == all_facts(unchanged)


@pytest.mark.parametrize(
    ("lstm", "durations", "message"),
    [
        *(({}, durations, "durations is") for durations in ([-1, 0], [0, 1, 1], [0], [0.5, 1])),
        *((kind, (), "expected an LSTM of one direction") for kind in ({"bidirectional": True}, {"proj_size": 4})),
    ],
)
def test_bad_durations_and_other_lstms_are_refused(lstm, durations, message):
    parts = joint_parts(2 if durations else 0)
    with pytest.raises(ValueError, match=message):
        LSTMNetworks(nn.Embedding(VOCAB + 1, HIDDEN), nn.LSTM(HIDDEN, HIDDEN, **lstm), *parts, durations=durations)


@pytest.mark.parametrize(
    ("n", "name"), enumerate(("embedding", "lstm", "encoder_projection", "prediction_projection", "output"))
)
def test_arguments_that_are_no_modules_are_named(n, name):
    modules = [nn.Embedding(VOCAB + 1, HIDDEN), nn.LSTM(HIDDEN, HIDDEN), *joint_parts()]
    modules[n] = None
    with pytest.raises(ValueError, match=f"{name} is None"):
        LSTMNetworks(*modules)


# ------------------------------------------------------------------------------- linear layers
@pytest.fixture(params=[True, False], ids=["onednn", "blas"])
def linear(request, monkeypatch):
    if request.param and not module.HAS_ONEDNN:
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(module, "HAS_ONEDNN", request.param)
    return OneDNNLinear()


@pytest.fixture(scope="module")
def layer():
    torch.manual_seed(0)
    return torch.nn.Linear(64, 33)


@pytest.mark.parametrize("with_bias", [True, False])
def test_batch_invariant_layer_equals_a_linear_layer(linear, layer, with_bias):
    rows = torch.randn(5, 64)
    bias = layer.bias if with_bias else None
    with torch.inference_mode():
        found = linear(rows, layer.weight, bias)
    assert found.shape == (5, 33)
    assert torch.allclose(found, functional.linear(rows, layer.weight, bias), atol=1e-5)


def test_a_row_does_not_depend_on_its_neighbours(linear, layer):
    rows = torch.randn(40, 64)
    with torch.inference_mode():
        together = linear(rows, layer.weight, layer.bias)
        for count in (1, 3, 8, 13, 32):
            assert torch.equal(linear(rows[:count], layer.weight, layer.bias), together[:count])


def test_changed_weights_reach_the_batch_invariant_layer(linear):
    weight, rows = torch.nn.Parameter(torch.randn(8, 16)), torch.randn(2, 16)
    with torch.no_grad():
        before = linear(rows, weight, None)
        weight.mul_(2.0)
        assert torch.allclose(linear(rows, weight, None), 2.0 * before, atol=1e-5)
        weight.data = torch.zeros(8, 16)
        assert not linear(rows, weight, None).any()
    rows = torch.randn(2, 16)
    with torch.inference_mode():
        weight = torch.randn(8, 16)
        before = linear(rows, weight, None)
        weight.mul_(2.0)
        assert torch.allclose(linear(rows, weight, None), 2.0 * before, atol=1e-5)


def test_gradients_flow_through_the_batch_invariant_layer(linear, layer):
    rows = torch.randn(3, 64, requires_grad=True)
    linear(rows, layer.weight, layer.bias).sum().backward()
    assert torch.allclose(rows.grad, layer.weight.sum(0).expand(3, 64), atol=1e-5)


def test_other_precisions_are_left_to_torch(linear, layer):
    rows = torch.randn(3, 64, dtype=torch.float64)
    with torch.inference_mode():
        found = linear(rows, layer.weight.double(), None)
    assert torch.equal(found, functional.linear(whole_blocks(rows), layer.weight.double())[:3])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_batch_invariant_layer_can_be_copied_after_use(linear, layer, copied):
    rows = torch.randn(3, 64)
    with torch.inference_mode():
        found = linear(rows, layer.weight, None)
        assert torch.equal(copied(linear)(rows, layer.weight, None), found)
