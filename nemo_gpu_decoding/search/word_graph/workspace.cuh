// The workspace of a block: candidates that were found and not recombined yet, and the hash tables in
// which the best candidate with each key stays.
//
//   candidates   a list, filled by all threads and emptied by `recombine`
//   next_tokens  keys of the next frame's tokens: cost, arc, source token, closure arc of the best candidate
//   groups       keys (graph state, boosting state): cost, source token, closure arc of the best token
//
// A table is a hash table with linear probing whose slots hold numbers of entries (0: free). Entries
// stand together in the order in which their keys came, so that walking through a table takes as long
// as it has entries, whatever the number of slots.
#pragma once

#include "search/word_graph/graph.cuh"
#include "search/rows.cuh"

// Whether links between tokens are kept, for lattices; in kernels of their own, for the registers'
// sake.
#ifndef LINKS
#define LINKS 0
#endif
constexpr bool KEEPS_LINKS = LINKS != 0;

constexpr int NO_ENTRY = (int)0x80000000;  // of a candidate

// 64 bits that order by cost. The lower half names the candidate: its number in the list counted from
// the table's `base`, or less for one of an earlier list, whose origin the entry has.
typedef uint64 Rank;
constexpr Rank NOTHING = ~0ull;
constexpr uint32 FORMER_BEST = 0xffffffffu;  // a group's second token that was its best one before

inline Rank rank(float cost, uint32 candidate) { return (Rank)ordered_key(cost) << 32 | candidate; }
inline float cost_of_rank(Rank rank) { return float_of_key((uint32)(rank >> 32)); }

struct Table {
  int* slots;  // [mask + 1]
  int mask;
  Entry* entries;  // [capacity]
  Second* seconds;  // [capacity], or null
  int capacity;
  int* count;  // shared; above the capacity if there were more keys
  uint32 base;

  int size() const { return min(*count, capacity); }

  // The slot of a key that is there, or is claimed by a candidate of the list; else a free one, claimed
  // for candidate i, as ~slot.
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

// Load balancing: items of several owners, spread evenly over the threads.
struct LoadBalancer {
  int* begins;  // shared, [threads + 1]: the first item of each owner
  int* scratch;  // shared, [32]

  // `mine`: items of this thread as owner; returns the number of all. Call with all threads; ends with
  // a barrier. Nobody may still look for owners of the items before.
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
  Counters* counters;  // shared
  LoadBalancer closure_items;  // closure arcs of tokens
  LoadBalancer arc_items;  // arcs of token groups
  int* histogram;  // shared, [BINS]
  uint64* scratch;  // shared, [32], of reductions and scans
  Table next_tokens;
  Table groups;
  Token* current;  // [capacity]
  Token* next;  // [capacity]
  Candidate* candidates;
  int max_candidates;
  int reserved;  // no more candidates are in the list; the same in all threads
  int* labels;  // [V + 1], those that may matter in a frame
  BackPointer* back_pointers;
  int max_back_pointers;
  int64 last_rank;  // candidates that rank after are dropped
  Link* links;  // those of this frame go here, if links are kept
  int max_links;

  // The cost of the best candidate so far. It may sink at any time: a guess that is good for bounds,
  // and the truth after a barrier.
  float best() const { return float_of_key(*(volatile uint32*)&counters->best); }

  float cutoff() const {
    float found = best();
    return found < largest_float() ? found + search.beam : found;
  }

  void lower_best(float cost) {
    if (cost < best()) atomicMin(&counters->best, ordered_key(cost));
  }

  // Append a candidate for every thread that has one. Call with all lanes of a warp, after `reserve`.
  void append(bool wants, const Candidate& candidate) {
    int at = warp_append(wants, &counters->num_candidates);
    if (wants) candidates[at] = candidate;
  }

  // Whether the list has capacity for `more` candidates of each thread, which are then reserved. Call
  // with all threads.
  bool reserve(int more) {
    int wanted = more * threads();
    if (reserved + wanted > max_candidates) return false;
    reserved += wanted;
    return true;
  }
};
