// Thread and block indices, and what synchronises a block.
#pragma once
#include "engine.h"

namespace emulator {
EMULATED uint3 thread_index() { return shown.thread->thread_index; }
EMULATED uint3 block_index() { return shown.thread->block_index; }
EMULATED dim3 block_size() { return shown.options.block; }
EMULATED dim3 grid_size() { return shown.options.grid; }
}  // namespace emulator

#define threadIdx (emulator::thread_index())
#define blockIdx (emulator::block_index())
#define blockDim (emulator::block_size())
#define gridDim (emulator::grid_size())
#define warpSize 32

EMULATED void __syncthreads(emulator::Place place = emulator::Place::here()) {
  emulator::barrier(place, emulator::Vote::all, true);
}
EMULATED int __syncthreads_and(int predicate, emulator::Place place = emulator::Place::here()) {
  return emulator::barrier(place, emulator::Vote::all, predicate);
}
EMULATED int __syncthreads_or(int predicate, emulator::Place place = emulator::Place::here()) {
  return emulator::barrier(place, emulator::Vote::any, predicate);
}
EMULATED int __syncthreads_count(int predicate, emulator::Place place = emulator::Place::here()) {
  return emulator::barrier(place, emulator::Vote::count, predicate);
}

// Between threads of one OS thread every access is seen at once; the race checker, too, takes no fence
// for an order between two threads: in these kernels barriers make that.
EMULATED void __threadfence_block() {}
EMULATED void __threadfence() { emulator::perhaps_give_way(); }
EMULATED void __threadfence_system() { emulator::perhaps_give_way(); }
EMULATED void __nanosleep(unsigned) { emulator::give_way(); }
