// Faults that compute-sanitizer must report. The names hold "advance", so that its filter lets them pass.
struct Args { int* out; };
extern "C" __global__ void advance_too_far(const Args args) {
  auto [out] = args;  // `out` has one element per thread
  out[threadIdx.x + 1] = threadIdx.x;
}

extern "C" __global__ void advance_without_barrier(const Args args) {
  auto [out] = args;
  __shared__ int numbers[1024];
  numbers[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = numbers[blockDim.x - 1 - threadIdx.x];
}

// Reads a table in pinned host memory where it lies.
struct GatherArgs { const long long* table; const int* where; long long* out; int count; };
extern "C" __global__ void gather(const GatherArgs args) {
  auto [table, where, out, count] = args;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    out[i] = table[where[i]];
}
