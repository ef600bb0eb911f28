// Epsilon closure with composition: tokens, in their own state or after a closure arc, form LM
// contexts, and contexts form groups.
//
// A work item is a token in its own state or after one closure arc.
#pragma once

#include "search/word_graph/arc_ranges.cuh"
#include "search/word_graph/large_lm/workspace.cuh"

// Sort many short lists of contexts at once: a warp sorts a short list, the block sorts a long one.
constexpr int SORTED_BY_WARP = 64;  // items; a longer list is sorted by the block

struct WarpTeam {
  static int own() { return lane(); }
  static int size() { return LANES; }
  static void synchronize() { __syncwarp(); }
};

struct BlockTeam {
  static int own() { return thread(); }
  static int size() { return threads(); }
  static void synchronize() { __syncthreads(); }
};

// Sort items[0 .. count), in global or shared memory, in place, by the network of block_sort in common.cuh.
// Call with all threads of the team after a barrier of the team; ends with one.
template <class Team, class T, class Before>
inline void team_sort(T* items, int count, Before before) {
  for (int size = 2; size / 2 < count; size *= 2) {
    for (int stride = size / 2; stride > 0; stride /= 2) {
      const bool mirror = stride == size / 2;
      for (int pair = Team::own();; pair += Team::size()) {
        const int offset = pair & (stride - 1), first = 2 * (pair - offset);
        if (first >= count) break;
        const int high = mirror ? first + size - 1 - offset : first + offset + stride;
        sorting::order_pair(items, first + offset, high, count, before);
      }
      Team::synchronize();
    }
  }
}

// Whether an arc of a state may stay below the cutoff. Most groups have no such arc. Large states are always
// expanded.
inline bool may_expand(const Row& row, const GraphState& source, float cost, const LmWorkspace& work) {
  bool may = source.arc_end - source.arc_begin > SMALL_STATE;
  for (int a = source.arc_begin; !may && a < source.arc_end; a++) {
    const GraphArc& arc = work.graph.arcs[a];
    const float acoustic_cost = cost_of(row[arc.ilabel], work.search);
    may = least_total(cost, arc.cost, acoustic_cost, work.search) <= work.cutoff();
  }
  return may;
}

// The group token of token i in its own state (e: NONE) or after closure arc e. False if none of its candidates
// can stay below the cutoff.
inline bool join(const Row& row, int i, int e, float least, const LmWorkspace& work, GroupToken& joined) {
  const Search& search = work.search;
  const Token token = work.current[i];
  int target = state_of(token.key), boost = boost_of(token.key), olabel = 0;
  float cost = token.cost, least_arc;
  if (e == NONE) {
    least_arc = work.graph.states[target].least_cost;
  } else {
    const Epsilon closure = work.graph.epsilons[e];
    cost += search.lm_weight * closure.cost;
    target = closure.target;
    least_arc = closure.least_cost;
    olabel = closure.olabel;
    if (olabel != 0 && search.boosts) {
      const Boost boosting = boosted(olabel, boost, work);
      cost -= boosting.bonus;
      boost = boosting.state;
    }
  }
  joined = GroupToken{key_of(target, boost, 0), token.key.lm, olabel, cost, i, e, NONE, NONE};
  if (!(least_total(cost, least_arc, least, search) <= work.cutoff())) return false;
  return may_expand(row, work.graph.states[target], cost, work);
}

// List all group tokens. False if they exceed the capacity. Call with all threads after a barrier;
// ends with one.
inline bool list_group_tokens(const Row& row, int count, float least, const LmWorkspace& work) {
  const Graph& graph = work.graph;
  LmCounters& lm_counters = *work.lm_counters;
  for (int first = 0; first < count; first += threads()) {
    int items = 0;
    if (first + thread() < count) {
      const GraphState state = graph.states[state_of(work.current[first + thread()].key)];
      items = 1 + state.epsilon_end - state.epsilon_begin;
    }
    const int total = work.closure_items.start(items);
    for (int item = 0; item < total; item += threads()) {
      const int own = item + thread();
      GroupToken token{};
      bool wants = false;
      if (own < total) {
        const int owner = work.closure_items.owner(own), i = first + owner;
        const int begin = graph.states[state_of(work.current[i].key)].epsilon_begin;
        const int e = own - work.closure_items.begins[owner] - 1;
        wants = join(row, i, e < 0 ? NONE : begin + e, least, work, token);
      }
      const int at = warp_append(wants, &lm_counters.num_group_tokens);
      if (wants && at < work.buffers->capacity.groups) work.buffers->group_tokens[at] = token;
    }
  }
  __syncthreads();
  return lm_counters.num_group_tokens <= work.buffers->capacity.groups;
}

