// Workspace of a block for composition: LM contexts and groups of tokens, the arcs of groups, and LM queries.
//
//   group_tokens   tokens that may be expanded, in their own state or after a closure arc
//   contexts       group tokens of one group with one LM context and one pending word; the best one counts
//   groups         contexts in one graph state and boosting state; the search visits their arcs once
//   group_arcs     arcs of groups that are not above the cutoff at the cost of the group's best context
//   queries        an arc and a context that need an LM query
//   cached_scores  scores of the LMs, until their number exceeds the capacity
//
// A pending word is the word of a closure arc without an LM query so far. Example: three tokens in graph
// state 7 after "a b", "a c" (just read) and "a c" (with a blank since) are three group tokens, two contexts,
// one group. An arc of state 7 with a word is one group arc, and becomes two queries.
#pragma once

#include "search/word_graph/large_lm/scorer.cuh"

// A hash table from keys to items. A slot holds number + 1 of the first item with a key; 0: free.
struct Firsts {
  Global<int> slots;  // [mask + 1], more than there are items
  int mask;

  // The number of the first item with the key of item `own`; enters `own` if there is none. same(i): whether
  // item i has that key. *slot: output, the slot of the key.
  template <class Same>
  int find_or_enter(uint64 hash, int own, int* slot, Same same) const {
    for (int at = (int)(hash >> 24) & mask;; at = (at + 1) & mask) {
      *slot = at;
      int seen = __ldcg(&slots[at]);
      if (seen == 0) seen = atomicCAS(&slots[at], 0, own + 1);
      if (seen == 0) return own;
      if (same(seen - 1)) return seen - 1;
    }
  }
};

// Arguments that are constant during a launch, in shared memory because registers are scarce.
struct LmBuffers {
  Graph graph;
  LmPair lms;
  Capacity capacity;
  int contexts_per_group;  // most contexts of a group that are expanded
  Global<GroupToken> group_tokens;
  Global<LmContext> contexts;
  Global<TokenGroup> groups;
  Global<uint64> order;  // contexts by group: ordered key of the cost in the high half, number in the low half
  Global<int> large_groups;  // groups that all threads sort together
  Firsts first_tokens;
  Firsts first_contexts;
  Global<GroupArc> group_arcs;
  Global<LmQuery> queries;
  Global<int> unanswered;
  Global<CachedScore> cached_scores;
  Global<int> cache_slots;
};

struct LmWorkspace : Workspace {
  Shared<LmCounters> lm_counters;
  Shared<const LmBuffers> buffers;
  // A copy for functions that are not inlined, to save registers of their callers. The copy of fields
  // that change during a frame is stale.
  Shared<LmWorkspace> shared;
};

// Bounds of the bisection for the highest rank at which all keys fit into the capacity.
struct RankLimits {
  int64 low;
  int64 high;
};

// Shared memory of a block for composition, in addition to a search without composition.
struct LmShared {
  LmCounters counters;
  LmBuffers buffers;
  LmWorkspace workspace;
  Work work;
  StreamCounters before;  // counters before the frame
  RankLimits limits;
};

inline void open_buffers(const LmAdvanceArgs& args, int64 b, const Workspace& work, LmBuffers& buffers) {
  const Capacity& capacity = args.capacity;
  const int64 groups = b * capacity.groups, slots = b * capacity.group_slots;
  buffers.graph = work.graph;
  open_lms(args, work.search.difference_weight, buffers.lms);
  buffers.capacity = capacity;
  buffers.contexts_per_group = args.contexts_per_group;
  buffers.group_tokens = args.group_tokens + groups;
  buffers.contexts = args.contexts + groups;
  buffers.groups = args.groups + groups;
  buffers.order = (uint64*)args.order + groups;
  buffers.large_groups = args.large_groups + b * capacity.large_groups;
  buffers.first_tokens = Firsts{args.group_slots + slots, capacity.group_slots - 1};
  buffers.first_contexts = Firsts{args.context_slots + slots, capacity.group_slots - 1};
  buffers.group_arcs = args.group_arcs + b * capacity.group_arcs;
  buffers.queries = args.queries + b * capacity.queries;
  buffers.unanswered = args.unanswered + b * capacity.queries;
  buffers.cached_scores = args.cached_scores + b * capacity.cached_scores;
  buffers.cache_slots = args.cache_slots + b * capacity.cache_slots;
}

// Open the buffers and counters of composition for utterance b. Call with all threads; a barrier must follow.
inline void open_composition(const LmAdvanceArgs& args, int64 b, LmShared& shared, LmWorkspace& work) {
  work.lm_counters = &shared.counters;
  work.buffers = &shared.buffers;
  work.shared = &shared.workspace;
  if (thread() != 0) return;
  shared.counters = LmCounters{};
  shared.work = args.work[b];
  open_buffers(args, b, work, shared.buffers);
  shared.workspace = work;
}

// Add the work of a frame to `total`.
inline void add_work(const LmCounters& frame, Work& total) {
  total.look_ups += frame.look_ups;
  total.query_hits += frame.answered;
  total.arc_visits += frame.arc_visits;
  total.groups += frame.num_groups;
  total.expanded += frame.expanded;
  total.cache_hits += frame.cache_hits;
  total.cache_misses += frame.cache_misses;
  total.cache_sectors += frame.cache_sectors;
}

// Reserve capacity for `more` candidates of each thread. Call with all threads at any time.
inline void reserve_after_barrier(int more, Workspace& work) {
  if (work.reserve(more)) return;
  __syncthreads();
  recombine(work.next_tokens, true, work);
  work.reserve(more);
}
