"""Run the prediction network and the joint in the steps of a search on the GPU.

**Prediction network.** Plain LSTMs and stateless networks have a fast path: their products are fused
(`fused_weights.py`), and the kernels of `networks.cu` compute the rest. The product of an LSTM's hidden values and
recurrent weights is computed once per text, together with the layer's other product, and stored with the state. A step
then needs per layer one kernel and one product, which writes into a buffer of the workspace.

    lstm_layer 0, product 0, lstm_layer 1, product 1, ..., lstm_output

All other networks are called as torch modules, between two launches that move rows.

**Joint**: logits of the hypotheses that read a frame. A joint of ReLU and one linear layer has a fast path: a kernel
gathers the rows of frames and predictions, adds them and applies the ReLU (`join_rows` of `networks.cu`). One product
with the layer's weights then writes the logits into a buffer of the workspace. The weights are cast once to the type
in which torch would multiply. All other joints are called as torch modules, on rows that a kernel has gathered.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nemo_gpu_decoding.cuda.launch import Signature, runtime
from nemo_gpu_decoding.cuda.signature import FLOAT_TYPES
from nemo_gpu_decoding.search.transducer import networks as nets
from nemo_gpu_decoding.search.transducer import records
from nemo_gpu_decoding.search.transducer.cuda_workspace import RunWorkspace
from nemo_gpu_decoding.search.transducer.fused_weights import FusedLSTM, FusedStateless, FusedWeights

logger = logging.getLogger("nemo_gpu_decoding")

NETWORKS = "search/transducer/networks.cu"
LSTM, STATELESS, TORCH = "lstm", "stateless", "torch"


class Prediction(ABC):
    """The prediction network on a workspace; it computes the texts of `work.labels`, `.sources` and `.targets`.

    `key`: values that a captured step depends on, besides workspace and networks; the graph keeps a reference.
    """

    def __init__(self, work: RunWorkspace, key: Hashable = None) -> None:
        self._work, self.key = work, key

    def begin(self) -> None:  # noqa: B027 (most have nothing to do)
        """Prepare the first step of a run; the prediction cache may be new, see `RunWorkspace.recalled_of`."""

    @abstractmethod
    def run(self) -> None:
        """Queue one step: entries `targets` of the cache become the texts of `sources`, extended by `labels`."""

    def _launch(self, signature: Signature, **others: Any) -> None:
        work = self._work
        kernels = runtime().load(NETWORKS, work.shape.device, {"VALUE": FLOAT_TYPES[work.cache[0].dtype]})
        work.launch(kernels, signature, grid=work.prediction_rows, block=records.MOVE_THREADS, **others)


class PredictionPaths:
    """An object that selects the implementation of a decoder's prediction network on the GPU, and logs it."""

    def __init__(self, networks: nets.TransducerNetworks) -> None:
        self._networks = networks
        self._weights = FusedWeights(networks)
        self.path: str | None = None  # of the last run: LSTM, STATELESS or TORCH

    def on(self, work: RunWorkspace) -> Prediction:
        """Return the prediction network on a workspace, for one run."""
        reason = self._weights.why_not(work.shape.device)
        if reason is None and work.cache[0].dtype != self._weights.dtype:
            reason = f"predictions are {work.cache[0].dtype} and products {self._weights.dtype} (autocast)"
        if reason is not None:
            self._note(TORCH, f"torch runs the prediction network: {reason}")
            return TorchPrediction(self._networks, work)
        fused = self._weights.current()
        if isinstance(fused, FusedLSTM):
            self._note(LSTM, "kernels run the LSTM of the prediction network")
            return LSTMPrediction(fused, work)
        self._note(STATELESS, "kernels run the stateless prediction network")
        return StatelessPrediction(fused, work)

    def _note(self, path: str, message: str) -> None:
        if path != self.path:
            logger.info("on the GPU, %s", message)
        self.path = path


