"""Define a transducer's networks, adapt plain torch modules to them, and multiply few rows by weights.

A transducer has an encoder (run by the caller), a prediction network that reads the tokens of a hypothesis, and a
joint network. For V tokens, the blank is label V. Example with V = 1024, a hidden size of 640 and an LSTM of one
layer:

    project_encoder   [N, 512] encoder frames                   -> [N, 640]
    start             -                                         -> [1, 640], ([1, 1, 640], [1, 1, 640])
    predict           [N] labels, states of N hypotheses        -> [N, 640], their states after the label
    join              [N, 640] frames, [N, 640] predictions     -> [N, 1025] logits; TDT: + durations

All tensors, also the parts of a state, have one row per hypothesis. The search moves rows and does not read them. A
row of a result must depend on its own inputs only, not on other rows or their number; see `whole_blocks` for matrix
products.

Networks compute in the type of their weights, or in that of autocast: float32, float16 or bfloat16. The cells of an
LSTM, log-probs and scores are always float32.

**Linear layers** for the few rows of a search step have results that do not depend on the number of rows. torch's BLAS
repacks the weight in every matrix product. With eight rows, repacking takes about as long as the product itself.
oneDNN can store packed weights, so a search packs each weight once, and again when it has changed. oneDNN also rounds
all rows in the same way. The BLAS works on blocks of rows, and rounds remaining rows differently.
"""

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from numbers import Integral
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from nemo_gpu_decoding.checks import FieldError, check_int, check_kind

MAX_TABLE_BYTES = 2**27  # of `LSTMNetworks`: 12,000 labels and 640 hidden values fit

State = tuple[Tensor, ...]


