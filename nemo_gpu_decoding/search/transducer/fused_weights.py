"""Fuse weights of prediction networks: compute products of matrices in advance for `networks.cu`.

**LSTM**, H hidden values per layer, J inputs of the joint. A table holds the contribution of each label to the gates
of the first layer. The two matrices by which a hidden value is multiplied, in this step and in the next step, are
concatenated, so that a layer needs one product:

    weights[l]   [H, 4 H + 4 H]  recurrent weights of layer l | input weights of layer l + 1
    weights[-1]  [H, 4 H + J]    recurrent weights of the last layer | projection to the joint

**Stateless.** Let x_i be the embedding of the i-th last label, P_i the corresponding columns of the projection, and 1
a vector of ones. Then

    projection(norm(x_0 | x_1 | ..)) = (sum_i P_i x_i - mean * P 1) / deviation + bias

so tables of P_i x_i, of the sum of x_i and of the sum of its squares replace all products. P and the bias contain the
weight and bias of the norm, if the norm has them.

Matrices have the type in which torch would multiply, that of the weights or of autocast. This module casts the
matrices once instead of in every step. Sums and the tables of a stateless network are float32. Results differ from
torch's by rounding only.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nemo_gpu_decoding.cuda.signature import FLOAT_TYPES
from nemo_gpu_decoding.search.transducer import networks as nets


@dataclass(frozen=True, eq=False)
class FusedLSTM:
    """An LSTM of L layers that is fused with the projection of its output."""

    table: Tensor  # [V + 1, 4 H]
    biases: Tensor  # [L, 4 H] float32; that of the first layer is in the table
    weights: tuple[Tensor, ...]  # L of them, see above, of the table's type
    output_bias: Tensor  # [J] float32


@dataclass(frozen=True, eq=False)
class FusedStateless:
    """Embeddings of the last labels, a norm and a projection, which are arguments of the kernel `STATELESS`."""

    tables: Tensor  # [positions, V + 1, J]
    sums: Tensor | None  # [positions, V + 1, 2] float64, sum and sum of squares; None: no norm
    ones: Tensor  # [J], P 1
    bias: Tensor  # [J]
    size: int  # of all embeddings together
    epsilon: float  # of the norm


Fused = FusedLSTM | FusedStateless


class FusedWeights:
    """The fused weights of networks, for all threads; they are computed again when a weight has changed."""

    def __init__(self, networks: Any) -> None:
        self._networks = networks  # `TransducerNetworks`
        self._fused: nets.MadeOfWeights[Fused] = nets.MadeOfWeights()  # by the type that products are computed in

    def why_not(self, device: torch.device) -> str | None:
        """Return None if the networks can be fused for `device`, else the reason in one line."""
        networks = self._networks
        if type(networks) is not nets.LSTMNetworks and type(networks) is not nets.StatelessNetworks:
            return f"{type(networks).__name__} are called through methods of their own"
        for module, kind in _modules(networks):
            if type(module) is not kind:
                return f"the networks have a {type(module).__name__} in place of a plain {kind.__name__}"
        size = networks.prediction_projection.in_features
        if isinstance(networks, nets.StatelessNetworks) and not _is_known_norm(networks.norm, size):
            return f"the norm is {networks.norm}, which is not fused"
        if (size := networks.table_bytes()) > nets.MAX_TABLE_BYTES:
            return f"tables of {size} bytes exceed {nets.MAX_TABLE_BYTES}"
        sources = _sources(networks)
        kinds = {(source.dtype, source.device) for source in sources}
        if len(kinds) > 1 or sources[0].dtype not in FLOAT_TYPES or sources[0].device != device:
            names = sorted(f"{dtype} on {place}" for dtype, place in kinds)
            return f"the weights are {' and '.join(names)}, not float32, float16 or bfloat16 on {device}"
        if any(source.is_inference() for source in sources):
            return "the weights were made in inference mode, so changes cannot be detected"
        return None

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the networks' outputs; requires that `why_not` is None."""
        return nets.product_dtype(self._networks.prediction_projection.weight)

    def current(self) -> Fused:
        """Return the fused weights for the present weights and autocast type; requires that `why_not` is None."""
        networks = self._networks
        fused = self._fused.current(_sources(networks), lambda: _fused(networks), self.dtype)
        assert fused is not None
        return fused


