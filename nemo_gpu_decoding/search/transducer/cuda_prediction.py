"""The prediction network in the steps of a search on the GPU.

Plain LSTMs and stateless networks have a fast path: their products are fused (`fused_weights.py`), and the kernels of
`networks.cu` compute the rest. The product of an LSTM's hidden values and recurrent weights is computed once per text,
together with the layer's other product, and stored with the state. A step then needs per layer one kernel and one
product, which writes into a buffer of the workspace.

    lstm_layer 0, product 0, lstm_layer 1, product 1, ..., lstm_output

All other networks are called as torch modules, between two launches that move rows.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any

import torch

from nemo_gpu_decoding.cuda.launch import Signature, runtime
from nemo_gpu_decoding.cuda.signature import FLOAT_TYPES
from nemo_gpu_decoding.search.transducer import records
from nemo_gpu_decoding.search.transducer.cuda_workspace import Workspace
from nemo_gpu_decoding.search.transducer.fused_weights import FusedLSTM, FusedStateless, FusedWeights
from nemo_gpu_decoding.search.transducer.networks import TransducerNetworks

logger = logging.getLogger("nemo_gpu_decoding")

NETWORKS = "search/transducer/networks.cu"
LSTM, STATELESS, TORCH = "lstm", "stateless", "torch"


class Prediction(ABC):
    """The prediction network on a workspace; it computes the texts of `work.labels`, `.sources` and `.targets`.

    `key`: values that a captured step depends on, besides workspace and networks; the graph keeps a reference.
    """

    def __init__(self, work: Workspace, key: Hashable = None) -> None:
        self._work, self.key = work, key

    def begin(self) -> None:  # noqa: B027 (most have nothing to do)
        """Called before the first step of a run; the prediction cache may be new, see `Workspace.recalled_of`."""

    @abstractmethod
    def run(self) -> None:
        """Queue one step: entries `targets` of the cache become the texts of `sources`, extended by `labels`."""

    def _launch(self, signature: Signature, **others: Any) -> None:
        work = self._work
        kernels = runtime().load(NETWORKS, work.shape.device, {"VALUE": FLOAT_TYPES[work.cache[0].dtype]})
        work.launch(kernels, signature, grid=work.prediction_rows, block=records.MOVE_THREADS, **others)


class PredictionPaths:
    """Chooses the implementation of a decoder's prediction network on the GPU, and logs it."""

    def __init__(self, networks: TransducerNetworks) -> None:
        self._networks = networks
        self._weights = FusedWeights(networks)
        self.path: str | None = None  # of the last run: LSTM, STATELESS or TORCH

    def on(self, work: Workspace) -> Prediction:
        """The prediction network on a workspace, for one run."""
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
    """Any network, run by torch for all rows of the batch, also unused ones."""

    def __init__(self, networks: TransducerNetworks, work: Workspace) -> None:
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
    """An LSTM of L layers, H hidden values each."""

    def __init__(self, fused: FusedLSTM, work: Workspace) -> None:
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
    """A network that reads only the last labels: one kernel, no product."""

    def __init__(self, fused: FusedStateless, work: Workspace) -> None:
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
