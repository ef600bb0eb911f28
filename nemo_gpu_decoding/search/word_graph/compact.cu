// Dropping the back-pointers that lead to no token any more.
//
// One block per utterance: marks what the chains of its tokens reach, numbers that by a running sum,
// and copies it in order.
//
// variants: COMPOSE=0
// variants: COMPOSE=1
#include "search/word_graph/graph.cuh"

#if COMPOSE
typedef LmCompactArgs CompactArgs;
#else
typedef PlainCompactArgs CompactArgs;
#endif

constexpr int MAX_THREADS = 512;

// Mark what the chains of tokens reach: number 0 in place of NONE. Call with all threads; a barrier
// must follow.
inline void mark(const Token* tokens, int count, const BackPointer* back_pointers, int* numbers) {
  for (int i = thread(); i < count; i += threads()) {
    int at = tokens[i].back_pointer;  // a chain that meets another one goes on like that
    while (at >= 0 && atomicExch(&numbers[at], 0) == NONE) at = back_pointers[at].previous;
  }
}

// Number what is marked, in order; returns how many. Call with all threads after a barrier; ends with
// one.
inline int number(int* numbers, int count, int* scratch) {
  int size = 0;
  for (int first = 0; first < count; first += threads()) {
    const int i = first + thread();
    const bool lives = i < count && numbers[i] != NONE;
    int more;
    const int index = size + block_exclusive_sum(int(lives), scratch, &more);
    if (lives) numbers[i] = index;
    size += more;
  }
  __syncthreads();
  return size;
}

// Copies back-pointers that tokens still lead to, in order, to `kept`; tokens get the new numbers.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1) compact(const CompactArgs args) {
  __shared__ int scratch[LANES];
  const int64 b = blockIdx.x;
  Token* tokens = args.tokens + b * args.held;
  const BackPointer* back_pointers = args.back_pointers + b * args.max_back_pointers;
  BackPointer* kept = args.kept + b * args.capacity;
  int* numbers = args.numbers + b * args.max_back_pointers;
  const int num_tokens = args.counters[b].tokens, count = args.counters[b].back_pointers;
  for (int i = thread(); i < count; i += threads()) numbers[i] = NONE;
  __syncthreads();
  mark(tokens, num_tokens, back_pointers, numbers);
  __syncthreads();
  const int size = number(numbers, count, scratch);
  for (int i = thread(); i < count; i += threads()) {
    if (numbers[i] == NONE) continue;
    BackPointer copied = back_pointers[i];
    if (copied.previous >= 0) copied.previous = numbers[copied.previous];
    kept[numbers[i]] = copied;
  }
  for (int i = thread(); i < num_tokens; i += threads()) {
    if (tokens[i].back_pointer >= 0) tokens[i].back_pointer = numbers[tokens[i].back_pointer];
  }
  if (thread() == 0) args.counters[b].back_pointers = size;
}
