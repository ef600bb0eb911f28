"""The prediction network in the steps of a search on the GPU.

Plain LSTMs and stateless networks in float32 have a fast path: their products are folded
(`folding.py`), and kernels that route the states do the rest (`prediction.cu`). What an LSTM's hidden
values give when multiplied by the recurrent weights is kept per text beside its state: it is computed
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
from nemo_gpu_decoding.search.transducer import launch_shape as shapes
from nemo_gpu_decoding.search.transducer.cuda_rows import move_rows
from nemo_gpu_decoding.search.transducer.cuda_workspace import Workspace
from nemo_gpu_decoding.search.transducer.folding import FoldedLSTM, FoldedStateless, Folding
from nemo_gpu_decoding.search.transducer.networks import TransducerNetworks

logger = logging.getLogger("nemo_gpu_decoding")

PLAN = "search/transducer/plan.cu"
PREDICTION = "search/transducer/prediction.cu"
LSTM, STATELESS, TORCH = "lstm", "stateless", "torch"


class Prediction(Protocol):
    """The prediction network on a workspace: `work.labels`, `.sources` and `.targets` say what to do."""

    @property
    def key(self) -> Hashable:
        """What a captured step depends on besides workspace and networks; lives as long as the graph."""
        ...

    def begin(self) -> None:
        """Called when the workspace has taken a memory of predictions, before its first step."""
        ...

    def run(self) -> None:
        """Queue one step: entries `targets` of the memory become the texts of `sources` and `labels`."""
        ...


class PredictionPaths:
    """Chooses how the prediction network of a decoder is run on the GPU, and says so in the log."""

    def __init__(self, networks: TransducerNetworks) -> None:
        self._networks = networks
        self._folding = Folding(networks)
        self.path: str | None = None  # that the last run took: LSTM, STATELESS or TORCH

    def on(self, work: Workspace) -> Prediction:
        """The prediction network on a workspace, for one run."""
        reason = self._folding.why_not(work.shape.device)
        if reason is not None:
            self._note(TORCH, f"torch runs the prediction network: {reason}")
            return TorchPrediction(self._networks, work)
        folded = self._folding.current()
        if isinstance(folded, FoldedLSTM):
            self._note(LSTM, "kernels run the LSTM of the prediction network")
            return LSTMPrediction(folded, work)
        self._note(STATELESS, "kernels run the stateless prediction network")
        return StatelessPrediction(folded, work)

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
        self._plan = runtime().load(PLAN, work.shape.device, shapes.DEFINES)
        self._before = tuple(
            work.room(f"state {i}", memory.dtype, work.rows, *memory.shape[1:])
            for i, memory in enumerate(work.memory[1:])
        )

    def begin(self) -> None:
        pass

    def run(self) -> None:
        work = self._work
        labels, sources, targets = (rows.view(-1) for rows in (work.labels, work.sources, work.targets))
        states = zip(work.memory[1:], self._before, strict=True)
        move_rows(self._plan, work.rows, *((memory, sources, state, None) for memory, state in states))
        output, state = self._networks.predict(labels, self._before)
        computed = zip((output, *state), work.memory, strict=True)
        move_rows(
            self._plan,
            work.rows,
            *((new.to(memory.dtype).contiguous(), None, memory, targets) for new, memory in computed),
        )


class LSTMPrediction:
    """An LSTM of L layers, H hidden values each."""

    def __init__(self, folded: FoldedLSTM, work: Workspace) -> None:
        self.key = folded
        self._folded = folded
        self._work = work
        self._outputs, self._hidden, self._memory = work.memory
        self._module = runtime().load(PREDICTION, work.shape.device)
        entries, layers, self._size = self._hidden.shape
        kind = torch.float32
        self._hidden_rows = work.room("hidden values", kind, work.rows, self._size)
        self._products = [
            work.room(f"product {layer}", kind, work.rows, weight.shape[1])
            for layer, weight in enumerate(folded.weights)
        ]
        # hidden values times recurrent weights, of every text
        self._recalled = [
            work.room(f"recalled {layer}", kind, entries, 4 * self._size) for layer in range(layers)
        ]

    def begin(self) -> None:
        for layer, weight in enumerate(self._folded.weights):
            recurrent = weight[:, : 4 * self._size]
            torch.mm(self._hidden[:, layer], recurrent, out=self._recalled[layer])

    def run(self) -> None:
        for layer, weight in enumerate(self._folded.weights):
            self._launch_layer(layer)
            torch.mm(self._hidden_rows, weight, out=self._products[layer])
        self._module.launch(
            shapes.LSTM_OUTPUT,
            grid=self._work.rows,
            block=shapes.MOVE_THREADS,
            targets=self._work.targets.view(-1),
            product=self._products[-1],
            bias=self._folded.output_bias,
            recalled=self._recalled[-1],
            outputs=self._outputs,
            size=self._size,
            width=self._outputs.shape[1],
        )

    def _launch_layer(self, layer: int) -> None:
        work, folded, above = self._work, self._folded, layer > 0
        self._module.launch(
            shapes.LSTM_LAYER,
            grid=work.rows,
            block=shapes.MOVE_THREADS,
            labels=work.labels.view(-1),
            sources=work.sources.view(-1),
            targets=work.targets.view(-1),
            table=None if above else folded.table,
            product=self._products[layer - 1] if above else None,
            bias=folded.biases[layer] if above else None,
            recalled_below=self._recalled[layer - 1] if above else None,
            recalled=self._recalled[layer],
            hidden=self._hidden,
            memory=self._memory,
            hidden_rows=self._hidden_rows,
            size=self._size,
            layer=layer,
            num_layers=len(folded.weights),
        )


class StatelessPrediction:
    """A network that sees the last labels only: one kernel, no product."""

    def __init__(self, folded: FoldedStateless, work: Workspace) -> None:
        self.key = folded
        self._folded = folded
        self._work = work
        self._module = runtime().load(PREDICTION, work.shape.device)

    def begin(self) -> None:
        pass

    def run(self) -> None:
        work, folded = self._work, self._folded
        outputs, contexts = work.memory
        positions, num_labels, width = folded.tables.shape
        self._module.launch(
            shapes.STATELESS,
            grid=work.rows,
            block=shapes.MOVE_THREADS,
            labels=work.labels.view(-1),
            sources=work.sources.view(-1),
            targets=work.targets.view(-1),
            tables=folded.tables,
            sums=folded.sums,
            ones=folded.ones,
            bias=folded.bias,
            contexts=contexts,
            outputs=outputs,
            epsilon=folded.epsilon,
            size=folded.size,
            width=width,
            num_labels=num_labels,
            positions=positions,
        )
