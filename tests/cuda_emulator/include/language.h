// CUDA's keywords and built-in types.
#pragma once
#include <stddef.h>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))

// Shared memory is thread-local memory of the one OS thread that runs all CUDA threads. At block scope
// `thread_local` means static, as __shared__ does; each block's contents are swapped in when the block
// is scheduled (engine/shared_memory.cpp).
#define __shared__ thread_local

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  size_t volume() const { return size_t(x) * y * z; }
};

#define EMULATOR_VECTOR_TYPES(scalar, name)                            \
  struct alignas(2 * sizeof(scalar)) name##2 { scalar x, y; };         \
  struct alignas(4 * sizeof(scalar)) name##4 { scalar x, y, z, w; };   \
  inline name##2 make_##name##2(scalar x, scalar y) { return {x, y}; } \
  inline name##4 make_##name##4(scalar x, scalar y, scalar z, scalar w) { return {x, y, z, w}; }
EMULATOR_VECTOR_TYPES(int, int)
EMULATOR_VECTOR_TYPES(unsigned, uint)
EMULATOR_VECTOR_TYPES(float, float)
#undef EMULATOR_VECTOR_TYPES
