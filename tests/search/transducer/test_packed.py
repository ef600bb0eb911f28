"""A packed linear layer is the linear layer, row by row."""

import copy
import pickle

import pytest
import torch
from torch.nn import functional

from nemo_gpu_decoding.search.transducer import onednn_linear
from nemo_gpu_decoding.search.transducer.onednn_linear import OneDNNLinear, whole_blocks


@pytest.fixture(params=[True, False], ids=["onednn", "blas"])
def linear(request, monkeypatch):
    if request.param and not onednn_linear.HAS_ONEDNN:
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(onednn_linear, "HAS_ONEDNN", request.param)
    return OneDNNLinear()


@pytest.fixture(scope="module")
def layer():
    torch.manual_seed(0)
    return torch.nn.Linear(64, 33)


@pytest.mark.parametrize("with_bias", [True, False])
def test_it_is_the_linear_layer(linear, layer, with_bias):
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


def test_a_changed_weight_is_packed_anew(linear):
    weight, rows = torch.nn.Parameter(torch.randn(8, 16)), torch.randn(2, 16)
    with torch.no_grad():
        before = linear(rows, weight, None)
        weight.mul_(2.0)
        assert torch.allclose(linear(rows, weight, None), 2.0 * before, atol=1e-5)
        weight.data = torch.zeros(8, 16)
        assert not linear(rows, weight, None).any()


def test_weights_whose_changes_cannot_be_seen_are_not_packed(linear):
    rows = torch.randn(2, 16)
    with torch.inference_mode():
        weight = torch.randn(8, 16)
        before = linear(rows, weight, None)
        weight.mul_(2.0)
        assert torch.allclose(linear(rows, weight, None), 2.0 * before, atol=1e-5)


def test_gradients_flow(linear, layer):
    rows = torch.randn(3, 64, requires_grad=True)
    linear(rows, layer.weight, layer.bias).sum().backward()
    assert torch.allclose(rows.grad, layer.weight.sum(0).expand(3, 64), atol=1e-5)


def test_other_precisions_are_left_to_torch(linear, layer):
    rows = torch.randn(3, 64, dtype=torch.float64)
    with torch.inference_mode():
        found = linear(rows, layer.weight.double(), None)
    assert torch.equal(found, functional.linear(whole_blocks(rows), layer.weight.double())[:3])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_it_can_be_copied_after_use(linear, layer, copied):
    rows = torch.randn(3, 64)
    with torch.inference_mode():
        found = linear(rows, layer.weight, None)
        assert torch.equal(copied(linear)(rows, layer.weight, None), found)


def test_blocks_are_filled_up_with_zeros():
    assert whole_blocks(torch.ones(0, 4)).shape == (0, 4)
    assert whole_blocks(torch.ones(8, 4)).shape == (8, 4)
    filled = whole_blocks(torch.ones(9, 2, dtype=torch.int64))
    assert filled.shape == (16, 2)
    assert filled.sum() == 18
