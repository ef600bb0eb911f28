"""Arithmetic of the compiled networks: exp, sigmoid, tanh, log-softmax, and products with the weights of a layer.

**Functions** are computed in double, in a form that compiles to SIMD. Callers round the results to float32 once, so
that they agree with those of other libraries and devices to the bit, except for a value in millions. NaN gives NaN.

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
numba's loops cannot express this, so the block is written with llvmlite. LLVM splits the vectors on other CPUs.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import extending, types
from numba.core import cgutils
from numba.np.arrayobj import make_array
from torch import Tensor

from nemo_gpu_decoding.jit import compiled, linked

intrinsic: Any = extending.intrinsic  # its type does not describe calls

LARGEST_EXPONENT = 708.0  # exp of it, and of its negative, is a normal number
LOG2_E = 1.4426950408889634
LN_2_HIGH = 6.93147180369123816490e-01  # its last bits are 0, so that its product with an integer is exact
LN_2_LOW = 1.90821492927058770002e-10  # the rest of ln 2
ROUNDING = 6755399441055744.0  # 1.5 * 2^52: the last bits of x + ROUNDING are the integer next to x


def _cast(target: Any) -> Any:
    def write(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], target)

    return write


@intrinsic
def _bits_of(typing_context, value):
    """The bits of a double, as an int64."""
    return types.int64(types.float64), _cast(ir.IntType(64))


@intrinsic
def _of_bits(typing_context, bits):
    """The double with these bits."""
    return types.float64(types.int64), _cast(ir.DoubleType())


@linked
def exp(x):
    """exp(x) for float64, with a relative error below 1e-14; x is clipped to +-708.

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
    series = even + odd * r
    return _of_bits(_bits_of(series) + (_bits_of(shifted) << np.int64(52)))


@linked
def sigmoid(x):
    return np.reciprocal(1.0 + exp(-x))  # unlike a division, it does not check for zero, which SIMD code cannot


@linked
def tanh(x):
    return 1.0 - 2.0 * np.reciprocal(1.0 + exp(2.0 * x))


@linked
def copy(values, out):
    """Fill `out` with the first of the values; a slice assignment would allocate memory."""
    for i in range(out.shape[0]):
        out[np.uintp(i)] = values[np.uintp(i)]


@linked
def log_softmax(logits, scale, scratch, out):
    """The log-softmax of scale * logits.

    Args:
        logits: [C] float32.
        scale: float64, 1 / temperature.
        scratch: [C or more] float64.
        out: [C] float32.
    """
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
    """Columns of a product's result, a multiple of WIDTH."""
    return -(-outputs // WIDTH) * WIDTH


def whole_rows(rows: int) -> int:
    """Rows that `multiply` reads and writes for this number of rows."""
    return -(-rows // ROWS) * ROWS


def packed(weight: Tensor, bias: Tensor | None) -> np.ndarray:
    """A weight [outputs, inputs] with its bias as panels, flat, float32."""
    outputs, inputs = weight.shape
    lines = np.zeros((1 + inputs, whole_panels(outputs)), np.float32)
    if bias is not None:
        lines[0, :outputs] = bias.detach().numpy()
    lines[1:, :outputs] = weight.detach().numpy().T
    return np.ascontiguousarray(lines.reshape(1 + inputs, -1, WIDTH).swapaxes(0, 1)).reshape(-1)


@compiled
def multiply(rows, count, weight, out):
    """The product of the first `count` rows with a packed weight, plus its bias.

    Args:
        rows: [R, inputs] float32, C-contiguous; R is at least `whole_rows(count)`.
        count: number of rows.
        weight: see `packed`.
        out: [R', C] float32, C-contiguous; R' and C are at least the whole rows and panels.
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
    """ROWS rows from `row` on times the panel at weight[at:], into the columns from `column` on."""
    return types.void(rows, row, weight, at, out, column), partial(_write_block, ROWS)


@intrinsic
def _half_block(typing_context, rows, row, weight, at, out, column):
    """The same with ROWS // 2 rows."""
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
    """Loop metadata: two blocks of sums, one per copy of the loop's body, do not fit in the registers."""
    disabled = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
    loop = module.add_metadata([disabled, disabled])
    loop.operands = (loop, disabled)  # LLVM identifies a loop by a node that refers to itself
    return loop
