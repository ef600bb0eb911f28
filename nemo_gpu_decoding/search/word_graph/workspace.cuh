// The workspace of a block: the list of candidates before recombination, and hash tables of the best candidates.
//
//   candidates   a list; all threads append to it, and `recombine` empties it
//   next_tokens  key of a next token -> cost, arc, source token, closure arc of its best candidate
//   groups       graph state, boosting state -> cost, source token, closure arc of the best token
//
// A table is a hash table with linear probing. Slots contain numbers of entries (0: free). Entries are stored
// contiguously, so that a loop over a table does not depend on the number of slots.
#pragma once

#include "search/word_graph/keys.cuh"
#include "search/rows.cuh"

// Whether links between tokens are kept, for lattices. A separate kernel saves registers in the other.
#ifndef LINKS
#define LINKS 0
#endif
constexpr bool KEEPS_LINKS = LINKS != 0;
#ifndef MIN_ACTIVE
#define MIN_ACTIVE 0
#endif
constexpr bool WIDENS = MIN_ACTIVE != 0;  // frames with fewer tokens than min_active repeat with a wider beam

constexpr int NO_ENTRY = (int)0x80000000;  // of a candidate

// 64 bits with the order of costs. The lower half is the number of the candidate: `base` of the table plus its
// index in the list. Lower numbers are of earlier lists, and the entry contains their origin.
typedef uint64 Rank;
constexpr Rank NOTHING = ~0ull;
constexpr uint32 FORMER_BEST = 0xffffffffu;  // a group's second token that was its best one before

inline Rank rank(float cost, uint32 candidate) { return (Rank)ordered_key(cost) << 32 | candidate; }
inline float cost_of_rank(Rank rank) { return float_of_key((uint32)(rank >> 32)); }

struct Table {
  Global<int> slots;  // [mask + 1]
  int mask;
  Global<Entry> entries;  // [capacity]
  Global<Second> seconds;  // [capacity], or null
  int capacity;
  Shared<int> count;  // it may exceed the capacity
  uint32 base;

  int size() const { return min(*count, capacity); }

  // The slot of a key in the table or of a candidate of the list that claimed it; else ~slot of a free slot, which
  // candidate i claims.
  int find_or_claim(const Key& key, int i, const Candidate* candidates) {
    for (int at = (int)(hash_of(key) >> 24) & mask;; at = (at + 1) & mask) {
      int seen = __ldcg(&slots[at]);
      if (seen == 0) seen = atomicCAS(&slots[at], 0, ~i);
      if (seen == 0) return ~at;
      if ((seen > 0 ? entries[seen - 1].key : candidates[~seen].key) == key) return at;
    }
  }

  // Free all slots. Call with all threads after a barrier; a barrier must follow.
  void clear() {
    for (int e = thread(); e < size(); e += threads()) {
      int at = (int)(hash_of(entries[e].key) >> 24) & mask;
      while (__ldcg(&slots[at]) != e + 1) at = (at + 1) & mask;
      __stcg(&slots[at], 0);
    }
    base = 0;
  }
};

// Load balancing: spreads the items of several owners evenly over the threads.
struct LoadBalancer {
  Shared<int> begins;  // [threads + 1]: the first item of each owner
  int* scratch;  // shared, [32]

  // `mine`: number of items of this thread as an owner. Returns the total. Call with all threads, after the last
  // call of `owner` for earlier items; ends with a barrier.
  int start(int mine) const {
    int total;
    begins[thread()] = block_exclusive_sum(mine, scratch, &total);
    if (thread() == 0) begins[threads()] = total;
    __syncthreads();
    return total;
  }

  int owner(int item) const {
    int low = 0, high = threads();  // begins[low] <= item < begins[high]
    while (high - low > 1) {
      int middle = (low + high) >> 1;
      if (begins[middle] <= item) low = middle;
      else high = middle;
    }
    return low;
  }
};

struct Workspace {
  Search search;
  Graph graph;
  Automaton boosting;
  Shared<Counters> counters;
  LoadBalancer closure_items;  // closure arcs of tokens
  LoadBalancer arc_items;  // arcs of token groups
  Shared<int> histogram;  // [BINS]
  uint64* scratch;  // shared, [32], of reductions and scans
  Table next_tokens;
  Table groups;
  Token* current;  // [capacity]
  Token* next;  // [capacity]
  Global<Candidate> candidates;
  int max_candidates;
  int reserved;  // upper bound of the candidates in the list; the same in all threads
  Global<int> labels;  // [V + 1], labels that can stay below the cutoff
  Global<BackPointer> back_pointers;
  int max_back_pointers;
  int64 last_rank;  // candidates with a higher rank are dropped
  Global<Link> links;  // of this frame; for lattices
  int max_links;

  // The cost of the best candidate so far. Other threads may lower it at any time, so that it is an upper bound
  // until the next barrier.
  float best() const { return float_of_key(*(volatile uint32*)&counters->best); }

  float cutoff() const {
    float found = best();
    return found < largest_float() ? found + search.beam : found;
  }

  void lower_best(float cost) {
    if (cost < best()) atomicMin(&counters->best, ordered_key(cost));
  }

  // Append the candidates of the threads that have one. Call with all lanes of a warp, after `reserve`.
  void append(bool exists, const Candidate& candidate) {
    int at = warp_append(exists, &counters->num_candidates);
    if (exists) candidates[at] = candidate;
  }

  // Reserve `more` candidates of each thread; false if the list has no capacity. Call with all threads.
  bool reserve(int more) {
    int total = more * threads();
    if (reserved + total > max_candidates) return false;
    reserved += total;
    return true;
  }
};