inline int last_label(const GroupToken& token, const Workspace& work) {
  return label_of(work.current[token.source].key);
}

// Order of the tokens of a context: by cost, then key of the source, then closure arc.
inline bool is_before(const GroupToken& a, const GroupToken& b, const Workspace& work) {
  if (a.cost != b.cost) return a.cost < b.cost;
  const Key key = work.current[a.source].key, other = work.current[b.source].key;
  return key != other ? key < other : a.epsilon < b.epsilon;
}

// Set *best to group token m if *best is NONE or worse. Atomic: threads may call it at the same time.
inline void compete(int m, int* best, const LmWorkspace& work) {
  int old = __ldcg(best);
  while (old == NONE || is_before(work.buffers->group_tokens[m], work.buffers->group_tokens[old], work)) {
    const int seen = atomicCAS(best, old, m);
    if (seen == old) return;
    old = seen;
  }
}

// Find the contexts of all group tokens, and the best token of each context. Call with all threads after a
// barrier; a barrier must follow before a thread reads the second best tokens.
inline void find_contexts(const LmWorkspace& work) {
  LmCounters& lm_counters = *work.lm_counters;
  GroupToken* group_tokens = work.buffers->group_tokens;
  const int count = lm_counters.num_group_tokens;
  for (int m = thread(); m < count; m += threads()) {
    const int64 key = group_tokens[m].key, lm = group_tokens[m].lm;
    const int olabel = group_tokens[m].olabel;
    int slot;
    const int first = work.buffers->first_tokens.find_or_enter(
      hash_of(LmKey{key, lm}) + ((uint64)olabel << 32), m, &slot,
      [&](int other) {
        const GroupToken& token = group_tokens[other];
        return token.key == key && token.lm == lm && token.olabel == olabel;
      }
    );
    if (first == m) {
      const int h = atomicAdd(&lm_counters.num_contexts, 1);
      work.buffers->contexts[h] = LmContext{m, NONE, NONE, NONE, 0, slot, NONE};
      group_tokens[m].context = h;
    } else {
      group_tokens[m].context = ~first;
    }
  }
  __syncthreads();
  for (int m = thread(); m < count; m += threads()) {
    int h = group_tokens[m].context;
    if (h < 0) {
      h = group_tokens[~h].context;
      group_tokens[m].context = h;
      compete(m, &work.buffers->contexts[h].best, work);
    }
    if (KEEPS_LINKS) group_tokens[m].next = atomicExch(&work.buffers->contexts[h].newest, m);
  }
  __syncthreads();
  if (work.search.topology != NORMAL || KEEPS_LINKS) return;
  for (int m = thread(); m < count; m += threads()) {
    LmContext& context = work.buffers->contexts[group_tokens[m].context];
    const bool closed = last_label(group_tokens[m], work) == last_label(group_tokens[context.best], work);
    if (!closed) compete(m, &context.second, work);
  }
}

// Find the groups of all contexts. Call with all threads after a barrier; ends with one.
inline void find_groups(const LmBuffers& buffers, LmCounters& lm_counters) {
  LmContext* contexts = buffers.contexts;
  const GroupToken* group_tokens = buffers.group_tokens;
  const int count = lm_counters.num_contexts;
  for (int h = thread(); h < count; h += threads()) {
    const int64 key = group_tokens[contexts[h].best].key;
    int slot;
    const int first = buffers.first_contexts.find_or_enter(hash_of(key), h, &slot, [&](int other) {
      return group_tokens[contexts[other].best].key == key;
    });
    if (first == h) {
      const int g = atomicAdd(&lm_counters.num_groups, 1);
      buffers.groups[g] = TokenGroup{key, ordered_key(largest_float()), 0.0f, 0, 0, 0, 0, 0, 0};
      contexts[h].group = g;
      contexts[h].group_slot = slot;
    } else {
      contexts[h].group = ~first;
    }
  }
  __syncthreads();
  for (int h = thread(); h < count; h += threads()) {
    const int own = contexts[h].group, g = own >= 0 ? own : contexts[~own].group;
    const GroupToken& best = group_tokens[contexts[h].best];
    if (own < 0) contexts[h].group = g;
    TokenGroup& group = buffers.groups[g];
    atomicAdd(&group.count, 1);
    atomicMin(&group.best, ordered_key(best.cost + 0.0f));  // -0 becomes +0
    if (best.olabel != 0) atomicExch(&group.pending, 1);
  }
  __syncthreads();
}