def _fused(networks: nets.LSTMNetworks | nets.StatelessNetworks) -> Fused:
    fused = _fused_lstm(networks) if isinstance(networks, nets.LSTMNetworks) else _fused_stateless(networks)
    device = networks.prediction_projection.weight.device
    if device.type == "cuda":  # later work may be on any stream
        torch.cuda.current_stream(device).synchronize()
    return fused


def _modules(networks: nets.LSTMNetworks | nets.StatelessNetworks) -> list[tuple[nn.Module, type[nn.Module]]]:
    """Return the modules that are fused, except for a norm, and their supported types."""
    modules: list[tuple[nn.Module, type[nn.Module]]] = [(networks.prediction_projection, nn.Linear)]
    if isinstance(networks, nets.LSTMNetworks):
        return [*modules, (networks.embedding, nn.Embedding), (networks.lstm, nn.LSTM)]
    return [*modules, *((embedding, nn.Embedding) for embedding in networks.embeddings)]


def _is_known_norm(norm: nn.Module, size: int) -> bool:
    if type(norm) is nn.LayerNorm:
        return norm.normalized_shape == (size,)
    return type(norm) is nn.Identity


def _sources(networks: nets.LSTMNetworks | nets.StatelessNetworks) -> list[Tensor]:
    """Return the weights that are fused."""
    norm = [networks.norm] if isinstance(networks, nets.StatelessNetworks) else []
    return [weight for module in [*(m for m, _ in _modules(networks)), *norm] for weight in nets.own_weights(module)]


def _fused_lstm(networks: nets.LSTMNetworks) -> FusedLSTM:
    layers, projection = networks.lstm.all_weights, networks.prediction_projection
    table = networks.input_table()
    assert table is not None  # checked by `why_not`
    zeros = projection.weight.new_zeros(layers[0][1].shape[0])
    above = [weight for weight, *_ in layers[1:]] + [projection.weight]
    recurrent = [weight for _, weight, *_ in layers]
    products = [torch.cat(both).to(table.dtype).t() for both in zip(recurrent, above, strict=True)]
    biases = [sum(layer[2:], start=zeros) for layer in layers]
    return FusedLSTM(table, torch.stack(biases).float(), tuple(products), _bias_of(projection).float())


def _fused_stateless(networks: nets.StatelessNetworks) -> FusedStateless:
    norm, projection = networks.norm, networks.prediction_projection
    weight, bias = projection.weight.double(), _bias_of(projection).double()
    if isinstance(norm, nn.LayerNorm):
        if norm.bias is not None:
            bias = bias + weight @ norm.bias.double()
        if norm.weight is not None:
            weight = weight * norm.weight.double()
    rows = [embedding.weight.double() for embedding in networks.embeddings]
    columns = weight.split([len(row[0]) for row in rows], dim=1)
    tables = [row @ part.t() for row, part in zip(rows, columns, strict=True)]
    sums = [torch.stack([row.sum(1), row.square().sum(1)], dim=1) for row in rows]
    return FusedStateless(
        tables=torch.stack(tables).float(),
        sums=torch.stack(sums) if isinstance(norm, nn.LayerNorm) else None,
        ones=weight.sum(1).float(),
        bias=bias.float(),
        size=projection.in_features,
        epsilon=norm.eps if isinstance(norm, nn.LayerNorm) else 0.0,
    )


def _bias_of(linear: nn.Linear) -> Tensor:
    return linear.bias if linear.bias is not None else linear.weight.new_zeros(linear.out_features)