class TransducerNetworks(Protocol):
    """The interface of the prediction network and joint that a search calls. H is the size of the joint's input."""

    vocab_size: int  # V, without the blank; the blank is label V and also starts a text
    durations: tuple[int, ...]  # frames, for TDT models; empty for RNN-T

    @property
    def encoder_size(self) -> int:
        """Return D, the size of an encoder frame."""
        ...

    def evaluation(self) -> AbstractContextManager[None]:
        """Return a context that sets evaluation mode for a call of a search, and restores the mode afterwards."""
        ...

    def project_encoder(self, frames: Tensor) -> Tensor:
        """Map [N, D] encoder frames to [N, H]."""
        ...

    def start(self) -> tuple[Tensor, State]:
        """Return prediction [1, H] and state (one row each) of the empty text."""
        ...

    def predict(self, labels: Tensor, state: State) -> tuple[Tensor, State]:
        """Return predictions [N, H] and states of N texts after one more token each; labels [N] int64."""
        ...

    def join(self, frames: Tensor, predictions: Tensor) -> Tensor:
        """Return logits [N, V + 1], for TDT [N, V + 1 + durations], of N pairs."""
        ...


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put modules in training mode into evaluation mode within the context."""
    trained = [part for module in modules for part in module.modules() if part.training]
    for part in trained:
        part.training = False
    try:
        yield
    finally:
        for part in trained:
            part.training = True


class ModuleNetworks:
    """A joint made of torch modules; subclasses add the prediction network.

    Args:
        encoder_projection: D -> H.
        prediction_projection: output of the prediction network -> H.
        output: H -> V + 1 (+ durations): activation and linear layer.
        vocab_size: V.
        durations: durations of a TDT model, in frames.

    Raises:
        ValueError: V or the durations are out of range.
    """

    def __init__(
        self,
        encoder_projection: nn.Linear,
        prediction_projection: nn.Linear,
        output: nn.Module,
        *,
        vocab_size: int,
        durations: Sequence[int] = (),
    ) -> None:
        check_int("vocab_size", vocab_size, 1)
        check_kind("encoder_projection", encoder_projection, nn.Linear)
        check_kind("prediction_projection", prediction_projection, nn.Linear)
        check_kind("output", output, nn.Module)
        self.vocab_size = vocab_size
        self.durations = checked_durations(durations)
        self.encoder_projection = encoder_projection
        self.prediction_projection = prediction_projection
        self.output = output
        self._encoder_linear, self._prediction_linear = OneDNNLinear(), OneDNNLinear()
        self._output_linear = OneDNNLinear()

    @property
    def encoder_size(self) -> int:
        return self.encoder_projection.in_features

    def evaluation(self) -> AbstractContextManager[None]:
        return evaluating([self.output])

    def project_encoder(self, frames: Tensor) -> Tensor:
        weight, bias = self.encoder_projection.weight, self.encoder_projection.bias
        return self._encoder_linear(frames.to(weight.device, weight.dtype), weight, bias)

    def join(self, frames: Tensor, predictions: Tensor) -> Tensor:
        values = frames + predictions
        output = self.output
        if type(output) is not nn.Sequential or type(output[-1]) is not nn.Linear:
            return output(whole_blocks(values))[: len(values)]
        for part in output[:-1]:
            values = part(values)
        return self._output_linear(values, output[-1].weight, output[-1].bias)

    def _projected(self, prediction: Tensor) -> Tensor:
        projection = self.prediction_projection
        return self._prediction_linear(prediction, projection.weight, projection.bias)


class LSTMNetworks(ModuleNetworks):
    """A prediction network with an embedding and an LSTM.

    Args:
        embedding: V + 1 rows, the last for the blank.
        lstm: any number of layers, one direction, no projection.
        others: see `ModuleNetworks`.

    Raises:
        ValueError: the LSTM is of another kind.
    """

    def __init__(
        self,
        embedding: nn.Embedding,
        lstm: nn.LSTM,
        encoder_projection: nn.Linear,
        prediction_projection: nn.Linear,
        output: nn.Module,
        *,
        durations: Sequence[int] = (),
    ) -> None:
        check_kind("embedding", embedding, nn.Embedding)
        check_kind("lstm", lstm, nn.LSTM)
        size = embedding.num_embeddings - 1
        super().__init__(encoder_projection, prediction_projection, output, vocab_size=size, durations=durations)
        if lstm.bidirectional or lstm.proj_size:
            raise ValueError(f"lstm is {lstm}, expected an LSTM of one direction and without projection (proj_size=0)")
        self.embedding = embedding
        self.lstm = lstm
        self._table: MadeOfWeights[Tensor] = MadeOfWeights()  # of each type of products, as the next one
        self._first: MadeOfWeights[tuple[Tensor, State]] = MadeOfWeights()
        self._input_linears = [OneDNNLinear() for _ in range(lstm.num_layers)]
        self._recurrent_linears = [OneDNNLinear() for _ in range(lstm.num_layers)]

    def start(self) -> tuple[Tensor, State]:
        modules = self.embedding, self.lstm, self.prediction_projection
        is_plain = (*map(type, modules),) == (nn.Embedding, nn.LSTM, nn.Linear)
        if not (is_plain and torch.is_inference_mode_enabled()):
            return self._start()
        weights = [weight for module in modules for weight in own_weights(module)]
        return self._first.current(weights, self._start, product_dtype(self.embedding.weight)) or self._start()

    def _start(self) -> tuple[Tensor, State]:
        weight = self.embedding.weight
        zeros = weight.new_zeros(1, self.lstm.num_layers, self.lstm.hidden_size)
        blank = torch.full((1,), self.vocab_size, dtype=torch.int64, device=weight.device)
        return self.predict(blank, (zeros, zeros.to(torch.promote_types(zeros.dtype, torch.float32))))

    def predict(self, labels: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, cell = state  # [N, layers, hidden_size]
        table = self.input_table()
        hiddens: list[Tensor] = []
        cells: list[Tensor] = []
        # cell by cell: nn.LSTM repacks its weights in every call, which takes longer than one step
        for layer, (weight, recurrent, *biases) in enumerate(self.lstm.all_weights):
            if layer == 0 and table is not None:
                gates = table.index_select(0, labels)
            else:
                below = hiddens[-1] if hiddens else self.embedding(labels)
                gates = self._input_linears[layer](below, weight, sum(biases) if biases else None)
            recalled = self._recurrent_linears[layer](hidden[:, layer], recurrent, None)
            value, new_cell = _cell(gates.to(cell.dtype) + recalled, cell[:, layer])
            value = value.to(recalled.dtype)
            hiddens.append(value)
            cells.append(new_cell)
        return self._projected(value), (_layers(hiddens), _layers(cells))

    def table_bytes(self) -> int:
        """Return the size of `input_table`."""
        weight = self.lstm.all_weights[0][0]
        return self.embedding.num_embeddings * weight.shape[0] * product_dtype(weight).itemsize

    def input_table(self) -> Tensor | None:
        """Return [V + 1, 4 * hidden_size], the contribution of every label to the gates of the first layer.

        The table saves half of the LSTM's work, and is recomputed when a weight has changed. The result is None if the
        table would be too large, or if changes cannot be detected.
        """
        if self.table_bytes() > MAX_TABLE_BYTES:
            return None
        rows = self.embedding.weight
        weight, _, *biases = self.lstm.all_weights[0]
        bias = sum(biases) if biases else None
        sources, kind = [rows, weight, *biases], product_dtype(weight)
        return self._table.current(sources, lambda: functional.linear(rows, weight, bias), kind)


def _layers(values: list[Tensor]) -> Tensor:
    """Stack [N, hidden_size] per layer to [N, layers, hidden_size]."""
    return torch.stack(values, 1) if len(values) > 1 else values[0][:, None]


def _cell(gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden value and cell state of an LSTM cell after one step."""
    let_in, keep, new, let_out = gates.chunk(4, dim=1)
    cell = torch.sigmoid(keep) * cell + torch.sigmoid(let_in) * torch.tanh(new)
    return torch.sigmoid(let_out) * torch.tanh(cell), cell


