"""An LSTM prediction network and a joint inside compiled code, for the steps of a search on the CPU.

In torch, a step of the search takes about 30 calls, most of them longer than their work on a few rows. Here a run with
all its steps is one call of compiled code. The networks do what `LSTMNetworks` does, with these differences:

* The product of a text's hidden values and the recurrent weights is computed when the text is first extended, and kept
  for its other extensions. A quarter to a third of the texts that reach a beam are such siblings.
* A row of logits becomes log-probs at once, in double, without intermediate arrays.
* A row of a product does not depend on other rows, see `cpu_math.py`.

Results differ from torch's by rounding only. All other networks, types and devices are run by torch.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from nemo_gpu_decoding.jit import linked
from nemo_gpu_decoding.search.transducer.cpu_math import (
    copy,
    log_softmax,
    multiply,
    packed,
    sigmoid,
    tanh,
    whole_panels,
    whole_rows,
)
from nemo_gpu_decoding.search.transducer.fused_weights import FusedWeights
from nemo_gpu_decoding.search.transducer.networks import LSTMNetworks, MadeOfWeights, TransducerNetworks

RELU, TANH, SIGMOID = range(3)
ACTIVATIONS: dict[type[nn.Module], int] = {nn.ReLU: RELU, nn.Tanh: TANH, nn.Sigmoid: SIGMOID}


class PackedNetworks(NamedTuple):
    """L layers with H hidden values each, J inputs of the joint, V tokens; panels as in `cpu_math.py`."""

    table: np.ndarray  # [V + 1, 4 H], contributions of labels to the gates of the first layer
    recurrent: np.ndarray  # [L, panels of H -> 4 H]
    inputs: np.ndarray  # [L - 1, panels of H -> 4 H], of the layers above the first
    projection: np.ndarray  # panels of H -> J
    output: np.ndarray  # panels of J -> V + 1 (+ durations)
    activation: int


class TextCache(NamedTuple):
    """The prediction cache of n utterances with P entries each, E = n * P."""

    outputs: np.ndarray  # [E, J]
    hidden: np.ndarray  # [E, L, H]
    cells: np.ndarray  # [E, L, H]
    recalled: np.ndarray  # [E, L, 4 H], hidden values times recurrent weights
    is_recalled: np.ndarray  # [E] bool, whether `recalled` is that of the entry's text


class NetworkBuffers(NamedTuple):
    """Rows of the products of one step."""

    inputs: np.ndarray  # [R, H] float32
    joint_inputs: np.ndarray  # [R, J] float32
    products: np.ndarray  # [R, C] float32, C as wide as the widest product
    logits: np.ndarray  # [V + 1 (+ D)] float64
    requests: np.ndarray  # [3, R] int64: labels, sources and targets of new texts
    unknown: np.ndarray  # [R] int64: entries without a recurrent product


class NetworkArrays(NamedTuple):
    """What the networks read and write in a run."""

    frames: np.ndarray  # [F, J] projected encoder frames
    texts: TextCache
    buffers: NetworkBuffers


class CompiledNetworks:
    """The packed weights of a decoder's networks, made again when a weight has changed; for all threads."""

    def __init__(self, networks: TransducerNetworks) -> None:
        self._networks = networks
        self._fused = FusedWeights(networks)
        self._lock = threading.Lock()
        self._packed: MadeOfWeights[PackedNetworks] = MadeOfWeights()

    def current(self) -> PackedNetworks | None:
        """The packed weights; None if torch must run the networks."""
        networks = self._networks
        if not (isinstance(networks, LSTMNetworks) and self._fused.why_not(torch.device("cpu")) is None):
            return None
        layers = _joint_layers(networks.output)
        weights = [*networks.lstm.parameters(), *networks.embedding.parameters()]
        weights += networks.prediction_projection.parameters()
        if layers is None or self._fused.dtype != torch.float32:
            return None
        weights += layers[1].parameters()
        if any(weight.dtype != torch.float32 or weight.device.type != "cpu" for weight in weights):
            return None
        with self._lock:
            return self._packed.current(weights, lambda: _packed(networks, *layers))


def _joint_layers(output: nn.Module) -> tuple[int, nn.Linear] | None:
    """Activation and linear layer of a joint; None if it is of another kind."""
    if type(output) is not nn.Sequential or len(output) < 2 or type(output[-1]) is not nn.Linear:
        return None
    activation = ACTIVATIONS.get(type(output[0]))
    is_plain = all(type(part) is nn.Dropout for part in list(output)[1:-1])
    return (activation, output[-1]) if activation is not None and is_plain else None


def _packed(networks: LSTMNetworks, activation: int, output: nn.Linear) -> PackedNetworks:
    layers, projection = networks.lstm.all_weights, networks.prediction_projection
    table = networks.input_table()
    assert table is not None  # checked by `why_not`
    recurrent = [packed(weight, None) for _, weight, *_ in layers]
    inputs = [packed(weight, sum(biases) if biases else None) for weight, _, *biases in layers[1:]]
    return PackedNetworks(
        table=table.detach().numpy(),
        recurrent=np.stack(recurrent),
        inputs=np.stack(inputs) if inputs else np.zeros((0, 0), np.float32),
        projection=packed(projection.weight, projection.bias),
        output=packed(output.weight, output.bias),
        activation=activation,
    )


