// Drop the back-pointers that no token needs.
//
// One block per utterance: it marks the chains of all tokens, renumbers the marked back-pointers by a prefix
// sum, and copies them in order.
//
// variants: COMPOSE=0
// variants: COMPOSE=1
#include "search/word_graph/keys.cuh"

#if COMPOSE
typedef LmCompactArgs CompactArgs;
#else
typedef PlainCompactArgs CompactArgs;
#endif

constexpr int MAX_THREADS = 512;

// Mark the chains of all tokens: number 0 in place of NONE. Call with all threads; a barrier must follow.
inline void mark(const Token* tokens, int count, const BackPointer* back_pointers, int* numbers) {
  for (int i = thread(); i < count; i += threads()) {
    int at = tokens[i].back_pointer;  // stop where another chain has been marked
    while (at >= 0 && atomicExch(&numbers[at], 0) == NONE) at = back_pointers[at].previous;
  }
}

// Number the marked back-pointers in order; returns their count. Call with all threads after a barrier; ends
// with one.
inline int number(int* numbers, int count, int* scratch) {
  int size = 0;
  for (int first = 0; first < count; first += threads()) {
    const int i = first + thread();
    const bool marked = i < count && numbers[i] != NONE;
    int more;
    const int index = size + block_exclusive_sum(int(marked), scratch, &more);
    if (marked) numbers[i] = index;
    size += more;
  }
  __syncthreads();
  return size;
}

// Copy the back-pointers that tokens need to `kept`, in order, and renumber those of the tokens.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1) compact(const CompactArgs args) {
  __shared__ int scratch[LANES];
  const int64 b = blockIdx.x;
  Token* tokens = args.tokens + (3 * b + args.counters[b].place) * args.held;
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
