// Kernels with one fault each. Most of them give the right answer when threads happen to run in order.
// The comment "fault" marks the line that the message must name.
struct Args { const int* in; int* out; };
extern "C" __global__ void missing_barrier(const Args args) {
  auto [in, out] = args;
  __shared__ int s[256];
  s[threadIdx.x] = 0;
  __syncthreads();
  s[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = s[threadIdx.x] + (threadIdx.x ? s[threadIdx.x - 1] : 0);  // fault
}

extern "C" __global__ void missing_barrier_after_reading(const Args args) {
  auto [in, out] = args;
  __shared__ int s;
  for (int i = 0; i < 4; i++) {
    if (threadIdx.x == 0) s = in[i];  // fault
    __syncthreads();
    out[threadIdx.x] += s;
  }
}

extern "C" __global__ void missing_syncwarp(const Args args) {
  auto [in, out] = args;  // the lanes of a warp aren't in step
  __shared__ int s[256];
  s[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  int other = s[threadIdx.x ^ 1];
  s[threadIdx.x] = other;  // fault
  __syncwarp();
  out[threadIdx.x] = s[threadIdx.x];
}

extern "C" __global__ void shuffle_is_no_barrier(const Args args) {
  auto [in, out] = args;
  __shared__ int s[256];
  s[threadIdx.x] = in[threadIdx.x];
  __shfl_sync(0xffffffffu, 0, 0);
  out[threadIdx.x] = s[threadIdx.x ^ 1];  // fault
}

extern "C" __global__ void increment_is_not_atomic(const Args args) {
  auto [in, out] = args;
  __shared__ int count;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  count = count + 1;  // fault
  __syncthreads();
  out[threadIdx.x] = count;
}

extern "C" __global__ void atomic_meets_plain_read(const Args args) {
  auto [in, out] = args;
  __shared__ int count;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  atomicAdd(&count, 1);  // fault
  out[threadIdx.x] = count;  // fault
}

extern "C" __global__ void bytes_beside_each_other_race(const Args args) {
  auto [in, out] = args;
  __shared__ unsigned char s[256];
  s[threadIdx.x] = 1;
  __syncthreads();
  s[threadIdx.x & ~1] = 2;  // fault
  out[threadIdx.x] = s[threadIdx.x];
}

extern "C" __global__ void race_in_global_memory(const Args args) {
  auto [in, out] = args;
  out[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x ^ 33] += 1;  // fault
}

extern "C" __global__ void race_between_blocks(const Args args) {
  auto [in, out] = args;
  out[threadIdx.x] = blockIdx.x;  // fault
}

extern "C" __global__ void divergent_barriers(const Args args) {
  auto [in, out] = args;
  if (threadIdx.x < 40)
    __syncthreads();  // fault
  else
    __syncthreads();
}

extern "C" __global__ void barrier_for_some(const Args args) {
  auto [in, out] = args;
  int v = in[threadIdx.x];
  if (threadIdx.x < 40) __syncthreads();
  out[threadIdx.x] = __shfl_sync(0xffffffffu, v, 0);
  __syncthreads();
}

extern "C" __global__ void lanes_missing_from_shuffle(const Args args) {
  auto [in, out] = args;
  int v = in[threadIdx.x];
  if (threadIdx.x % 32 < 16) v = __shfl_down_sync(0xffffffffu, v, 8);
  __syncthreads();
  out[threadIdx.x] = v;
}

extern "C" __global__ void lane_not_in_mask(const Args args) {
  auto [in, out] = args;
  out[threadIdx.x] = __shfl_sync(0x7fffffffu, in[threadIdx.x], 0);  // fault
}

extern "C" __global__ void shuffle_from_outside_the_mask(const Args args) {
  auto [in, out] = args;
  if (threadIdx.x % 32 < 16) out[threadIdx.x] = __shfl_sync(0x0000ffffu, in[threadIdx.x], 20);  // fault
}

extern "C" __global__ void lane_has_exited(const Args args) {
  auto [in, out] = args;
  if (threadIdx.x % 32 == 3) return;
  __syncthreads();
  out[threadIdx.x] = __any_sync(0xffffffffu, in[threadIdx.x]);  // fault
}

extern "C" __global__ void exits_while_others_wait(const Args args) {
  auto [in, out] = args;
  if (threadIdx.x % 32 == 3) {
    for (int i = 0; i < 100; i++) __nanosleep(1);
    return;
  }
  out[threadIdx.x] = __any_sync(0xffffffffu, in[threadIdx.x]);
}

extern "C" __global__ void different_intrinsics_meet(const Args args) {
  auto [in, out] = args;
  int v = in[threadIdx.x];
  if (threadIdx.x % 2)
    out[threadIdx.x] = __ballot_sync(0xffffffffu, v);  // fault
  else
    out[threadIdx.x] = __shfl_sync(0xffffffffu, v, 0);  // fault
}

extern "C" __global__ void reads_past_the_end(const Args args) {
  auto [in, out] = args;
  out[threadIdx.x] = in[threadIdx.x + 1];  // fault
}

extern "C" __global__ void reads_before_the_start(const Args args) {
  auto [in, out] = args;
  out[threadIdx.x] = in[int(threadIdx.x) - 1];  // fault
}

extern "C" __global__ void writes_past_the_end(const Args args) {
  auto [in, out] = args;
  out[threadIdx.x + 1] = in[threadIdx.x];  // fault
}

extern "C" __global__ void adds_past_the_end(const Args args) {
  auto [in, out] = args;
  atomicAdd(&out[threadIdx.x + 1], in[threadIdx.x]);  // fault
}

extern "C" __global__ void follows_a_null_pointer(const Args args) {
  auto [in, out] = args;
  const int* nothing = in - ((size_t)in / sizeof(int));
  out[threadIdx.x] = nothing[threadIdx.x];  // fault
}

extern "C" __global__ void writes_past_shared_memory(const Args args) {
  auto [in, out] = args;
  extern __shared__ unsigned char smem[];
  ((int*)smem)[threadIdx.x + 1] = in[threadIdx.x];  // fault
}

extern "C" __global__ void reads_past_shared_memory(const Args args) {
  auto [in, out] = args;
  extern __shared__ unsigned char smem[];
  int* s = (int*)smem;
  s[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x + 1];  // fault
}

extern "C" __global__ void reads_what_nobody_wrote(const Args args) {
  auto [in, out] = args;
  __shared__ int s[256];
  if (threadIdx.x) s[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x ^ 1];  // fault
}

extern "C" __global__ void reads_before_the_copy_arrives(const Args args) {
  auto [in, out] = args;
  __shared__ __align__(16) int s[256];
  __pipeline_memcpy_async(&s[threadIdx.x], &in[threadIdx.x], 4);
  __pipeline_commit();
  __pipeline_wait_prior(1);  // of one: doesn't wait
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
  __pipeline_wait_prior(0);
}

extern "C" __global__ void sets_a_condition_to_two_values(const Args args) {
  auto [in, out] = args;
  cudaGraphSetConditional(7, threadIdx.x == 0);
}

extern "C" __global__ void looks_past_the_cache_at_shared_memory(const Args args) {
  auto [in, out] = args;
  __shared__ int s[256];
  s[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = __ldcg(&s[threadIdx.x]);
}
