// The k largest of each row, largest first, the lower index first among equals. Radix selection finds
// the k-th largest key byte by byte; what is above it, and the first of its equals, are sorted by a
// bitonic network. One block of 256 threads per row, k <= 128.
typedef unsigned long long u64;
constexpr int THREADS = 256, WARPS = THREADS / 32, MOST = 128;

struct Selection {
  unsigned key;  // of the k-th largest
  unsigned ties;  // how many of its equals are wanted
};

inline unsigned order_key(float x) {  // larger float, larger key
  unsigned bits = __float_as_uint(x);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

inline unsigned inclusive_sum(unsigned value, unsigned* warp_totals) {
  unsigned lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int distance = 1; distance < 32; distance *= 2) {
    unsigned below = __shfl_up_sync(0xffffffffu, value, distance);
    if (lane >= distance) value += below;
  }
  if (lane == 31) warp_totals[warp] = value;
  __syncthreads();
  for (unsigned w = 0; w < warp; w++) value += warp_totals[w];
  return value;
}

inline Selection select(const float* row, int n, int k) {
  __shared__ unsigned histogram[256], warp_totals[WARPS];
  __shared__ Selection found;
  Selection sought{0, (unsigned)k};
  for (int shift = 24; shift >= 0; shift -= 8) {
    histogram[threadIdx.x] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += THREADS) {
      unsigned key = order_key(row[i]);
      if (shift == 24 || key >> (shift + 8) == sought.key) atomicAdd(&histogram[key >> shift & 255], 1u);
    }
    __syncthreads();
    unsigned bin = 255 - threadIdx.x, here = histogram[bin];  // from the largest down
    unsigned down_to_here = inclusive_sum(here, warp_totals), above = down_to_here - here;
    if (down_to_here >= sought.ties && above < sought.ties)
      found = {sought.key << 8 | bin, sought.ties - above};
    __syncthreads();
    sought = found;
  }
  return sought;
}

inline void collect(const float* row, int n, Selection limit, u64* best) {
  __shared__ unsigned count, ties, warp_ties[WARPS];
  if (threadIdx.x == 0) count = ties = 0;
  if (threadIdx.x < MOST) best[threadIdx.x] = 0;
  unsigned lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int start = 0; start < n; start += THREADS) {
    int i = start + threadIdx.x;
    unsigned key = i < n ? order_key(row[i]) : 0;
    bool tie = i < n && key == limit.key;
    unsigned tied = __ballot_sync(0xffffffffu, tie);
    if (lane == 0) warp_ties[warp] = __popc(tied);
    __syncthreads();
    unsigned before = ties + __popc(tied & ((1u << lane) - 1));
    for (unsigned w = 0; w < warp; w++) before += warp_ties[w];
    if ((i < n && key > limit.key) || (tie && before < limit.ties))
      best[atomicAdd(&count, 1u)] = (u64)key << 32 | (0xffffffffu - i);
    __syncthreads();
    if (threadIdx.x == 0)
      for (int w = 0; w < WARPS; w++) ties += warp_ties[w];
    __syncthreads();
  }
}

inline void sort_descending(u64* best) {
  for (int size = 2; size <= MOST; size *= 2)
    for (int stride = size / 2; stride > 0; stride /= 2) {
      if (threadIdx.x < MOST / 2) {
        int low = 2 * threadIdx.x - (threadIdx.x & (stride - 1)), high = low + stride;
        u64 a = best[low], b = best[high];
        if ((a < b) == ((low & size) == 0)) {
          best[low] = b;
          best[high] = a;
        }
      }
      __syncthreads();
    }
}

struct TopKArgs { const float* x; int n; int k; float* values; int* indices; };
extern "C" __global__ void __launch_bounds__(THREADS)
    top_k(const TopKArgs args) {
  auto [x, n, k, values, indices] = args;
  __shared__ u64 best[MOST];
  const float* row = x + (size_t)blockIdx.x * n;
  collect(row, n, select(row, n, k), best);
  sort_descending(best);
  if (threadIdx.x < k) {
    int i = (int)(0xffffffffu - (unsigned)best[threadIdx.x]);
    indices[blockIdx.x * k + threadIdx.x] = i;
    values[blockIdx.x * k + threadIdx.x] = row[i];
  }
}
