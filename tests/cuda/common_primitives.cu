// Every primitive of common.cuh behind a kernel that numpy can follow.
#include "cuda/common.cuh"

struct Record {
  float score;
  int parent, label;
};

struct Better {  // score down, parent up, label up
  const Record* records;
  bool operator()(int i, int j) const {
    const Record &a = records[i], &b = records[j];
    if (a.score != b.score) return a.score > b.score;
    if (a.parent != b.parent) return a.parent < b.parent;
    return a.label < b.label;
  }
};

struct HalfToFloatArgs {
  const Half* half;
  const BFloat16* brain;
  float* from_half;
  float* from_brain;
  int count;
};
extern "C" __global__ void half_to_float(const HalfToFloatArgs args) {
  auto [half, brain, from_half, from_brain, count] = args;
  for (int i = blockIdx.x * threads() + thread(); i < count; i += gridDim.x * threads()) {
    from_half[i] = to_float(half[i]);
    from_brain[i] = to_float(brain[i]);
  }
}

struct RoundedArgs { const float* x; Half* half; BFloat16* brain; int count; };
extern "C" __global__ void rounded(const RoundedArgs args) {
  auto [x, half, brain, count] = args;
  for (int i = blockIdx.x * threads() + thread(); i < count; i += gridDim.x * threads()) {
    round_to(half[i], x[i]);
    round_to(brain[i], x[i]);
  }
}

struct KeysOfFloatsArgs { const float* x; unsigned* keys; float* back; int count; };
extern "C" __global__ void keys_of_floats(const KeysOfFloatsArgs args) {
  auto [x, keys, back, count] = args;
  for (int i = thread(); i < count; i += threads()) {
    keys[i] = ordered_key(x[i]);
    back[i] = float_of_key(keys[i]);
  }
}

// Twice in a row with the same scratch memory: the first must be done with it on return.
struct ReductionsArgs { const int* x; int* sums; int* before; int* totals; float* extremes; };
extern "C" __global__ void reductions(const ReductionsArgs args) {
  auto [x, sums, before, totals, extremes] = args;
  __shared__ int scratch[32];
  __shared__ float float_scratch[32];
  int i = blockIdx.x * threads() + thread();
  int total;
  before[i] = block_exclusive_sum(x[i], scratch, &total);
  totals[i] = total;
  sums[2 * i] = block_reduce(x[i], Sum(), scratch);
  sums[2 * i + 1] = warp_inclusive_sum(x[i]);
  extremes[2 * i] = block_reduce(float(x[i]), Max(), float_scratch);
  extremes[2 * i + 1] = block_reduce(float(x[i]), Min(), float_scratch);
}

// Numbers above a floor, in any order; `count` may exceed what `kept` holds.
struct CompactionArgs {
  const float* x;
  int n;
  float floor;
  float* kept;
  int capacity;
  int* count;
};
extern "C" __global__ void compaction(const CompactionArgs args) {
  auto [x, n, floor, kept, capacity, count] = args;
  __shared__ int found;
  if (thread() == 0) found = 0;
  __syncthreads();
  for (int start = 0; start < n; start += threads()) {
    int i = start + thread();
    int slot = warp_append(i < n && x[i] > floor, &found);
    if (slot >= 0 && slot < capacity) kept[slot] = x[i];
  }
  __syncthreads();
  if (thread() == 0) *count = found;
}

struct SortKeysArgs { uint64* keys; int count; };
extern "C" __global__ void sort_keys(const SortKeysArgs args) {
  auto [keys, count] = args;
  extern __shared__ __align__(16) unsigned char smem[];
  uint64* items = (uint64*)smem;
  keys += blockIdx.x * count;
  for (int i = thread(); i < count; i += threads()) items[i] = keys[i];
  __syncthreads();
  block_sort(items, count, [](uint64 a, uint64 b) { return a > b; });
  for (int i = thread(); i < count; i += threads()) keys[i] = items[i];
}

struct OrderRecordsArgs { const Record* records; int count; int* order; };
extern "C" __global__ void order_records(const OrderRecordsArgs args) {
  auto [records, count, order] = args;
  extern __shared__ __align__(16) unsigned char smem[];
  Record* items = (Record*)smem;
  uint16* ranks = (uint16*)(items + count);
  for (int i = thread(); i < count; i += threads()) items[i] = records[blockIdx.x * count + i];
  __syncthreads();
  block_order(ranks, count, Better{items});
  for (int i = thread(); i < count; i += threads()) order[blockIdx.x * count + i] = ranks[i];
}

// Sums of rows, the next row on its way while one is read.
template <class T>
inline void row_sums(unsigned char* smem, const T* x, int rows, int columns, float* first, float* sums) {
  __shared__ float scratch[32];
  int bytes = RowFetch<T>::buffer_bytes(columns);
  RowFetch<T> fetch[2];
  fetch[0].start(smem, x, columns);
  for (int r = 0; r < rows; r++) {
    const T* row;
    if (r + 1 < rows) {
      fetch[(r + 1) % 2].start(smem + (r + 1) % 2 * bytes, x + (r + 1) * columns, columns);
      row = fetch[r % 2].template finish<1>();
    } else {
      row = fetch[r % 2].finish();
    }
    __syncthreads();
    float sum = 0;
    for (int i = thread(); i < columns; i += threads()) sum += to_float(row[i]);
    sum = block_reduce(sum, Sum(), scratch);  // its barriers: all have read the row
    if (thread() == 0) {
      sums[r] = sum;
      first[r] = to_float(row[0]);
    }
    __syncthreads();
  }
}
struct RowSumsFloatArgs { const float* x; int rows; int columns; float* first; float* sums; };
extern "C" __global__ void row_sums_float(const RowSumsFloatArgs args) {
  auto [x, rows, columns, first, sums] = args;
  extern __shared__ __align__(16) unsigned char smem[];
  row_sums(smem, x, rows, columns, first, sums);
}
struct RowSumsHalfArgs { const Half* x; int rows; int columns; float* first; float* sums; };
extern "C" __global__ void row_sums_half(const RowSumsHalfArgs args) {
  auto [x, rows, columns, first, sums] = args;
  extern __shared__ __align__(16) unsigned char smem[];
  row_sums(smem, x, rows, columns, first, sums);
}
struct RowSumsBfloat16Args {
  const BFloat16* x;
  int rows;
  int columns;
  float* first;
  float* sums;
};
extern "C" __global__ void row_sums_bfloat16(const RowSumsBfloat16Args args) {
  auto [x, rows, columns, first, sums] = args;
  extern __shared__ __align__(16) unsigned char smem[];
  row_sums(smem, x, rows, columns, first, sums);
}
