// Open addressing shared by all blocks: key -> the smallest item with it. 0 marks an empty slot.
#include "cuda/common.cuh"

struct InsertArgs {
  const uint64* keys;
  int n;
  uint64* table;
  unsigned* first;
  unsigned mask;
  unsigned* distinct;
};
extern "C" __global__ void insert(const InsertArgs args) {
  auto [keys, n, table, first, mask, distinct] = args;
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  for (unsigned slot = (unsigned)(keys[i] * 0x9e3779b97f4a7c15ull >> 40) & mask;; slot = (slot + 1) & mask) {
    uint64 old = atomicCAS(&table[slot], 0ull, keys[i]);
    if (old == 0) atomicAdd(distinct, 1u);
    if (old != 0 && old != keys[i]) continue;
    atomicMin(&first[slot], (unsigned)i);
    return;
  }
}
