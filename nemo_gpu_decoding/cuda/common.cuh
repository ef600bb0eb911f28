// Primitives of all kernels: indices, numbers, reductions, scans, appending, sorting, and prefetching a row
// of scores.
//
// Compiled by NVRTC without CUDA's headers, and by g++ for the emulator. Rules for calls and synchronisation:
//   warp_*   all 32 lanes of a warp call it together; it does not order memory.
//   block_*  all threads of the block call it together, by default with equal arguments. The caller
//            synchronises before, so that its inputs are visible. On return its results are visible to the
//            block, and its scratch memory may be reused.
// A block has a multiple of 32 threads, at least 32, in one dimension.
#pragma once

typedef unsigned char uint8;
typedef unsigned short uint16;
typedef unsigned int uint32;
typedef unsigned long long uint64;
typedef long long int64;

constexpr int LANES = 32;
constexpr uint32 ALL_LANES = 0xffffffffu;

// ---- Indices of threads

inline int thread() { return int(threadIdx.x); }
inline int threads() { return int(blockDim.x); }
inline int lane() { return int(threadIdx.x) % LANES; }
inline int warp() { return int(threadIdx.x) / LANES; }
inline int warps() { return int(blockDim.x) / LANES; }

// ---- Address spaces

// Pointers whose address space is known, for structs: the compiler forgets it when it reads a pointer from memory.
// Loads by generic pointers take longer.
#if defined(__CUDA_EMULATOR__)
#define ASSUME(condition)
#else
#define ASSUME(condition) __builtin_assume(condition)
#endif

template <class T>
struct Global {  // in global memory, or null
  T* pointer;
  Global() = default;
  inline Global(T* pointer) : pointer(pointer) {}
  inline operator T*() const {
    ASSUME(__isGlobal(pointer));
    return pointer;
  }
};

template <class T>
struct Shared {  // in shared memory
  T* pointer;
  Shared() = default;
  inline Shared(T* pointer) : pointer(pointer) {}
  inline operator T*() const {
    ASSUME(__isShared(pointer));
    return pointer;
  }
  inline T* operator->() const { return *this; }
};

// ---- Shared memory

// The next `count` elements of a block's dynamic shared memory; advances `shared` past them. Allocate types
// with the strictest alignment first.
template <class T>
inline T* take(uint8*& shared, int count) {
  T* start = (T*)shared;
  shared += count * sizeof(T);
  return start;
}

// ---- Numbers

inline float negative_infinity() { return __int_as_float(int(0xff800000u)); }
inline float largest_float() { return __int_as_float(0x7f7fffff); }

