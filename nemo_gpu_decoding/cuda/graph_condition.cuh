// Set the condition of a CUDA graph's WHILE node from a kernel. The emulator has its own version.
#pragma once

#ifndef __CUDA_EMULATOR__
typedef unsigned long long cudaGraphConditionalHandle;
extern "C" __device__ __cudart_builtin__ void cudaGraphSetConditional(
  cudaGraphConditionalHandle handle, unsigned value);
#endif
