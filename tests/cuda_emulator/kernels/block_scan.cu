// Inclusive scan of each block's numbers: shuffles within warps, the warps' totals in dynamic shared
// memory.
inline int warp_scan(int value, int lane) {
  for (int distance = 1; distance < 32; distance *= 2) {
    int below = __shfl_up_sync(0xffffffffu, value, distance);
    if (lane >= distance) value += below;
  }
  return value;
}

struct BlockScanArgs { const int* in; int* out; int n; };
extern "C" __global__ void block_scan(const BlockScanArgs args) {
  auto [in, out, n] = args;
  extern __shared__ __align__(16) unsigned char smem[];
  int* totals = (int*)smem;
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  int value = warp_scan(i < n ? in[i] : 0, lane);
  if (lane == 31) totals[warp] = value;
  __syncthreads();
  if (warp == 0) {
    int total = warp_scan(lane < warps ? totals[lane] : 0, lane);
    if (lane < warps) totals[lane] = total;
  }
  __syncthreads();
  if (warp > 0) value += totals[warp - 1];
  if (i < n) out[i] = value;
}
