// The condition of a CUDA graph's WHILE node, as kernels set it. The emulator has its own.
#pragma once

#ifndef __CUDA_EMULATOR__
typedef unsigned long long cudaGraphConditionalHandle;
extern "C" __device__ __cudart_builtin__ void cudaGraphSetConditional(
  cudaGraphConditionalHandle handle, unsigned value);
#endif
