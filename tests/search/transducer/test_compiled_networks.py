"""Compiled networks find what torch finds, and each row of their results depends on its own inputs only."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.search.transducer import cpu_networks
from nemo_gpu_decoding.search.transducer.cpu_networks import (
    WIDTH,
    CompiledNetworks,
    multiply,
    packed,
    whole_panels,
    whole_rows,
)
from nemo_gpu_decoding.search.transducer.networks import LSTMNetworks, StatelessNetworks
from tests.contract.subject import all_facts
from tests.search.transducer.lstm import JOINT, lstm_networks
from tests.search.transducer.table_networks import STRATEGIES, random_frames, random_fusion

VOCAB, T = 30, 24
LENGTHS = [T, 0, 17, 9, 1, 22, 5]
RNNT, TDT = (), (0, 1, 2, 4)


# ------------------------------------------------------------------------------------- products
@compiled
def product(rows, count, weight, out):
    multiply(rows, count, weight, out)


def multiplied(rows, weight, bias):
    """`multiply` of rows [n, inputs]; the rest of the last block of rows is NaN."""
    count, outputs = len(rows), len(weight)
    filled = np.full((whole_rows(count), rows.shape[1]), np.nan, np.float32)
    filled[:count] = rows
    out = np.zeros((whole_rows(count), whole_panels(outputs) + WIDTH), np.float32)
    product(filled, count, packed(weight, bias), out)
    assert not out[:, whole_panels(outputs) :].any()
    return torch.from_numpy(out[:count, :outputs])


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 8, 9, 13, 70])
@pytest.mark.parametrize("outputs", [1, 23, 24, 25, 48, 50, 97])
@pytest.mark.parametrize("inputs", [1, 2, 65])
def test_compiled_product_equals_a_linear_layer(count, outputs, inputs):
    torch.manual_seed(0)
    rows, weight, bias = torch.randn(count, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    assert torch.allclose(multiplied(rows, weight, bias), functional.linear(rows, weight, bias), atol=1e-5)
    assert torch.allclose(multiplied(rows, weight, None), functional.linear(rows, weight), atol=1e-5)


# ------------------------------------------------------------------------------------ functions
@compiled
def applied(x, out):
    for i in range(len(x)):
        out[0, i], out[1, i], out[2, i] = cpu_networks.exp(x[i]), cpu_networks.sigmoid(x[i]), cpu_networks.tanh(x[i])


@compiled
def log_softmax(logits, scale):
    out = np.empty_like(logits)
    cpu_networks.log_softmax(logits, scale, np.empty(len(logits)), out)
    return out


def test_cpu_math_equals_numpy():
    x = np.concatenate([np.linspace(-40, 40, 10_001), np.linspace(-700, 700, 501), [-1e4, 0.0, 1e-9]])
    found = np.empty((3, len(x)))
    applied(x, found)
    inside = abs(x) <= 700
    assert np.allclose(found[0, inside], np.exp(x[inside]), rtol=1e-13, atol=0.0)
    assert np.allclose(found[1], torch.from_numpy(x).sigmoid().numpy(), rtol=1e-13, atol=1e-300)
    assert np.allclose(found[2], np.tanh(x), rtol=1e-13, atol=1e-15)
    nan = np.empty((3, 1))
    applied(np.array([np.nan]), nan)
    assert np.isnan(nan).all()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 129, 1025])
@pytest.mark.parametrize("scale", [1.0, 1 / 1.7])
def test_a_log_softmax_is_that_of_torch_in_double(size, scale):
    logits = 8.0 * torch.randn(size, generator=torch.Generator().manual_seed(size))
    wanted = (logits.double() * scale).log_softmax(-1).float().numpy()
    assert np.array_equal(log_softmax(logits.numpy(), scale), wanted)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_logits_make_every_log_prob_nan(bad):
    for place in range(9):
        logits = np.linspace(-3, 3, 9, dtype=np.float32)
        logits[place] = bad
        assert np.isnan(log_softmax(logits, 1.0)).all()


def test_labels_may_be_impossible():
    logits = np.array([-np.inf, 1.0, 2.0], np.float32)
    assert np.array_equal(log_softmax(logits, 1.0), torch.from_numpy(logits).double().log_softmax(0).float().numpy())
    assert np.isnan(log_softmax(np.full(3, -np.inf, np.float32), 1.0)).all()


# ------------------------------------------------------------------------------------- searches
def decoder_of(strategy, networks, fusion=None, **options):
    make, config = STRATEGIES[strategy]
    return make(networks, config(**{"beam_size": 5, "n_best": 5, "backend": "cpu", **options}), fusion)


def decoded(decoder, frames, lengths=LENGTHS):
    return all_facts(decoder.decode(frames, lengths))


@pytest.fixture
def in_torch(monkeypatch):

    def decode(decoder, frames, lengths=LENGTHS):
        with monkeypatch.context() as patch:
            patch.setattr(CompiledNetworks, "current", lambda self: None)
            return decoder.decode(frames, lengths)

    return decode


def assert_close(found, wanted):
    for mine, other in zip(found, wanted, strict=True):
        assert [path.tokens.tolist() for path in mine] == [path.tokens.tolist() for path in other]
        assert [path.frames.tolist() for path in mine] == [path.frames.tolist() for path in other]
        assert [path.repeats.tolist() for path in mine] == [path.repeats.tolist() for path in other]
        assert [path.score for path in mine] == pytest.approx([path.score for path in other], rel=1e-6, abs=1e-4)


@pytest.mark.parametrize("strategy", list(STRATEGIES))
@pytest.mark.parametrize("durations", [RNNT, TDT], ids=["rnnt", "tdt"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("fused", [False, True], ids=["alone", "lm_and_phrases"])
def test_hypotheses_equal_those_of_torch(strategy, durations, layers, fused, in_torch):
    networks = lstm_networks(VOCAB, durations, layers=layers)
    decoder = decoder_of(strategy, networks, random_fusion(VOCAB) if fused else None)
    frames = random_frames(len(LENGTHS), T, seed=1)
    found = decoder.decode(frames, LENGTHS)
    assert_close(found, in_torch(decoder, frames))
    assert len({tuple(nbest.best.tokens) for nbest in found}) > 3


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.Sigmoid])
def test_joints_have_other_activations_and_temperatures(activation, in_torch):
    decoder = decoder_of("alsd_pp", lstm_networks(VOCAB, TDT, activation=activation), softmax_temperature=1.3)
    frames = random_frames(len(LENGTHS), T, seed=2)
    assert decoder._algorithm.compiled.current() is not None
    assert_close(decoder.decode(frames, LENGTHS), in_torch(decoder, frames))


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_trees_grow_during_a_run(strategy, in_torch):
    """With alignments and many tokens per frame there are more nodes than frames."""
    limit = {"alsd_pp": "max_symbols", "aes_pp": "maes_num_steps"}[strategy]
    decoder = decoder_of(strategy, lstm_networks(VOCAB, blank_bias=-4.0), alignments=True, **{limit: 8})
    frames = random_frames(len(LENGTHS), T, seed=4)
    found = decoder.decode(frames, LENGTHS)
    assert_close(found, in_torch(decoder, frames))
    assert max(len(path.alignment) for nbest in found for path in nbest) > 3 * T


def test_recurrent_products_are_computed_once_per_text(monkeypatch):
    counted = {"texts": 0, "products": 0}

    class Counting(cpu_networks.TextCache):
        def __del__(self):
            counted["products"] += int(self.is_recalled.sum())
            counted["texts"] += len(np.unique(self.outputs[self.is_recalled], axis=0))

    made = cpu_networks.text_cache
    monkeypatch.setattr(cpu_networks, "text_cache", lambda *parts: Counting(*made(*parts)))
    decoder_of("alsd_pp", lstm_networks(VOCAB)).decode(random_frames(2, T, seed=1), [T, T])
    assert 0 < counted["products"] == counted["texts"]


def test_changed_weights_are_noticed():
    networks, frames = lstm_networks(VOCAB), random_frames(len(LENGTHS), T, seed=5)
    decoder = decoder_of("alsd_pp", networks)
    before = decoded(decoder, frames)
    weights = (
        networks.embedding.weight, networks.lstm.weight_hh_l0, networks.prediction_projection.bias,
        networks.output[-1].weight,
    )  # fmt: skip
    for weight in weights:
        with torch.no_grad():
            weight.mul_(1.5)
        after = decoded(decoder, frames)
        assert after != before
        assert after == decoded(decoder_of("alsd_pp", networks), frames)
        before = after


class OwnJoint(LSTMNetworks):
    def join(self, frames, predictions):
        return 2.0 * super().join(frames, predictions)


@pytest.mark.parametrize("kind", ["stateless", "subclass", "activation", "bfloat16", "autocast", "inference"])
def test_other_networks_are_run_by_torch(kind):
    networks = lstm_networks(VOCAB)
    parts = networks.encoder_projection, networks.prediction_projection, networks.output
    assert CompiledNetworks(networks).current() is not None
    if kind == "stateless":
        networks = StatelessNetworks([networks.embedding], nn.Identity(), *parts)
    elif kind == "subclass":
        networks = OwnJoint(networks.embedding, networks.lstm, *parts)
    elif kind == "activation":
        networks = lstm_networks(VOCAB, activation=nn.GELU)
    elif kind == "bfloat16":
        for module in (networks.embedding, networks.lstm, *parts):
            module.bfloat16()
    elif kind == "inference":
        with torch.inference_mode():
            networks.output[-1].weight = nn.Parameter(torch.randn(VOCAB + 1, JOINT), requires_grad=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        assert CompiledNetworks(networks).current() is None