// Unsigned numbers with the order of the floats; -0 < +0, NaNs at the ends.
inline uint32 ordered_key(float x) {
  uint32 bits = __float_as_uint(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
inline float float_of_key(uint32 key) {
  return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

// 16-bit floats of torch, without cuda_fp16.h, which NVRTC would have to find on the machine.
struct Half {
  uint16 bits;
};
struct BFloat16 {
  uint16 bits;
};

inline float to_float(float x) { return x; }
inline float to_float(BFloat16 x) { return __uint_as_float(uint32(x.bits) << 16); }
inline float to_float(Half x) {  // exact, including subnormal numbers
  const float bias_difference = __uint_as_float(0x77800000u);  // 2^112
  float scaled = __uint_as_float(uint32(x.bits & 0x7fffu) << 13) * bias_difference;
  uint32 infinite = (x.bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;  // infinity or NaN
  return __uint_as_float(__float_as_uint(scaled) | infinite | uint32(x.bits & 0x8000u) << 16);
}

// Rounds to nearest, ties to even.
inline void round_to(float& to, float x) { to = x; }
inline void round_to(BFloat16& to, float x) {
  uint32 bits = __float_as_uint(x);
  if (x != x) bits = 0x7fff0000u;
  else bits += 0x7fffu + (bits >> 16 & 1u);
  to.bits = uint16(bits >> 16);
}
inline void round_to(Half& to, float x) {
  uint32 sign = __float_as_uint(x) >> 16 & 0x8000u, bits = __float_as_uint(x) & 0x7fffffffu;
  if (x != x) bits = 0x7e00u;
  else if (bits >= 0x477ff000u) bits = 0x7c00u;  // from 65520 on: infinity
  else if (bits < 0x38800000u) bits = __float_as_uint(__uint_as_float(bits) + 0.5f) - 0x3f000000u;  // steps of 2^-24
  else bits = (bits - 0x38000000u + 0xfffu + (bits >> 13 & 1u)) >> 13;
  to.bits = uint16(sign | bits);
}

// ---- Reductions and scans

struct Sum {
  template <class T>
  T operator()(T a, T b) const { return a + b; }
};
struct Max {
  template <class T>
  T operator()(T a, T b) const { return a < b ? b : a; }
};
struct Min {
  template <class T>
  T operator()(T a, T b) const { return b < a ? b : a; }
};

// The total over the warp, for every lane. T: up to 8 bytes; the order of operands is fixed.
template <class T, class Operation>
inline T warp_reduce(T value, Operation operation) {
  for (int distance = LANES / 2; distance > 0; distance /= 2)
    value = operation(value, __shfl_xor_sync(ALL_LANES, value, distance));
  return value;
}

// Teams: TEAM neighbouring lanes that share the work on one item, if there are fewer items than threads.
constexpr int TEAM = 8;
inline int team() { return thread() / TEAM; }
inline int teams() { return threads() / TEAM; }
inline int team_lane() { return lane() % TEAM; }

// The total over the team, for each of its lanes. Call with all lanes of a warp.
template <class T, class Operation>
inline T team_reduce(T value, Operation operation) {
  for (int distance = TEAM / 2; distance > 0; distance /= 2)
    value = operation(value, __shfl_xor_sync(ALL_LANES, value, distance));
  return value;
}

// Copy a record of at most TEAM words with the lanes of a team; then all lanes may read it. No copy if `to` is
// null. Call with all lanes of a warp.
template <class Record>
inline void team_copy(Record* to, const Record* from) {
  static_assert(sizeof(Record) % 8 == 0 && sizeof(Record) <= 8 * TEAM, "one word of 8 bytes for each lane");
  int word = team_lane();
  if (to && word < int(sizeof(Record) / 8)) ((uint64*)to)[word] = ((const uint64*)from)[word];
  __syncwarp();
}

// The sum of the values of this and all lower lanes.
template <class T>
inline T warp_inclusive_sum(T value) {
  for (int distance = 1; distance < LANES; distance *= 2) {
    T below = __shfl_up_sync(ALL_LANES, value, distance);
    if (lane() >= distance) value += below;
  }
  return value;
}

// The total over the block, for every thread. scratch: shared, 32 elements. Two barriers.
template <class T, class Operation>
inline T block_reduce(T value, Operation operation, T* scratch) {
  value = warp_reduce(value, operation);
  if (lane() == 0) scratch[warp()] = value;
  __syncthreads();
  T total = scratch[0];
  for (int w = 1; w < warps(); w++) total = operation(total, scratch[w]);
  __syncthreads();
  return total;
}

// The sum of the values of all lower threads; *total: of all. scratch: shared, 32 elements. Two
// barriers.
template <class T>
inline T block_exclusive_sum(T value, T* scratch, T* total) {
  T inclusive = warp_inclusive_sum(value);
  if (lane() == LANES - 1) scratch[warp()] = inclusive;
  __syncthreads();
  T before = 0, all = 0;
  for (int w = 0; w < warps(); w++) {
    if (w == warp()) before = all;
    all += scratch[w];
  }
  __syncthreads();
  *total = all;
  return before + inclusive - value;
}

// ---- Searching

// The first of low .. high - 1 with a label >= `label`, or high; labels ascend. Each step reads three labels
// with one memory latency and leaves a fourth of the range. HALVES: one label and half of the range per step,
// for short ranges and kernels with few free registers.
template <bool HALVES = false, class Index, class LabelAt>
inline Index first_not_below(Index low, Index high, Index label, LabelAt label_at) {
  while (low < high) {
    if (HALVES) {
      const Index middle = (low + high) >> 1;
      if (label_at(middle) < label) low = middle + 1;
      else high = middle;
      continue;
    }
    const Index count = high - low;
    const Index first = low + (count >> 2), second = low + (count >> 1), third = low + count - 1 - (count >> 2);
    // a sum instead of nested tests, because the compiler would move loads behind the tests
    const int below = (label_at(first) < label) + (label_at(second) < label) + (label_at(third) < label);
    if (below < 3) high = below == 0 ? first : below == 1 ? second : third;
    if (below > 0) low = (below == 1 ? first : below == 2 ? second : third) + 1;
  }
  return low;
}

// ---- Appending

// A slot at the end of a list for every lane with `wants`, -1 for the others; *count grows by the number of
// these lanes, with one atomic per warp. count: shared or global. The order of warps is not deterministic, so sort
// the appended items. *count may exceed the list's capacity: compare the slot with the capacity.
inline int warp_append(bool wants, int* count) {
  uint32 wanting = __ballot_sync(ALL_LANES, wants);
  if (wanting == 0) return -1;
  int first = 0, leader = __ffs(int(wanting)) - 1;
  if (lane() == leader) first = atomicAdd(count, __popc(wanting));
  first = __shfl_sync(ALL_LANES, first, leader);
  return wants ? first + __popc(wanting & ((1u << lane()) - 1)) : -1;
}

// ---- Sorting

namespace sorting {

// Elements 64 c .. 64 c + 63 belong to one warp until a step exchanges elements between such groups.
constexpr int CHUNK = 2 * LANES;

// Synchronise between two steps. The reach of a step: elements 0 .. reach - 1 exchange among themselves, etc.
inline void synchronize(int reach, int next_reach) {
  if (reach > CHUNK || next_reach > CHUNK) __syncthreads();
  else __syncwarp();
}

template <class T, class Before>
inline void order_pair(T* items, int low, int high, int count, Before before) {
  if (high >= count) return;
  T a = items[low], b = items[high];
  if (before(b, a)) {
    items[low] = b;
    items[high] = a;
  }
}

}  // namespace sorting

// Sort items[0 .. count), shared, in place. before(a, b): whether a comes first; a strict order, and a
// total one for a deterministic result. Any count, without padding. At most log2(count)^2 / 2 steps. Only
// steps that reach beyond 64 elements need a barrier: one in total for count <= 64, three for 128, 15 for 1024.
//
// A bitonic network in the form in which each step puts the smaller element first (each merge begins with a
// comparison of i with its mirror image). So elements beyond `count` would keep their places.
template <class T, class Before>
inline void block_sort(T* items, int count, Before before) {
  int last_reach = 0;
  for (int size = 2; size / 2 < count; size *= 2) {
    for (int stride = size / 2; stride > 0; stride /= 2) {
      sorting::synchronize(last_reach, 2 * stride);
      last_reach = 2 * stride;
      bool mirror = stride == size / 2;
      for (int pair = thread();; pair += threads()) {
        int offset = pair & (stride - 1), first = 2 * (pair - offset);
        if (first >= count) break;
        int high = mirror ? first + size - 1 - offset : first + offset + stride;
        sorting::order_pair(items, first + offset, high, count, before);
      }
    }
  }
  __syncthreads();
}

// Fill order[0 .. count), shared, with the numbers 0 .. count - 1, best first. before(i, j): whether
// item i comes before item j; must be a strict total order. Index: uint16 or int.
//
// For few items, each is compared with all others, without the chain of dependent steps of a network.
template <class Index, class Before>
inline void block_order(Index* order, int count, Before before) {
  if (count <= 2 * threads() && count <= 512) {
    for (int i = thread(); i < count; i += threads()) {
      int rank = 0;
      for (int j = 0; j < count; j++) rank += before(j, i);
      order[rank] = Index(i);
    }
    __syncthreads();
    return;
  }
  for (int i = thread(); i < count; i += threads()) order[i] = Index(i);
  __syncthreads();
  block_sort(order, count, before);
}

// ---- Prefetching

namespace async {

// 16 bytes from global to shared memory, both aligned to 16.
inline void copy16(void* to, const void* from) {
#if defined(__CUDA_EMULATOR__)
  __pipeline_memcpy_async(to, from, 16);
#elif __CUDA_ARCH__ >= 800
  uint32 shared_address = uint32(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address), "l"(from) : "memory");
#else
  *(uint4*)to = *(const uint4*)from;
#endif
}

inline void commit() {
#if defined(__CUDA_EMULATOR__)
  __pipeline_commit();
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait until all commits of this thread except the last GROUPS_LEFT have arrived.
template <int GROUPS_LEFT>
inline void wait() {
#if defined(__CUDA_EMULATOR__)
  __pipeline_wait_prior(GROUPS_LEFT);
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS_LEFT) : "memory");
#endif
}

}  // namespace async

// Asynchronous copy of a row of numbers from global to shared memory:
//
//   RowFetch<float> fetch;
//   fetch.start(buffer, row, count);   // all threads; no thread reads `buffer` any more
//   ...
//   const float* here = fetch.finish();
//   __syncthreads();                   // now all threads may read here[0 .. count)
//
// T: float, Half, BFloat16. Rows may have any alignment: the part that is aligned to 16 bytes is copied
// asynchronously, and each of the few other numbers is in a register of one thread until `finish`.
template <class T>
class RowFetch {
 public:
  // Bytes of a row of `count` numbers in shared memory, at an address that is a multiple of 16.
  static constexpr int buffer_bytes(int count) { return (count * int(sizeof(T)) + 15) / 16 * 16 + 16; }

  void start(void* buffer, const T* source, int count) {
    int misaligned = int((uint64)source % 16);
    int head = misaligned ? (16 - misaligned) / int(sizeof(T)) : 0;
    if (head > count) head = count;
    int chunks = (count - head) / PER_CHUNK;
    int tail = count - head - chunks * PER_CHUNK;
    row_ = (T*)((uint8*)buffer + misaligned);
    for (int i = thread(); i < chunks; i += threads())
      async::copy16(row_ + head + i * PER_CHUNK, source + head + i * PER_CHUNK);
    async::commit();
    edge_at_ = thread() < head ? thread() : thread() < head + tail ? count - tail + thread() - head : -1;
    if (edge_at_ >= 0) edge_ = source[edge_at_];
  }

  // GROUPS_LEFT: number of rows that were started after this one and may still be in flight.
  template <int GROUPS_LEFT = 0>
  const T* finish() {
    async::wait<GROUPS_LEFT>();
    if (edge_at_ >= 0) row_[edge_at_] = edge_;
    return row_;
  }

 private:
  static constexpr int PER_CHUNK = 16 / int(sizeof(T));
  T* row_;
  T edge_;       // a number outside the aligned part
  int edge_at_;  // its place in the row, or -1
};