// List the contexts group by group in `order`. Call with all threads after a barrier; one must follow.
inline void list_contexts(const LmBuffers& buffers, const LmCounters& lm_counters, int* scratch) {
  const int num_groups = lm_counters.num_groups, count = lm_counters.num_contexts;
  int begin = 0;
  for (int first = 0; first < num_groups; first += threads()) {
    const int g = first + thread();
    int more;
    const int size = g < num_groups ? buffers.groups[g].count : 0;
    const int before = block_exclusive_sum(size, scratch, &more);
    if (g < num_groups) {
      buffers.groups[g].begin = begin + before;
      buffers.groups[g].cost = float_of_key(buffers.groups[g].best);
    }
    begin += more;
  }
  __syncthreads();
  for (int h = thread(); h < count; h += threads()) {
    TokenGroup& group = buffers.groups[buffers.contexts[h].group];
    const float cost = buffers.group_tokens[buffers.contexts[h].best].cost;
    const int index = group.begin + atomicAdd(&group.placed, 1);
    buffers.order[index] = (uint64)ordered_key(cost + 0.0f) << 32 | (uint32)h;
  }
}

// Free the slots of the hash tables for the next frame. Call with all threads.
inline void free_slots(const LmBuffers& buffers, const LmCounters& lm_counters) {
  for (int h = thread(); h < lm_counters.num_contexts; h += threads()) {
    const LmContext& context = buffers.contexts[h];
    buffers.first_tokens.slots[context.slot] = 0;
    if (context.group_slot != NONE) buffers.first_contexts.slots[context.group_slot] = 0;
  }
}

// Find groups, contexts and group tokens of all tokens. False if they exceed the capacity. Call with all
// threads after a barrier; a barrier must follow before a thread reads the order of contexts.
__noinline__ bool epsilon_closure(Row row, int count, float least, const LmWorkspace* shared) {
  const LmWorkspace& work = *shared;
  if (!list_group_tokens(row, count, least, work)) return false;
  find_contexts(work);
  find_groups(*work.buffers, *work.lm_counters);
  list_contexts(*work.buffers, *work.lm_counters, (int*)work.scratch);
  free_slots(*work.buffers, *work.lm_counters);
  return true;
}

// Sort the contexts of the groups under expansion, cheapest first. Call with all threads after a barrier;
// ends with one.
__noinline__ void sort_contexts(const LmBuffers* buffers, LmCounters* shared_counters) {
  LmCounters& lm_counters = *shared_counters;
  const auto before = [&](uint64 a, uint64 b) {
    if (a >> 32 != b >> 32) return a < b;
    const GroupToken& one = buffers->group_tokens[buffers->contexts[(uint32)a].best];
    const GroupToken& two = buffers->group_tokens[buffers->contexts[(uint32)b].best];
    return one.lm != two.lm ? one.lm < two.lm : one.olabel < two.olabel;
  };
  int expanded = 0;
  for (int g = warp(); g < lm_counters.num_groups; g += warps()) {
    const TokenGroup group = buffers->groups[g];
    if (!group.expands) continue;
    if (lane() == 0) expanded += min(group.count, buffers->contexts_per_group);
    if (group.count <= SORTED_BY_WARP) {
      team_sort<WarpTeam>(buffers->order + group.begin, group.count, before);
    } else if (lane() == 0) {
      buffers->large_groups[atomicAdd(&lm_counters.num_large_groups, 1)] = g;
    }
  }
  if (expanded) atomicAdd(&lm_counters.expanded, expanded);
  __syncthreads();
  for (int i = 0; i < lm_counters.num_large_groups; i++) {
    const TokenGroup group = buffers->groups[buffers->large_groups[i]];
    team_sort<BlockTeam>(buffers->order + group.begin, group.count, before);
  }
}