class StatelessNetworks(ModuleNetworks):
    """A prediction network that reads only the last tokens, with an embedding per position.

    Args:
        embeddings: V + 1 rows each; the first one is for the last token.
        norm: layer that normalises the concatenated embeddings.
        others: see `ModuleNetworks`.
    """

    def __init__(
        self,
        embeddings: Sequence[nn.Embedding],
        norm: nn.Module,
        encoder_projection: nn.Linear,
        prediction_projection: nn.Linear,
        output: nn.Module,
        *,
        durations: Sequence[int] = (),
    ) -> None:
        for embedding in embeddings or [None]:
            check_kind("embeddings", embedding, nn.Embedding)
        size = embeddings[0].num_embeddings - 1
        super().__init__(encoder_projection, prediction_projection, output, vocab_size=size, durations=durations)
        self.embeddings = list(embeddings)
        self.norm = norm

    def table_bytes(self) -> int:
        """Return the size of the tables of projected embeddings, see fused_weights.py."""
        rows = sum(embedding.num_embeddings for embedding in self.embeddings)
        return rows * self.prediction_projection.out_features * torch.float32.itemsize

    def start(self) -> tuple[Tensor, State]:
        device = self.embeddings[0].weight.device
        blanks = torch.full((1, len(self.embeddings)), self.vocab_size, dtype=torch.int64, device=device)
        return self.predict(blanks[:, 0], (blanks[:, 1:],))

    def predict(self, labels: Tensor, state: State) -> tuple[Tensor, State]:
        context = torch.cat([state[0], labels[:, None]], dim=1)  # [N, positions], the last token last
        parts = [embed(context[:, -1 - i]) for i, embed in enumerate(self.embeddings)]
        return self._projected(self.norm(torch.cat(parts, dim=1))), (context[:, 1:],)


def checked_durations(durations: Sequence[int]) -> tuple[int, ...]:
    """Return durations of a TDT model: different integers >= 0.

    Raises:
        ValueError: they are negative, repeated or all 0.
    """
    values = tuple(durations) if isinstance(durations, Iterable) else (durations,)
    is_valid = all(isinstance(value, Integral) and value >= 0 for value in values)
    if not is_valid or len(set(values)) < len(values) or values == (0,):
        raise FieldError("durations", list(values), "different numbers of frames >= 0, not all 0")
    return tuple(map(int, values))


def checked_networks(networks: TransducerNetworks) -> TransducerNetworks:
    """Check networks by running them on one frame of zeros.

    Raises:
        ValueError: the joint's output does not fit the vocabulary and the durations.
    """
    if not hasattr(networks, "evaluation"):
        raise FieldError("networks", networks, "networks of a transducer, such as LSTMNetworks")
    with torch.inference_mode(), networks.evaluation():
        prediction, _ = networks.start()
        frame = networks.project_encoder(torch.zeros(1, networks.encoder_size))
        columns = networks.join(frame, prediction).shape[-1]
    labels, durations = networks.vocab_size + 1, len(networks.durations)
    if columns != labels + durations:
        raise ValueError(
            f"networks give {columns} columns, expected {labels + durations}: vocab_size "
            f"{networks.vocab_size}, one for the blank and {durations} durations"
        )
    return networks


