"""SIMD instructions that LLVM does not find by itself."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.cpython.unsafe import numbers

intrinsic: Any = extending.intrinsic  # its type does not describe calls
trailing_zeros: Any = numbers.trailing_zeros

LANES = 16  # values that are compared at once


@intrinsic
def not_below(typing_context, row, begin, least):
    """LANES bits, one for each value of a contiguous array of floats from row[begin] on: NaN, or at least `least`.

    A loop over the values would add up its results, which takes longer than the comparisons.
    """

    def write(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, begin, least = arguments
        block = ir.VectorType(ir.FloatType() if row.dtype == types.float32 else ir.DoubleType(), LANES)
        first = builder.gep(context.make_array(signature.args[0])(context, builder, values).data, [begin])
        read = builder.load(builder.bitcast(first, block.as_pointer()), align=row.dtype.bitwidth // 8)
        limit = builder.insert_element(ir.Constant(block, ir.Undefined), least, ir.Constant(ir.IntType(32), 0))
        limit = builder.shuffle_vector(limit, limit, ir.Constant(ir.VectorType(ir.IntType(32), LANES), None))
        return builder.bitcast(builder.fcmp_unordered(">=", read, limit), ir.IntType(LANES))

    is_contiguous = row.layout == "C" and row.dtype in (types.float32, types.float64)
    return (types.uint16(row, types.intp, row.dtype), write) if is_contiguous else None
