// What a block works with: the list of ways that were found and not compared yet, and the two tables
// in which the best way to every key stays.
//
//   ways         [max_ways]  a list, filled by all threads and emptied by `recombine`
//   followers    keys of the next frame's tokens     way: (cost, arc, source token, epsilon record)
//   groups       (graph state, boosting state)       way: (cost, -, source token, epsilon record)
//
// A table is a hash table with linear probing whose slots hold numbers of entries (0: free). Entries
// stand together in the order in which their keys came, so that walking through a table takes as long
// as it has entries, whatever the number of slots.
#pragma once

#include "search/word_graph/graph.cuh"
#include "search/rows.cuh"

// Whether links between tokens are kept, for lattices; in kernels of their own, for the registers' sake.
#ifndef LINKS
#define LINKS 0
#endif
constexpr bool KEEPS_LINKS = LINKS != 0;

// Where a way comes from.
struct Origin {
  int arc;  // of the graph, or a Move
  int source;  // token of the frame before
  int epsilon;  // record taken before the arc, or NONE
};

struct Way {
  Key key;
  float cost;
  Origin origin;
  int place;  // while recombined: its slot, ~slot if it is to open that, then its entry; or NO_PLACE
};
static_assert(sizeof(Way) == 24 + sizeof(Key), "Way differs from launch_shape.WAY_BYTES");
constexpr int NO_PLACE = (int)0x80000000;

// 64 bits that order by cost. The lower half names the way: its number in the list counted from the
// table's `base`, or less for a way of an earlier list, whose origin the entry has.
typedef uint64 Rank;
constexpr Rank NOTHING = ~0ull;
constexpr uint32 FORMER_BEST = 0xffffffffu;  // a group's second way that was its first one before

struct Entry {
  Key key;
  Rank best;
  float cost;
  Origin origin;
};
static_assert(sizeof(Entry) == 24 + sizeof(Key), "Entry differs from launch_shape.ENTRY_BYTES");

// The best way to a group from a token with another last label than the best of all (topology normal).
struct Second {
  Rank best;
  float cost;
  Origin origin;
  int unused[2];
};
static_assert(sizeof(Second) == 32, "Second differs from launch_shape.ENTRY_BYTES");

inline Rank rank(float cost, uint32 way) { return (Rank)ordered_key(cost) << 32 | way; }
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

  // The slot of a key that is there, or is claimed by a way of the list; else a free one, claimed for
  // way i, as ~slot.
  int find_or_claim(const Key& key, int i, const Way* ways) {
    for (int at = (int)(hash_of(key) >> 24) & mask;; at = (at + 1) & mask) {
      int seen = __ldcg(&slots[at]);
      if (seen == 0) seen = atomicCAS(&slots[at], 0, ~i);
      if (seen == 0) return ~at;
      if ((seen > 0 ? entries[seen - 1].key : ways[~seen].key) == key) return at;
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

// What the threads of a block count together.
struct Tally {
  uint32 best;  // ordered key of the cost of the best way into the next frame that is known
  int num_ways;
  int num_labels;
  int num_followers;
  int num_groups;
  int full;  // there were more keys than followers have room for, so new ones are refused
  int best_token;  // of this frame
  int kept;
  int num_records;
  int last_step;
  int num_links;  // of this frame, beyond those of the stream; above the room if there were more
  int unused;
};
static_assert(sizeof(Tally) == 48, "Tally differs from launch_shape.shared_bytes");

// How pieces of work that have several items each are spread over the threads: which owner has the i-th
// item of all.
struct Deal {
  int* begins;  // shared, [threads + 1]: the first item of each owner
  int* scratch;  // shared, [32]

  // `mine`: items of this thread as owner; returns the number of all. Call with all threads; ends with
  // a barrier. Nobody may still look for owners of the deal before.
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
  Tally* tally;  // shared
  Deal tokens;  // spreads epsilon records of tokens
  Deal states;  // spreads arcs of groups
  int* histogram;  // shared, [BINS]
  uint64* scratch;  // shared, [32], of reductions and scans
  Table followers;
  Table groups;
  Token* current;  // [capacity]
  Token* next;  // [capacity]
  Way* ways;
  int max_ways;
  int reserved;  // no more ways are in the list; the same in all threads
  int* labels;  // [V + 1], those that may matter in a frame
  Record* records;
  int max_records;
  int64 last_rank;  // ways that rank after are dropped
  Link* links;  // those of this frame go here, if links are kept
  int max_links;

  // The cost of the best way so far. It may sink at any time: a guess that is good for bounds, and the
  // truth after a barrier.
  float best() const { return float_of_key(*(volatile uint32*)&tally->best); }

  float cutoff() const {
    float found = best();
    return found < largest_float() ? found + search.beam : found;
  }

  void lower_best(float cost) {
    if (cost < best()) atomicMin(&tally->best, ordered_key(cost));
  }

  // Append a way for every thread that has one. Call with all lanes of a warp; there must be room.
  void append(bool wants, const Way& way) {
    int at = warp_append(wants, &tally->num_ways);
    if (wants) ways[at] = way;
  }

  // Whether the list has room for `more` ways of each thread, which are then reserved. Call with all
  // threads.
  bool reserve(int more) {
    int wanted = more * threads();
    if (reserved + wanted > max_ways) return false;
    reserved += wanted;
    return true;
  }
};
