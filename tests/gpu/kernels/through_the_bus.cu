// Reads a table in pinned host memory where it lies.
struct GatherArgs { const long long* table; const int* where; long long* out; int count; };
extern "C" __global__ void gather(const GatherArgs args) {
  auto [table, where, out, count] = args;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    out[i] = table[where[i]];
}
