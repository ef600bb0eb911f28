"""exp, sigmoid, tanh and log-softmax of the compiled networks, in double, in a form that compiles to SIMD.

Callers round the results to float32 once, so that they agree with those of other libraries and devices to the bit,
except for a value in millions. NaN gives NaN.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types

from nemo_gpu_decoding.jit import linked

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
