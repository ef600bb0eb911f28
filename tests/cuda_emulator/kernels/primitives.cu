// The block primitives of common.cuh in a row, with the barriers that their contracts ask for, no more.
#include "cuda/common.cuh"

struct ReductionsArgs { const int* x; int* out; };
extern "C" __global__ void reductions(const ReductionsArgs args) {
  auto [x, out] = args;
  __shared__ int scratch[32];
  int total;
  int* mine = out + thread() * 4;
  mine[0] = block_exclusive_sum(x[thread()], scratch, &total);
  mine[1] = block_exclusive_sum(total, scratch, &total);  // the scratch memory is free again
  mine[2] = block_reduce(x[thread()], Sum(), scratch);
  mine[3] = block_reduce(x[thread()], Max(), scratch);
}

struct SortAndOrderArgs { const uint64* keys; int* order; };
extern "C" __global__ void sort_and_order(const SortAndOrderArgs args) {
  auto [keys, order] = args;
  __shared__ uint64 items[600];
  __shared__ uint16 ranks[600];
  auto before = [](uint64 a, uint64 b) { return a < b; };
  auto key_before = [&](int i, int j) { return keys[i] < keys[j]; };
  for (int i = thread(); i < 600; i += threads()) items[i] = keys[i];
  __syncthreads();
  block_sort(items, 600, before);
  uint64 median = items[300];
  for (int count = 100; count <= 600; count += 500) {  // by comparing all pairs, and by the network
    block_order(ranks, count, key_before);
    order[thread()] = ranks[thread() % 64 ^ 1] + int(median);
    __syncthreads();
  }
}

struct Words { uint64 values[TEAM]; };
struct TeamCopiesArgs { const uint64* keys; uint64* out; };
extern "C" __global__ void team_copies(const TeamCopiesArgs args) {
  auto [keys, out] = args;
  __shared__ Words copies[8];
  team_copy(copies + team(), (const Words*)keys + team());
  out[thread()] = copies[team()].values[(team_lane() + 1) % TEAM];  // what another lane has copied
}
