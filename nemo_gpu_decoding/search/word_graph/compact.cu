// Dropping the records that no token's past leads to any more. Twin of compact_records in tokens.py.
//
// One block per utterance: marks what the chains of its tokens reach, numbers that by a running sum, and
// copies it in order.
//
// Compiled once per key of the tokens, see keys.cuh.
// variants: TOKEN_KEY=int64
// variants: TOKEN_KEY=HistoryKey
#include "cuda/common.cuh"

#include "search/word_graph/graph.cuh"

constexpr int MAX_THREADS = 512;

// Mark what the chains of tokens reach: number 0 in place of NONE. Call with all threads; a barrier must
// follow.
inline void mark(const Token* tokens, int count, const Record* records, int* numbers) {
  for (int i = thread(); i < count; i += threads()) {
    int record = tokens[i].record;  // a chain that meets another one goes on like that
    while (record >= 0 && atomicExch(&numbers[record], 0) == NONE) record = records[record].previous;
  }
}

// Number what is marked, in order; returns how many. Call with all threads after a barrier; ends with one.
inline int number(int* numbers, int count, int* scratch) {
  int size = 0;
  for (int first = 0; first < count; first += threads()) {
    const int i = first + thread();
    const bool lives = i < count && numbers[i] != NONE;
    int more;
    const int place = size + block_exclusive_sum(int(lives), scratch, &more);
    if (lives) numbers[i] = place;
    size += more;
  }
  __syncthreads();
  return size;
}

// Copies records that tokens still point to, in order, to `kept`; tokens get the new numbers.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1) compact(
  Token* tokens,  // [B, held]
  Progress* progress,  // [B]
  const Record* records,  // [B, R]
  Record* kept,  // [B, room]
  int* numbers,  // [B, R]
  int held, int max_records, int room
) {
  __shared__ int scratch[LANES];
  const int64 b = blockIdx.x;
  tokens += b * held;
  records += b * max_records;
  kept += b * room;
  numbers += b * max_records;
  const int num_tokens = progress[b].tokens, count = progress[b].records;
  for (int i = thread(); i < count; i += threads()) numbers[i] = NONE;
  __syncthreads();
  mark(tokens, num_tokens, records, numbers);
  __syncthreads();
  const int size = number(numbers, count, scratch);
  for (int i = thread(); i < count; i += threads()) {
    if (numbers[i] == NONE) continue;
    Record record = records[i];
    if (record.previous >= 0) record.previous = numbers[record.previous];
    kept[numbers[i]] = record;
  }
  for (int i = thread(); i < num_tokens; i += threads()) {
    if (tokens[i].record >= 0) tokens[i].record = numbers[tokens[i].record];
  }
  if (thread() == 0) progress[b].records = size;
}
