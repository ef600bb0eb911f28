// What kernels may use, one intrinsic after the other; the tests know the answers.
struct WarpOperationsArgs { const int* in; int* out; };
extern "C" __global__ void warp_operations(const WarpOperationsArgs args) {
  auto [in, out] = args;
  int v = in[threadIdx.x], all = 0;
  int* row = out + threadIdx.x * 20;
  unsigned mask = 0xffffffffu;
  *row++ = __shfl_sync(mask, v, 5);
  *row++ = __shfl_sync(mask, v, 3, 8);
  *row++ = __shfl_up_sync(mask, v, 3);
  *row++ = __shfl_down_sync(mask, v, 3, 16);
  *row++ = __shfl_xor_sync(mask, v, 7);
  *row++ = int(__shfl_sync(mask, (double)v / 2, 31) * 2);
  *row++ = int(__ballot_sync(mask, v > 0));
  *row++ = __any_sync(mask, v == in[0]);
  *row++ = __all_sync(mask, v == in[0]);
  *row++ = int(__match_any_sync(mask, v));
  *row++ = int(__match_all_sync(mask, v, &all)) + all;
  *row++ = __reduce_add_sync(mask, v);
  *row++ = __reduce_min_sync(mask, v);
  *row++ = __reduce_max_sync(mask, v);
  *row++ = int(__reduce_xor_sync(mask, (unsigned)v));
  unsigned half = threadIdx.x % 32 < 16 ? 0x0000ffffu : 0xffff0000u;  // two meetings at once
  *row++ = __reduce_add_sync(half, v);
  *row++ = __popc(__ballot_sync(half, v > 0));
  *row++ = __popc(__activemask() & (1u << threadIdx.x % 32));
}

extern "C" __global__ void votes(const WarpOperationsArgs args) {
  auto [in, out] = args;
  int v = in[threadIdx.x];
  int* row = out + threadIdx.x * 3;
  row[0] = __syncthreads_and(v > 0);
  row[1] = __syncthreads_or(v > 5);
  row[2] = __syncthreads_count(v > 0);
}

extern "C" __global__ void bits(const WarpOperationsArgs args) {
  auto [in, out] = args;
  int v = in[threadIdx.x];
  int* row = out + threadIdx.x * 12;
  *row++ = __popc(v);
  *row++ = __ffs(v);
  *row++ = __clz(v);
  *row++ = int(__brev(v));
  *row++ = __popcll((long long)v << 7);
  *row++ = __ffsll((long long)v << 30);
  *row++ = __clzll((long long)(unsigned)v);
  *row++ = int(__umulhi(v, 0x9E3779B9u));
  *row++ = __float_as_int(__int_as_float(v));
  *row++ = int(__double_as_longlong(__longlong_as_double(v)));
  *row++ = isnan(__int_as_float(v));
  *row++ = min(v, 7) + max(v, -7);
}

struct NumbersArgs { const float* in; float* out; };
extern "C" __global__ void numbers(const NumbersArgs args) {
  auto [in, out] = args;
  float v = __ldg(in + threadIdx.x);
  float* row = out + threadIdx.x * 8;
  *row++ = fmaxf(v, 0.5f);
  *row++ = fminf(v, 0.5f);
  *row++ = max(v, 0.5f);
  *row++ = isinf(v);
  *row++ = fabsf(v);
  *row++ = floorf(v);
  *row++ = float(log1p(exp(-fabs((double)v))));
  *row++ = v * 3.0f + 0.1f;  // two roundings
}

template <class T>
inline void atomics_on(const T* in, T* out) {
  T v = in[threadIdx.x];
  atomicAdd(&out[0], v);
  atomicSub(&out[1], v);
  atomicMin(&out[2], v);
  atomicMax(&out[3], v);
  if (threadIdx.x == 7) atomicExch(&out[4], v);
  if (threadIdx.x == 9) atomicCAS(&out[5], out[5], T(out[5] + v));
}
extern "C" __global__ void atomics_on_int(const WarpOperationsArgs args) {
  auto [in, out] = args; atomics_on(in, out); }
struct AtomicsOnLongArgs { const long long* in; long long* out; };
extern "C" __global__ void atomics_on_long(const AtomicsOnLongArgs args) {
  auto [in, out] = args; atomics_on(in, out); }
extern "C" __global__ void atomics_on_float(const NumbersArgs args) {
  auto [in, out] = args; atomics_on(in, out); }
struct BitAtomicsArgs { const unsigned* in; unsigned* out; };
extern "C" __global__ void bit_atomics(const BitAtomicsArgs args) {
  auto [in, out] = args;
  atomicAnd(&out[0], in[threadIdx.x]);
  atomicOr(&out[1], in[threadIdx.x]);
  atomicXor(&out[2], in[threadIdx.x]);
  atomicInc(&out[3], 9u);
  atomicDec(&out[4], 9u);
}

struct AssertsArgs { const int* in; };
extern "C" __global__ void asserts(const AssertsArgs args) {
  auto [in] = args; assert(in[threadIdx.x] >= 0); }