class TorchPrediction(Prediction):
    """A prediction network of any kind, which torch runs for all rows of the batch, including unused rows."""

    def __init__(self, networks: nets.TransducerNetworks, work: RunWorkspace) -> None:
        super().__init__(work)
        self._networks = networks
        self._before = tuple(
            work.buffer(f"state {i}", part.dtype, work.prediction_rows, *part.shape[1:])
            for i, part in enumerate(work.cache[1:])
        )

    def run(self) -> None:
        work = self._work
        states = zip(work.cache[1:], self._before, strict=True)
        work.move_rows(work.prediction_rows, *((part, work.sources, state, None) for part, state in states))
        output, state = self._networks.predict(work.labels, self._before)
        computed = zip((output, *state), work.cache, strict=True)
        moves = ((new.to(part.dtype).contiguous(), None, part, work.targets) for new, part in computed)
        work.move_rows(work.prediction_rows, *moves)


class LSTMPrediction(Prediction):
    """A prediction network that is an LSTM of L layers, H hidden values each."""

    def __init__(self, fused: FusedLSTM, work: RunWorkspace) -> None:
        super().__init__(work, fused)
        self._fused = fused
        self._outputs, self._hidden, self._cells = work.cache
        entries, layers, self._size = self._hidden.shape
        kind = fused.table.dtype
        self._hidden_rows = work.buffer("hidden values", kind, work.prediction_rows, self._size)
        self._products = [
            work.buffer(f"product {layer}", kind, work.prediction_rows, weight.shape[1])
            for layer, weight in enumerate(fused.weights)
        ]
        # hidden values times recurrent weights, of every text
        self._recalled = [work.buffer(f"recalled {layer}", kind, entries, 4 * self._size) for layer in range(layers)]

    def begin(self) -> None:
        if self._work.recalled_of is self._fused:
            return
        self._work.recalled_of = self._fused
        for layer, weight in enumerate(self._fused.weights):
            recurrent = weight[:, : 4 * self._size]
            torch.mm(self._hidden[:, layer], recurrent, out=self._recalled[layer])

    def run(self) -> None:
        fused = self._fused
        for layer, weight in enumerate(fused.weights):
            above = layer > 0
            self._launch(
                records.LSTM_LAYER,
                table=None if above else fused.table,
                product=self._products[layer - 1] if above else None,
                bias=fused.biases[layer] if above else None,
                recalled_below=self._recalled[layer - 1] if above else None,
                recalled=self._recalled[layer],
                hidden=self._hidden,
                cells=self._cells,
                hidden_rows=self._hidden_rows,
                size=self._size,
                layer=layer,
                num_layers=len(fused.weights),
            )
            torch.mm(self._hidden_rows, weight, out=self._products[layer])
        self._launch(
            records.LSTM_OUTPUT,
            product=self._products[-1],
            bias=fused.output_bias,
            recalled=self._recalled[-1],
            outputs=self._outputs,
            size=self._size,
            width=self._outputs.shape[1],
        )


class StatelessPrediction(Prediction):
    """A prediction network that reads only the last labels: one kernel, no product."""

    def __init__(self, fused: FusedStateless, work: RunWorkspace) -> None:
        super().__init__(work, fused)
        self._fused = fused

    def run(self) -> None:
        fused, (outputs, contexts) = self._fused, self._work.cache
        positions, num_labels, width = fused.tables.shape
        self._launch(
            records.STATELESS,
            **vars(fused),
            contexts=contexts,
            outputs=outputs,
            width=width,
            num_labels=num_labels,
            positions=positions,
        )


# --------------------------------------------------------------------------------------- the joint


COLUMNS = 8  # the columns of the logits are a multiple of this: tensor cores need rows aligned to 16 bytes


@dataclass(frozen=True, eq=False)
class OutputLayer:
    """The joint's linear layer, where columns beyond its outputs are zeros."""

    weight: Tensor  # [H, C]
    bias: Tensor  # [C], of the same type


