"""The prediction network in the steps of a search on the GPU.

Plain LSTMs and stateless networks in float32 have a fast path: their products are fused
(`fused_weights.py`), and kernels that route the states do the rest (`prediction.cu`). What an LSTM's
hidden values give when multiplied by the recurrent weights is kept per text beside its state: computed
once, together with the layer's other product, and all that a step has to do for a layer is one kernel
and one product that writes into a buffer of the workspace.

    lstm_layer 0, product 0, lstm_layer 1, product 1, ..., lstm_output

All other networks are called as torch modules, between two moves of rows.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Protocol

import torch

from nemo_gpu_decoding.cuda.launch import runtime
from nemo_gpu_decoding.search.transducer import records
from nemo_gpu_decoding.search.transducer.cuda_workspace import SCHEDULE, Workspace, move_rows
from nemo_gpu_decoding.search.transducer.fused_weights import FusedLSTM, FusedStateless, FusedWeights
from nemo_gpu_decoding.search.transducer.networks import TransducerNetworks

logger = logging.getLogger("nemo_gpu_decoding")

PREDICTION = "search/transducer/prediction.cu"
LSTM, STATELESS, TORCH = "lstm", "stateless", "torch"


class Prediction(Protocol):
    """The prediction network on a workspace: `work.labels`, `.sources` and `.targets` say what to do."""

    @property
    def key(self) -> Hashable:
        """What a captured step depends on besides workspace and networks; lives as long as the graph."""
        ...

    def begin(self) -> None:
        """Called when the workspace has taken a prediction cache, before its first step."""
        ...

    def run(self) -> None:
        """Queue one step: entries `targets` of the cache become the texts of `sources` and `labels`."""
        ...


class PredictionPaths:
    """Chooses how the prediction network of a decoder is run on the GPU, and says so in the log."""

    def __init__(self, networks: TransducerNetworks) -> None:
        self._networks = networks
        self._weights = FusedWeights(networks)
        self.path: str | None = None  # that the last run took: LSTM, STATELESS or TORCH

    def on(self, work: Workspace) -> Prediction:
        """The prediction network on a workspace, for one run."""
        reason = self._weights.why_not(work.shape.device)
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


class TorchPrediction:
    """Any network, as torch runs it: for all rows, whether they need it or not."""

    key = None

    def __init__(self, networks: TransducerNetworks, work: Workspace) -> None:
        self._networks = networks
        self._work = work
        self._schedule = runtime().load(SCHEDULE, work.shape.device)
        self._before = tuple(
            work.buffer(f"state {i}", part.dtype, work.rows, *part.shape[1:]) for i, part in enumerate(work.cache[1:])
        )

    def begin(self) -> None:
        pass

    def run(self) -> None:
        work = self._work
        labels, sources, targets = (rows.view(-1) for rows in (work.labels, work.sources, work.targets))
        states = zip(work.cache[1:], self._before, strict=True)
        move_rows(self._schedule, work.rows, *((part, sources, state, None) for part, state in states))
        output, state = self._networks.predict(labels, self._before)
        computed = zip((output, *state), work.cache, strict=True)
        move_rows(
            self._schedule,
            work.rows,
            *((new.to(part.dtype).contiguous(), None, part, targets) for new, part in computed),
        )


class LSTMPrediction:
    """An LSTM of L layers, H hidden values each."""

    def __init__(self, fused: FusedLSTM, work: Workspace) -> None:
        self.key = fused
        self._fused = fused
        self._work = work
        self._outputs, self._hidden, self._cells = work.cache
        self._module = runtime().load(PREDICTION, work.shape.device)
        entries, layers, self._size = self._hidden.shape
        kind = torch.float32
        self._hidden_rows = work.buffer("hidden values", kind, work.rows, self._size)
        self._products = [
            work.buffer(f"product {layer}", kind, work.rows, weight.shape[1])
            for layer, weight in enumerate(fused.weights)
        ]
        # hidden values times recurrent weights, of every text
        self._recalled = [work.buffer(f"recalled {layer}", kind, entries, 4 * self._size) for layer in range(layers)]

    def begin(self) -> None:
        for layer, weight in enumerate(self._fused.weights):
            recurrent = weight[:, : 4 * self._size]
            torch.mm(self._hidden[:, layer], recurrent, out=self._recalled[layer])

    def run(self) -> None:
        for layer, weight in enumerate(self._fused.weights):
            self._launch_layer(layer)
            torch.mm(self._hidden_rows, weight, out=self._products[layer])
        self._module.launch(
            records.LSTM_OUTPUT,
            grid=self._work.rows,
            block=records.MOVE_THREADS,
            targets=self._work.targets.view(-1),
            product=self._products[-1],
            bias=self._fused.output_bias,
            recalled=self._recalled[-1],
            outputs=self._outputs,
            size=self._size,
            width=self._outputs.shape[1],
        )

    def _launch_layer(self, layer: int) -> None:
        work, fused, above = self._work, self._fused, layer > 0
        self._module.launch(
            records.LSTM_LAYER,
            grid=work.rows,
            block=records.MOVE_THREADS,
            labels=work.labels.view(-1),
            sources=work.sources.view(-1),
            targets=work.targets.view(-1),
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


class StatelessPrediction:
    """A network that sees the last labels only: one kernel, no product."""

    def __init__(self, fused: FusedStateless, work: Workspace) -> None:
        self.key = fused
        self._fused = fused
        self._work = work
        self._module = runtime().load(PREDICTION, work.shape.device)

    def begin(self) -> None:
        pass

    def run(self) -> None:
        work, fused = self._work, self._fused
        outputs, contexts = work.cache
        positions, num_labels, width = fused.tables.shape
        self._module.launch(
            records.STATELESS,
            grid=work.rows,
            block=records.MOVE_THREADS,
            labels=work.labels.view(-1),
            sources=work.sources.view(-1),
            targets=work.targets.view(-1),
            tables=fused.tables,
            sums=fused.sums,
            ones=fused.ones,
            bias=fused.bias,
            contexts=contexts,
            outputs=outputs,
            epsilon=fused.epsilon,
            size=fused.size,
            width=width,
            num_labels=num_labels,
            positions=positions,
        )
