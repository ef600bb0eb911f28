"""Run an LSTM prediction network and a joint in compiled code, for the steps of a search on the CPU.

With torch, a step of the search takes about 30 calls; most calls take longer than computing a few rows. Here a run
with all its steps is one call of compiled code. The networks do what `LSTMNetworks` does, with these differences:

* The product of a text's hidden values and the recurrent weights is computed when the text is first extended, and kept
  for its other extensions. A quarter to a third of the texts that reach a beam are such other extensions.
* A row of logits becomes log-probs at once, in double, without intermediate arrays.
* A row of a product does not depend on other rows.

Results differ from torch's by rounding only. torch runs all other networks, types and devices.

**Functions** (exp, sigmoid, tanh, log-softmax) are computed in double, in a form that compiles to SIMD. Callers round
the results to float32 once, so that they agree with those of other libraries and devices to the bit, except for one
value in millions. NaN gives NaN.

**Products** have the few rows of a search step. A call of torch's libraries takes 10 to 50 us, more than the product
of a small layer, and rounds a row differently with another number of rows. `multiply` is part of the compiled search.
Each row of a result is the same sum in the same order, whatever the other rows are.

**Layout.** A packed weight consists of panels, each with WIDTH outputs. A panel begins with its part of the bias; a
line per input follows. Example with two inputs, three outputs and WIDTH = 2; the last panel is filled up with zeros:

    panel 0   bias[0] bias[1] | w[0][0] w[1][0] | w[0][1] w[1][1]
    panel 1   bias[2]    0    | w[2][0]    0    | w[2][1]    0

**Block.** A block of ROWS rows and WIDTH outputs is kept in registers while all inputs are added. 4 rows times 3
vectors of 8 values, 3 vectors of the panel and one broadcast value fill the 16 registers of AVX2. 8 rows times 3
vectors of 16 values fit in the 32 registers of AVX-512. The last rows are computed in half a block if they fit in it.
numba's loops cannot express such a block, so it is written with llvmlite. On other CPUs, LLVM splits the vectors.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.np.arrayobj import make_array
from torch import Tensor, nn

from nemo_gpu_decoding.jit import compiled, intrinsic, linked
from nemo_gpu_decoding.search.transducer import networks as nets
from nemo_gpu_decoding.search.transducer.fused_weights import FusedWeights

LARGEST_EXPONENT = 708.0  # exp of it, and of its negative, is a normal number
LOG2_E = 1.4426950408889634
LN_2_HIGH = 6.93147180369123816490e-01  # its last bits are 0, so that its product with an integer is exact
LN_2_LOW = 1.90821492927058770002e-10  # the rest of ln 2
ROUNDING = 6755399441055744.0  # 1.5 * 2^52: the last bits of x + ROUNDING are the integer next to x


@linked
def exp(x):
    """Compute exp(x) for float64, with a relative error below 1e-14; x is clipped to +-708.

    x = k ln 2 + r with |r| <= ln 2 / 2, so exp(x) = 2^k exp(r), with the Taylor series of exp(r).
    """
    x = -LARGEST_EXPONENT if x < -LARGEST_EXPONENT else x
    x = LARGEST_EXPONENT if x > LARGEST_EXPONENT else x
    shifted = x * LOG2_E + ROUNDING
    k = shifted - ROUNDING
    r = (x - k * LN_2_HIGH) - k * LN_2_LOW
    # the even and the odd powers of r; a single chain of additions would take twice as long
    r2 = r * r
    even = ((((r2 * (1.0 / 3628800) + 1.0 / 40320) * r2 + 1.0 / 720) * r2 + 1.0 / 24) * r2 + 0.5) * r2 + 1.0
    odd = ((((r2 * (1.0 / 39916800) + 1.0 / 362880) * r2 + 1.0 / 5040) * r2 + 1.0 / 120) * r2 + 1.0 / 6) * r2 + 1.0
    series, power = np.float64(even + odd * r).view(np.int64), np.float64(shifted).view(np.int64) << np.int64(52)
    return np.int64(series + power).view(np.float64)


@linked
def sigmoid(x):
    return np.reciprocal(1.0 + exp(-x))  # unlike a division, it does not check for zero, which SIMD code cannot


@linked
def tanh(x):
    return 1.0 - 2.0 * np.reciprocal(1.0 + exp(2.0 * x))


@linked
def copy(values, out):
    """Fill `out` with the first values; a slice assignment would allocate memory."""
    for i in range(out.shape[0]):
        out[np.uintp(i)] = values[np.uintp(i)]


@linked
def log_softmax(logits, scale, scratch, out):
    """Fill out [C] with the log-softmax of scale * logits [C] (scale: 1 / temperature; scratch: [C or more])."""
    size = logits.shape[0]
    for i in range(size):
        scratch[np.uintp(i)] = np.float64(logits[np.uintp(i)]) * scale
    largest = _largest(scratch, size)
    for i in range(size):
        scratch[np.uintp(i)] = exp(scratch[np.uintp(i)] - largest)
    log_total = math.log(_sum(scratch, size))
    for i in range(size):
        out[np.uintp(i)] = np.float32((np.float64(logits[np.uintp(i)]) * scale - largest) - log_total)


# Four values side by side: a single sum or maximum would wait for every addition or comparison.


@linked
def _largest(values, size):
    a = b = c = d = np.float64(-np.inf)
    whole = size - size % 4
    for i in range(0, whole, 4):
        a = values[i] if values[i] > a else a
        b = values[i + 1] if values[i + 1] > b else b
        c = values[i + 2] if values[i + 2] > c else c
        d = values[i + 3] if values[i + 3] > d else d
    for i in range(whole, size):
        a = values[i] if values[i] > a else a
    a = b if b > a else a
    c = d if d > c else c
    return c if c > a else a


@linked
def _sum(values, size):
    a = b = c = d = 0.0
    whole = size - size % 4
    for i in range(0, whole, 4):
        a += values[i]
        b += values[i + 1]
        c += values[i + 2]
        d += values[i + 3]
    for i in range(whole, size):
        a += values[i]
    return (a + b) + (c + d)


# ---------------------------------------------------------------------------------------- products

ROWS, LANES = (8, 16) if binding.get_host_cpu_features().get("avx512f") else (4, 8)
WIDTH = 3 * LANES
CACHED_ROWS = 64  # rows that stay in the second level of the cache while the weight passes; a multiple of ROWS


def whole_panels(outputs: int) -> int:
    """Return the number of columns in a product's result, which is a multiple of WIDTH."""
    return -(-outputs // WIDTH) * WIDTH


def whole_rows(rows: int) -> int:
    """Return how many rows `multiply` reads and writes for this number of rows."""
    return -(-rows // ROWS) * ROWS


def packed(weight: Tensor, bias: Tensor | None) -> np.ndarray:
    """Return a weight [outputs, inputs] with its bias as panels, flat, float32."""
    outputs, inputs = weight.shape
    lines = np.zeros((1 + inputs, whole_panels(outputs)), np.float32)
    if bias is not None:
        lines[0, :outputs] = bias.detach().numpy()
    lines[1:, :outputs] = weight.detach().numpy().T
    return np.ascontiguousarray(lines.reshape(1 + inputs, -1, WIDTH).swapaxes(0, 1)).reshape(-1)


@compiled
def multiply(rows, count, weight, out):
    """Multiply the first `count` rows with a packed weight, and add its bias.

    Args:
        rows: [R, inputs] float32, C-contiguous; R is at least `whole_rows(count)`.
        count: number of rows.
        weight: see `packed`.
        out: [R', C] float32, C-contiguous; R' is at least `whole_rows(count)`, C at least `whole_panels`.
    """
    size = (1 + rows.shape[1]) * WIDTH
    for first in range(0, count, CACHED_ROWS):
        for panel in range(weight.shape[0] // size):
            last = min(first + CACHED_ROWS, count)
            for row in range(first, last, ROWS):
                if last - row > ROWS // 2:
                    _block(rows, row, weight, panel * size, out, panel * WIDTH)
                else:
                    _half_block(rows, row, weight, panel * size, out, panel * WIDTH)


@intrinsic
def _block(typing_context, rows, row, weight, at, out, column):
    """Multiply ROWS rows from `row` on by the panel at weight[at:], into the columns from `column` on."""
    return types.void(rows, row, weight, at, out, column), partial(_write_block, ROWS)


@intrinsic
def _half_block(typing_context, rows, row, weight, at, out, column):
    """Multiply like `_block`, with ROWS // 2 rows."""
    return types.void(rows, row, weight, at, out, column), partial(_write_block, ROWS // 2)


def _write_block(count: int, context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    rows, weight, out = (make_array(signature.args[i])(context, builder, arguments[i]) for i in (0, 2, 4))
    row, at, column = (context.cast(builder, arguments[i], signature.args[i], types.intp) for i in (1, 3, 5))
    inputs, width = (cgutils.unpack_tuple(builder, array.shape, 2)[1] for array in (rows, out))
    number = row.type
    vector = ir.VectorType(ir.FloatType(), LANES)
    add_product = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fmuladd.v{LANES}f32"
    )
    offsets = [number(lane) for lane in range(0, WIDTH, LANES)]

    def line(array: Any, i: int, length: Any) -> Any:
        return builder.gep(array.data, [builder.mul(builder.add(row, number(i)), length)])

    def vectors(values: Any) -> list[Any]:
        places = (builder.gep(values, [offset]) for offset in offsets)
        return [builder.bitcast(place, vector.as_pointer()) for place in places]

    def broadcast(value: Any) -> Any:
        undefined = ir.Constant(vector, ir.Undefined)
        first = builder.insert_element(undefined, value, ir.IntType(32)(0))
        return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(ir.IntType(32), LANES), None))

    inputs_of = [line(rows, i, inputs) for i in range(count)]
    panel = builder.gep(weight.data, [at])
    bias = [builder.load(place, align=4) for place in vectors(panel)]
    before, loop, after = builder.block, builder.append_basic_block("inputs"), builder.append_basic_block("after")
    builder.branch(loop)
    builder.position_at_end(loop)
    k = builder.phi(number)
    sums = [[builder.phi(vector) for _ in offsets] for _ in range(count)]
    following = builder.add(k, number(1))
    weights = [
        builder.load(place, align=4) for place in vectors(builder.gep(panel, [builder.mul(following, number(WIDTH))]))
    ]
    values = [broadcast(builder.load(builder.gep(row, [k]))) for row in inputs_of]
    totals = [
        [builder.call(add_product, [value, part, total]) for part, total in zip(weights, sums_of_row, strict=True)]
        for value, sums_of_row in zip(values, sums, strict=True)
    ]
    k.add_incoming(number(0), before)
    k.add_incoming(following, loop)
    for sums_of_row, new in zip(sums, totals, strict=True):
        for phi, start, value in zip(sums_of_row, bias, new, strict=True):
            phi.add_incoming(start, before)
            phi.add_incoming(value, loop)
    branch = builder.cbranch(builder.icmp_signed("<", following, inputs), loop, after)
    branch.set_metadata("llvm.loop", _not_unrolled(builder.module))
    builder.position_at_end(after)
    for i, values in enumerate(totals):
        for place, value in zip(vectors(builder.gep(line(out, i, width), [column])), values, strict=True):
            builder.store(value, place, align=4)
    return context.get_dummy_value()


def _not_unrolled(module: Any) -> Any:
    """Return metadata that prevents unrolling, because the sums of two loop bodies do not fit in the registers."""
    disabled = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
    loop = module.add_metadata([disabled, disabled])
    loop.operands = (loop, disabled)  # LLVM identifies a loop by a node that refers to itself
    return loop


RELU, TANH, SIGMOID = range(3)
ACTIVATIONS: dict[type[nn.Module], int] = {nn.ReLU: RELU, nn.Tanh: TANH, nn.Sigmoid: SIGMOID}


class PackedNetworks(NamedTuple):
    """L layers with H hidden values each, J inputs of the joint, V tokens; this file's docstring explains panels."""

    table: np.ndarray  # [V + 1, 4 H], contributions of labels to the gates of the first layer
    recurrent: np.ndarray  # [L, panels of H -> 4 H]
    inputs: np.ndarray  # [L - 1, panels of H -> 4 H], of the layers above the first
    projection: np.ndarray  # panels of H -> J
    output: np.ndarray  # panels of J -> V + 1 (+ durations)
    activation: int


class TextCache(NamedTuple):
    """The prediction cache of n utterances, with P entries each; E = n * P."""

    outputs: np.ndarray  # [E, J]
    hidden: np.ndarray  # [E, L, H]
    cells: np.ndarray  # [E, L, H]
    recalled: np.ndarray  # [E, L, 4 H], hidden values times recurrent weights
    is_recalled: np.ndarray  # [E] bool, whether `recalled` is that of the entry's text


class NetworkArrays(NamedTuple):
    """The arrays that the networks read and write in a run, with buffers for the matrix products of one step."""

    frames: np.ndarray  # [F, J] projected encoder frames
    texts: TextCache
    inputs: np.ndarray  # [R, H] float32
    joint_inputs: np.ndarray  # [R, J] float32
    products: np.ndarray  # [R, C] float32, C as wide as the widest product
    logits: np.ndarray  # [V + 1 (+ D)] float64
    requests: np.ndarray  # [3, R] int64: labels, sources and targets of new texts
    unknown: np.ndarray  # [R] int64: entries without a recurrent product


class CompiledNetworks:
    """The packed weights of a decoder's networks, for all threads; a changed weight is packed again."""

    def __init__(self, networks: nets.TransducerNetworks) -> None:
        self._networks = networks
        self._fused = FusedWeights(networks)
        self._packed: nets.MadeOfWeights[PackedNetworks | None] = nets.MadeOfWeights()

    def current(self) -> PackedNetworks | None:
        """Return the packed weights, or None if torch must run the networks."""
        networks = self._networks
        if not isinstance(networks, nets.LSTMNetworks):
            return None
        modules = networks.embedding, networks.lstm, networks.prediction_projection, networks.output
        modules = *modules, *networks.output._modules.values()
        kind = *map(type, modules), self._fused.dtype
        weights = [weight for module in modules for weight in nets.own_weights(module)]
        return self._packed.current(weights, lambda: self._make(networks), kind)

    def _make(self, networks: nets.LSTMNetworks) -> PackedNetworks | None:
        layers = nets.joint_layers(networks.output)
        if layers is None or layers[0] not in ACTIVATIONS or self._fused.why_not(torch.device("cpu")):
            return None
        weights = [networks.embedding.weight, *nets.own_weights(layers[1])]
        kinds = {self._fused.dtype, *(weight.dtype for weight in weights)}
        if kinds != {torch.float32} or any(weight.device.type != "cpu" for weight in weights):
            return None
        return _packed(networks, ACTIVATIONS[layers[0]], layers[1])


def _packed(networks: nets.LSTMNetworks, activation: int, output: nn.Linear) -> PackedNetworks:
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
    """Return the cache over the tensors of a `Predictions`, without recurrent products."""
    hidden, cells = (part.numpy() for part in state)
    entries, layers, size = hidden.shape
    recalled = np.empty((entries, layers, 4 * size), np.float32)
    return TextCache(outputs.numpy(), hidden, cells, recalled, np.zeros(entries, np.bool_))


def network_arrays(frames: np.ndarray, texts: TextCache, columns: int, rows: int) -> NetworkArrays:
    """Return arrays for steps with at most this number of rows, of joints with V + 1 (+ D) columns."""
    size, joint = texts.hidden.shape[2], texts.outputs.shape[1]
    whole, widest = whole_rows(rows), max(columns, 4 * size, joint)
    return NetworkArrays(
        frames=frames,
        texts=texts,
        inputs=np.zeros((whole, size), np.float32),
        joint_inputs=np.zeros((whole, joint), np.float32),
        products=np.zeros((whole, whole_panels(widest)), np.float32),
        logits=np.zeros(columns),
        requests=np.zeros((3, rows), np.int64),
        unknown=np.zeros(rows, np.int64),
    )


@linked
def join(sources, count, labels, scale, networks, arrays, log_probs):
    """Compute log-probs of `count` pairs of a frame and a text; labels and durations are normalised separately.

    Args:
        sources: `frames`, rows of the frames, and `texts`, entries of the cache, each [count or more].
        labels: V + 1.
        scale: 1 / temperature.
        log_probs: [count or more, V + 1 (+ D)] float32, the result.
    """
    for r in range(count):
        frame, text = arrays.frames[sources.frames[r]], arrays.texts.outputs[sources.texts[r]]
        values = arrays.joint_inputs[r]
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
    multiply(arrays.joint_inputs, count, networks.output, arrays.products)
    columns = log_probs.shape[1]
    for r in range(count):
        log_softmax(arrays.products[r, :labels], scale, arrays.logits, log_probs[r, :labels])
        if labels < columns:
            log_softmax(arrays.products[r, labels:columns], scale, arrays.logits, log_probs[r, labels:columns])


@linked
def predict(count, networks, arrays):
    """Run the prediction network for the first `count` texts of `requests`."""
    texts = arrays.texts
    labels, sources, targets = arrays.requests[0], arrays.requests[1], arrays.requests[2]
    _recall(sources, count, networks, arrays)
    for layer in range(texts.hidden.shape[1]):
        if layer > 0:
            multiply(arrays.inputs, count, networks.inputs[layer - 1], arrays.products)
        for i in range(count):
            products = networks.table[labels[i]] if layer == 0 else arrays.products[i]
            _cell(products, sources[i], targets[i], layer, texts)
            copy(texts.hidden[targets[i], layer], arrays.inputs[i])
    multiply(arrays.inputs, count, networks.projection, arrays.products)
    for i in range(count):
        copy(arrays.products[i], texts.outputs[targets[i]])
        texts.is_recalled[targets[i]] = False


@linked
def _recall(sources, count, networks, arrays):
    """Compute the recurrent products of the given entries that lack them."""
    texts, unknown = arrays.texts, 0
    for i in range(count):
        if not texts.is_recalled[sources[i]]:
            texts.is_recalled[sources[i]] = True
            arrays.unknown[unknown] = sources[i]
            unknown += 1
    for layer in range(texts.hidden.shape[1] if unknown else 0):
        for i in range(unknown):
            copy(texts.hidden[arrays.unknown[i], layer], arrays.inputs[i])
        multiply(arrays.inputs, unknown, networks.recurrent[layer], arrays.products)
        for i in range(unknown):
            copy(arrays.products[i], texts.recalled[arrays.unknown[i], layer])


@linked
def _cell(given, source, target, layer, texts):
    """Run an LSTM cell: entry `target` becomes the text of `source` and a label with contributions `given` [4 H]."""
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