def joint_layers(output: nn.Module) -> tuple[type[nn.Module], nn.Linear] | None:
    """Return the type of a joint's activation, and its linear layer; None if more than dropout is between the two."""
    if type(output) is not nn.Sequential or len(output) < 2 or type(output[-1]) is not nn.Linear:
        return None
    is_plain = all(type(part) is nn.Dropout for part in list(output)[1:-1])
    return (type(output[0]), output[-1]) if is_plain else None


# ----------------------------------------------------------------------------------- linear layers


ROW_BLOCK = 8  # largest number of rows in a block of the BLAS; oneDNN packs weights for this number of rows

T = TypeVar("T")

# (address, version counter) of a tensor; a different value means a different weight
Versions = list[tuple[int, int]]


def versions(sources: Sequence[Tensor]) -> Versions | None:
    """Return a value that changes when one of the tensors changes, or None if changes cannot be detected."""
    if any(source.is_inference() for source in sources):
        return None
    return [(source.data_ptr(), source._version) for source in sources]


def own_weights(module: nn.Module) -> list[Tensor]:
    """Return the weights of a module without submodules; `parameters` takes ten times as long."""
    return [weight for weight in module._parameters.values() if weight is not None]


def whole_blocks(rows: Tensor) -> Tensor:
    """Return rows [N, ...]; on a CPU, rows of zeros pad them to a multiple of ROW_BLOCK.

    Without the padding, the rounding of a row in a matrix product depends on the number of rows.
    """
    missing = -len(rows) % ROW_BLOCK
    if missing == 0 or rows.device.type != "cpu":
        return rows
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])


def product_dtype(weight: Tensor) -> torch.dtype:
    """Return the type in which torch multiplies by a weight: that of autocast if it is on, else that of the weight."""
    device = weight.device.type
    if torch.is_autocast_enabled(device) and weight.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return weight.dtype


class MadeOfWeights(Generic[T]):
    """A value that is computed from weights, and again when one of them has changed; for all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # For each kind: the versions, the weights, the value. The references keep the addresses from being reused
        self._made: dict[Hashable, tuple[Versions, list[Tensor], T]] = {}

    def current(self, sources: Sequence[Tensor], make: Callable[[], T], kind: Hashable = None) -> T | None:
        """Return the value of this kind for these weights, or None if their changes cannot be detected."""
        now = versions(sources)
        if now is None:
            return None
        with self._lock:
            made = self._made.get(kind)
            if made is None or made[0] != now:
                made = self._made[kind] = now, [source.detach() for source in sources], make()
            return made[2]

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the values out of copies, which compute them again: oneDNN's tensors and locks cannot be copied."""
        return type(self), ()


class OneDNNLinear:
    """A linear layer that uses one weight [outputs, inputs], packed on CPUs if oneDNN is available."""

    def __init__(self) -> None:
        self._packed: MadeOfWeights[Tensor] = MadeOfWeights()

    def __call__(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Map rows [N, inputs] to [N, outputs], of type `product_dtype`."""
        dtype = product_dtype(weight)
        if rows.dtype != dtype:  # streams that were opened in another precision
            rows = rows.to(dtype)
        packed = self._packed.current([weight], lambda: _packed(weight)) if _can_pack(rows, weight) else None
        if packed is None:
            return functional.linear(whole_blocks(rows), weight, bias)[: len(rows)]
        return torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")


def _packed(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROW_BLOCK)


def _can_pack(rows: Tensor, weight: Tensor) -> bool:
    is_float = weight.device.type == "cpu" and weight.dtype == rows.dtype == torch.float32
    return HAS_ONEDNN and is_float and not torch.is_grad_enabled()


def _has_onednn() -> bool:
    """Return whether torch has the oneDNN operators that torch.compile uses for linear layers."""
    operators = torch.ops.mkldnn
    return torch.backends.mkldnn.is_available() and all(
        hasattr(operators, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )


HAS_ONEDNN = _has_onednn()