def text_cache(outputs: Tensor, state: tuple[Tensor, ...]) -> TextCache:
    """The cache over the tensors of a `Predictions`, without recurrent products."""
    hidden, cells = (part.numpy() for part in state)
    entries, layers, size = hidden.shape
    recalled = np.empty((entries, layers, 4 * size), np.float32)
    return TextCache(outputs.numpy(), hidden, cells, recalled, np.zeros(entries, np.bool_))


def network_buffers(texts: TextCache, columns: int, rows: int) -> NetworkBuffers:
    """Buffers for steps with at most this number of rows, of joints with V + 1 (+ D) columns."""
    size, joint = texts.hidden.shape[2], texts.outputs.shape[1]
    whole, widest = whole_rows(rows), max(columns, 4 * size, joint)
    return NetworkBuffers(
        inputs=np.zeros((whole, size), np.float32),
        joint_inputs=np.zeros((whole, joint), np.float32),
        products=np.zeros((whole, whole_panels(widest)), np.float32),
        logits=np.zeros(columns),
        requests=np.zeros((3, rows), np.int64),
        unknown=np.zeros(rows, np.int64),
    )


@linked
def join(sources, count, labels, scale, networks, arrays, log_probs):
    """Log-probs of `count` pairs of a frame and a text; labels and durations are normalised separately.

    Args:
        sources: `frames`, rows of the frames, and `texts`, entries of the cache, each [count or more].
        count: number of pairs.
        labels: V + 1.
        scale: 1 / temperature.
        log_probs: [count or more, V + 1 (+ D)] float32, the result.
    """
    texts, buffers = arrays.texts, arrays.buffers
    for r in range(count):
        frame, text = arrays.frames[sources.frames[r]], texts.outputs[sources.texts[r]]
        values = buffers.joint_inputs[r]
        if networks.activation == RELU:
            for i in range(values.shape[0]):
                value = frame[np.uintp(i)] + text[np.uintp(i)]
                values[np.uintp(i)] = np.float32(0.0) if value < 0 else value
        elif networks.activation == TANH:
            for i in range(values.shape[0]):
                values[np.uintp(i)] = np.float32(tanh(np.float64(frame[np.uintp(i)] + text[np.uintp(i)])))
        else:
            for i in range(values.shape[0]):
                values[np.uintp(i)] = np.float32(sigmoid(np.float64(frame[np.uintp(i)] + text[np.uintp(i)])))
    multiply(buffers.joint_inputs, count, networks.output, buffers.products)
    columns = log_probs.shape[1]
    for r in range(count):
        log_softmax(buffers.products[r, :labels], scale, buffers.logits, log_probs[r, :labels])
        if labels < columns:
            log_softmax(buffers.products[r, labels:columns], scale, buffers.logits, log_probs[r, labels:columns])


@linked
def predict(count, networks, arrays):
    """Compute the first `count` texts of `requests`."""
    texts, buffers = arrays.texts, arrays.buffers
    labels, sources, targets = buffers.requests[0], buffers.requests[1], buffers.requests[2]
    _recall(sources, count, networks, texts, buffers)
    for layer in range(texts.hidden.shape[1]):
        if layer > 0:
            multiply(buffers.inputs, count, networks.inputs[layer - 1], buffers.products)
        for i in range(count):
            products = networks.table[labels[i]] if layer == 0 else buffers.products[i]
            _cell(products, sources[i], targets[i], layer, texts)
            copy(texts.hidden[targets[i], layer], buffers.inputs[i])
    multiply(buffers.inputs, count, networks.projection, buffers.products)
    for i in range(count):
        copy(buffers.products[i], texts.outputs[targets[i]])
        texts.is_recalled[targets[i]] = False


@linked
def _recall(sources, count, networks, texts, buffers):
    """The recurrent products of these entries that are not known yet."""
    unknown = 0
    for i in range(count):
        if not texts.is_recalled[sources[i]]:
            texts.is_recalled[sources[i]] = True
            buffers.unknown[unknown] = sources[i]
            unknown += 1
    for layer in range(texts.hidden.shape[1] if unknown else 0):
        for i in range(unknown):
            copy(texts.hidden[buffers.unknown[i], layer], buffers.inputs[i])
        multiply(buffers.inputs, unknown, networks.recurrent[layer], buffers.products)
        for i in range(unknown):
            copy(buffers.products[i], texts.recalled[buffers.unknown[i], layer])


@linked
def _cell(given, source, target, layer, texts):
    """An LSTM cell: entry `target` becomes the text of `source` and a label, with the contributions `given` [4 H]."""
    size = texts.hidden.shape[2]
    recalled, before = texts.recalled[source, layer], texts.cells[source, layer]
    hidden, cells = texts.hidden[target, layer], texts.cells[target, layer]
    let_in, keep, new, let_out = given[:size], given[size : 2 * size], given[2 * size : 3 * size], given[3 * size :]
    also_in, also_keep = recalled[:size], recalled[size : 2 * size]
    also_new, also_out = recalled[2 * size : 3 * size], recalled[3 * size :]
    for n in range(size):
        i = np.uintp(n)
        added = sigmoid(np.float64(let_in[i] + also_in[i])) * tanh(np.float64(new[i] + also_new[i]))
        cells[i] = np.float32(sigmoid(np.float64(keep[i] + also_keep[i])) * before[i] + added)
    for n in range(size):
        i = np.uintp(n)
        hidden[i] = np.float32(sigmoid(np.float64(let_out[i] + also_out[i])) * tanh(np.float64(cells[i])))
