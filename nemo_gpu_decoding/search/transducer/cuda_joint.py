"""The joint in the steps of a search on the GPU: logits of the hypotheses that read a frame.

A joint of ReLU and one linear layer has a fast path: a kernel gathers the rows of frames and predictions, adds them
and applies the ReLU (`join_rows` of `networks.cu`). One product with the layer's weights then writes the logits into a
buffer of the workspace. The weights are cast once to the type in which torch would multiply. All other joints are
called as torch modules, on rows that a kernel has gathered.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from nemo_gpu_decoding.cuda.launch import runtime
from nemo_gpu_decoding.search.transducer import records
from nemo_gpu_decoding.search.transducer.cuda_prediction import NETWORKS
from nemo_gpu_decoding.search.transducer.cuda_workspace import Workspace
from nemo_gpu_decoding.search.transducer.networks import LSTMNetworks, StatelessNetworks, TransducerNetworks
from nemo_gpu_decoding.search.transducer.onednn_linear import MadeOfWeights, product_dtype, versions

COLUMNS = 8  # the columns of the logits are a multiple of this: tensor cores need rows aligned to 16 bytes


@dataclass(frozen=True, eq=False)
class OutputLayer:
    """The joint's linear layer; columns beyond its outputs are zeros."""

    weight: Tensor  # [H, C]
    bias: Tensor  # [C], of the same type


class Joint(ABC):
    """The joint on a workspace. `key`: values that a captured step depends on; the graph keeps a reference."""

    key: OutputLayer | None = None

    @abstractmethod
    def logits(self) -> Tensor:
        """Queue one step: [rows, V + 1 (+ D) or more] logits; rows that read no frame are undefined."""


class TorchJoint(Joint):
    """Any joint, as torch runs it."""

    def __init__(self, networks: TransducerNetworks, work: Workspace) -> None:
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
        return (logits if logits.dtype in records.VALUE_TYPES else logits.float()).contiguous()


class FusedJoint(Joint):
    """ReLU and a linear layer."""

    def __init__(self, layer: OutputLayer, work: Workspace) -> None:
        self.key, self._work = layer, work
        self._layer, dtype = layer, layer.weight.dtype
        size, columns = layer.weight.shape
        self._hidden_rows = work.buffer("joint's hidden values", dtype, work.rows, size)
        self._logits = work.buffer("logits", dtype, work.rows, columns)
        self._kernels = runtime().load(NETWORKS, work.shape.device, {"VALUE": records.VALUE_TYPES[dtype]})

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
    """Chooses the implementation of a decoder's joint on the GPU, for all threads."""

    def __init__(self, networks: TransducerNetworks) -> None:
        self._networks = networks
        self._lock = threading.Lock()
        self._layers: dict[torch.dtype, MadeOfWeights[OutputLayer]] = {}

    def on(self, work: Workspace) -> Joint:
        """The joint for one run on a workspace that already holds the frames."""
        linear = self._linear()
        if linear is None or linear.weight.device != work.shape.device:
            return TorchJoint(self._networks, work)
        dtype = product_dtype(linear.weight)
        sources = list(linear.parameters())
        given = {work.frames.dtype, work.cache[0].dtype}
        if given != {dtype} or dtype not in records.VALUE_TYPES or versions(sources) is None:
            return TorchJoint(self._networks, work)
        with self._lock:
            made = self._layers.setdefault(dtype, MadeOfWeights())
            layer = made.current(sources, lambda: _output_layer(linear, dtype))
        assert layer is not None
        return FusedJoint(layer, work)

    def _linear(self) -> nn.Linear | None:
        """The layer after the ReLU; None if the joint has another form."""
        networks = self._networks
        if type(networks) not in (LSTMNetworks, StatelessNetworks):
            return None
        assert isinstance(networks, (LSTMNetworks, StatelessNetworks))
        output = networks.output
        if type(output) is not nn.Sequential:
            return None
        kinds = [type(part) for part in output if type(part) is not nn.Dropout]
        last = output[-1]
        return last if kinds == [nn.ReLU, nn.Linear] and type(last) is nn.Linear else None


def _output_layer(linear: nn.Linear, dtype: torch.dtype) -> OutputLayer:
    missing = -linear.out_features % COLUMNS
    bias = linear.bias if linear.bias is not None else linear.weight.new_zeros(linear.out_features)
    weight = functional.pad(linear.weight.detach().to(dtype), (0, 0, 0, missing)).t()
    layer = OutputLayer(weight, functional.pad(bias.detach().to(dtype), (0, missing)))
    if weight.device.type == "cuda":  # later work may be on any stream
        torch.cuda.current_stream(weight.device).synchronize()
    return layer
