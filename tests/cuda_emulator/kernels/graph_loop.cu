// The body of a CUDA graph's WHILE node, and the kernel that sets its condition.
#include "cuda/graph_condition.cuh"

template <class T, int THREADS>
inline T block_sum(T value) {
  __shared__ T parts[THREADS / 32];  // one array for each T
  for (int distance = 16; distance > 0; distance /= 2)
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  T sum = 0;
  for (T part : parts) sum += part;
  return sum;
}

struct StepArgs { const int* limits; int* counts; int* active; int* steps; };
extern "C" __global__ __launch_bounds__(128) void step(const StepArgs args) {
  auto [limits, counts, active, steps] = args;
  bool goes_on = counts[threadIdx.x] < limits[threadIdx.x];
  if (goes_on) counts[threadIdx.x]++;
  int going = block_sum<int, 128>(goes_on);
  int threads = block_sum<int, 128>(1);  // the same array again
  float share = block_sum<float, 128>(goes_on / 128.0f);
  if (threadIdx.x == 0) {
    *active = going;
    *steps += threads == 128 && share * 128 == going;
  }
}

struct SetConditionArgs { cudaGraphConditionalHandle handle; const int* active; };
extern "C" __global__ void set_condition(const SetConditionArgs args) {
  auto [handle, active] = args;
  if (threadIdx.x == 0) cudaGraphSetConditional(handle, *active > 0);
}
