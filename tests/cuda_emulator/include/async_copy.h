// cp.async under the names of CUDA's <cuda_pipeline_primitives.h>. The bytes arrive when they are waited
// for and not before, so a kernel that forgets to wait reads what was there: poison, or the last row.
#pragma once
#include "engine.h"

EMULATED void __pipeline_memcpy_async(void* to, const void* from, size_t bytes) {
  emulator::async_copy(to, from, uint32_t(bytes), __builtin_return_address(0));
}
EMULATED void __pipeline_commit() { emulator::async_commit(); }
EMULATED void __pipeline_wait_prior(size_t groups_left) {
  emulator::async_wait(uint32_t(groups_left), __builtin_return_address(0));
}