class Joint(ABC):
    """The joint on a workspace. A captured step depends on the values `key`, to which the graph keeps a reference."""

    key: OutputLayer | None = None

    @abstractmethod
    def logits(self) -> Tensor:
        """Queue one step; return [rows, V + 1 (+ D) or more] logits, where rows without a frame are undefined."""


class TorchJoint(Joint):
    """A joint of any kind, which torch runs."""

    def __init__(self, networks: nets.TransducerNetworks, work: RunWorkspace) -> None:
        self._networks, self._work = networks, work
        # rows of hypotheses that read no frame keep old values
        self._frames, self._predictions = (
            work.buffer(f"joint's {name}", rows.dtype, work.rows, *rows.shape[1:])
            for name, rows in (("frames", work.frames), ("predictions", work.cache[0]))
        )

    def logits(self) -> Tensor:
        work = self._work
        work.move_rows(
            work.rows,
            (work.frames, work.frame_rows.view(-1), self._frames, None),
            (work.cache[0], work.text_rows.view(-1), self._predictions, None),
        )
        logits = self._networks.join(self._frames, self._predictions)
        return (logits if logits.dtype in FLOAT_TYPES else logits.float()).contiguous()


class FusedJoint(Joint):
    """A joint that is a ReLU and a linear layer."""

    def __init__(self, layer: OutputLayer, work: RunWorkspace) -> None:
        self.key, self._work = layer, work
        self._layer, dtype = layer, layer.weight.dtype
        size, columns = layer.weight.shape
        self._hidden_rows = work.buffer("joint's hidden values", dtype, work.rows, size)
        self._logits = work.buffer("logits", dtype, work.rows, columns)
        self._kernels = runtime().load(NETWORKS, work.shape.device, {"VALUE": FLOAT_TYPES[dtype]})

    def logits(self) -> Tensor:
        work, layer = self._work, self._layer
        work.launch(
            self._kernels,
            records.JOIN_ROWS,
            grid=work.rows,
            block=records.MOVE_THREADS,
            outputs=work.cache[0],
            hidden_rows=self._hidden_rows,
            width=self._hidden_rows.shape[1],
        )
        return torch.addmm(layer.bias, self._hidden_rows, layer.weight, out=self._logits)


class JointPaths:
    """An object that selects the implementation of a decoder's joint on the GPU, for all threads."""

    def __init__(self, networks: nets.TransducerNetworks) -> None:
        self._networks = networks
        self._layers: nets.MadeOfWeights[OutputLayer] = nets.MadeOfWeights()  # by the type of products

    def on(self, work: RunWorkspace) -> Joint:
        """Return the joint for one run on a workspace that already holds the frames."""
        linear = self._linear()
        if linear is None or linear.weight.device != work.shape.device:
            return TorchJoint(self._networks, work)
        dtype = nets.product_dtype(linear.weight)
        sources = list(linear.parameters())
        given = {work.frames.dtype, work.cache[0].dtype}
        layer = None
        if given == {dtype} and dtype in FLOAT_TYPES:
            layer = self._layers.current(sources, lambda: _output_layer(linear, dtype), dtype)
        return TorchJoint(self._networks, work) if layer is None else FusedJoint(layer, work)

    def _linear(self) -> nn.Linear | None:
        """Return the layer after the ReLU, or None if the joint has another form."""
        networks: Any = self._networks
        if type(networks) not in (nets.LSTMNetworks, nets.StatelessNetworks):
            return None
        activation, linear = nets.joint_layers(networks.output) or (None, None)
        return linear if activation is nn.ReLU else None


def _output_layer(linear: nn.Linear, dtype: torch.dtype) -> OutputLayer:
    missing = -linear.out_features % COLUMNS
    bias = linear.bias if linear.bias is not None else linear.weight.new_zeros(linear.out_features)
    weight = functional.pad(linear.weight.detach().to(dtype), (0, 0, 0, missing)).t()
    layer = OutputLayer(weight, functional.pad(bias.detach().to(dtype), (0, missing)))
    if weight.device.type == "cuda":  # later work may be on any stream
        torch.cuda.current_stream(weight.device).synchronize()
    return layer
