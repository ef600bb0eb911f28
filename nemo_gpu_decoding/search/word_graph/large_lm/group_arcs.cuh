// Group arcs: each group visits the arcs of its state once, at the cost of its best context. Then arcs
// without LM queries expand all contexts below the cutoff.
//
// The cutoff stays fixed while threads list group arcs, so that the set of group arcs does not depend on
// their order.
#pragma once

#include "search/word_graph/arc_ranges.cuh"
#include "search/word_graph/large_lm/contexts.cuh"

// Whether an arc is not above the cutoff for the best context of its group.
inline bool survives(const Row& row, const ArcRange& range, const LmWorkspace& work) {
  const GraphArc& arc = work.graph.arcs[range.arc];
  const float acoustic_cost = cost_of(row[arc.ilabel], work.search);
  const float group_cost = work.buffers->groups[range.group].cost;
  return least_total(group_cost, arc.cost, acoustic_cost, work.search) <= work.cutoff();
}

// List the group arcs of all groups. False if they exceed the capacity. Call with all threads after a
// barrier; ends with one.
__noinline__ bool list_group_arcs(Row row, float least, const LmWorkspace* shared) {
  const LmWorkspace& work = *shared;
  LmCounters& lm_counters = *work.lm_counters;
  const int num_groups = lm_counters.num_groups;
  int looks = 0;
  for (int first = 0; first < num_groups; first += threads()) {
    const int g = first + thread();
    const int items = g < num_groups ? num_items(work.buffers->groups[g], least, work) : 0;
    const int total = work.arc_items.start(items);
    for (int item = 0; item < total; item += threads()) {
      ArcRange range{};
      if (item + thread() < total) {
        const int owner = work.arc_items.owner(item + thread()), number = first + owner;
        const int own = item + thread() - work.arc_items.begins[owner];
        range = arc_range_of(row, work.buffers->groups[number], number, own, work);
      }
      while (__any_sync(ALL_LANES, range.any())) {
        const bool found = range.any() && survives(row, range, work);
        const int at = warp_append(found, &lm_counters.num_group_arcs);
        if (found && at < work.buffers->capacity.group_arcs) {
          work.buffers->group_arcs[at] = GroupArc{range.group, range.arc};
          atomicExch(&work.buffers->groups[range.group].expands, 1);
        }
        looks += range.any();
        if (range.any()) range.next(work.graph);
      }
    }
  }
  if (looks) atomicAdd(&lm_counters.arc_visits, looks);
  __syncthreads();
  return lm_counters.num_group_arcs <= work.buffers->capacity.group_arcs;
}

// An arc that contexts of a group may take.
struct Step {
  GraphArc arc;
  float acoustic_cost;
  float bonus;
  int64 key;  // of the token after the arc, without its LM context
};

// The step by arc `number` from a group with this key.
inline Step step_of(const Row& row, int number, int64 key_before, const LmWorkspace& work) {
  const Search& search = work.search;
  const GraphArc arc = work.graph.arcs[number];
  const Boost boosting = boosted(arc.olabel, boost_of(key_before), work);
  const bool remembers = search.topology == COMPACT || search.topology == NORMAL;
  const int64 key = key_of(arc.target, boosting.state, remembers ? arc.ilabel + 1 : 0);
  return {arc, cost_of(row[arc.ilabel], search), boosting.bonus, key};
}

// Cost after an arc, by the small LM.
inline float total_of(float cost, const Step& step, const Search& search) {
  return cost + search.lm_weight * step.arc.cost - step.bonus + step.acoustic_cost;
}

// The number of contexts of its group, from the cheapest on, that are not above the cutoff after group arc v.
// 0 with `needs_lm` if no context needs an LM query, and 0 without `needs_lm` if the arc has a word.
__noinline__ int num_within_cutoff(Row row, int v, bool needs_lm, float cutoff, const LmWorkspace* shared) {
  const LmWorkspace& work = *shared;
  if (v >= work.lm_counters->num_group_arcs) return 0;
  const GroupArc group_arc = work.buffers->group_arcs[v];
  const TokenGroup group = work.buffers->groups[group_arc.group];
  const bool has_word = work.graph.arcs[group_arc.arc].olabel != 0;
  if (needs_lm ? !has_word && !group.pending : has_word) return 0;
  const Step step = step_of(row, group_arc.arc, group.key, work);
  int low = 0, high = min(group.count, work.buffers->contexts_per_group);
  while (low < high) {
    const int middle = (low + high) >> 1;
    const float cost = float_of_key((uint32)(work.buffers->order[group.begin + middle] >> 32));
    if (total_of(cost, step, work.search) <= cutoff) low = middle + 1;
    else high = middle;
  }
  return low;
}

inline bool is_closed(const Step& step, const GroupToken& token, const Workspace& work) {
  return work.search.topology == NORMAL && step.arc.ilabel + 1 == last_label(token, work);
}

// The token of a context that takes an arc, or NONE: the best token that the arc is not closed to. For
// lattices all tokens take the arc, and this is the first one; see next_token_of.
inline int first_token_of(const Step& step, int h, const LmWorkspace& work) {
  const LmContext& context = work.buffers->contexts[h];
  if (KEEPS_LINKS) return context.newest;
  return is_closed(step, work.buffers->group_tokens[context.best], work) ? context.second : context.best;
}

inline int next_token_of(int m, const LmWorkspace& work) {
  return KEEPS_LINKS && m != NONE ? work.buffers->group_tokens[m].next : NONE;
}

// The candidate of a token by an arc, with the LM score difference. False if the arc is closed to the
// token, or if the candidate has tightened the cutoff already: a lattice must have it only once.
inline bool candidate_of(
  const Step& step, int arc, int m, int64 lm, float difference, const LmWorkspace& work,
  Candidate& candidate
) {
  if (m == NONE) return false;
  const GroupToken token = work.buffers->group_tokens[m];
  if (KEEPS_LINKS) {
    const Origin& known = work.lm_counters->tightened_by;
    if (is_closed(step, token, work)) return false;
    if (token.source == known.source && arc == known.arc && token.epsilon == known.epsilon) return false;
  }
  const float total = total_of(token.cost, step, work.search) + difference;
  candidate = Candidate{{step.key, lm}, total, {arc, token.source, token.epsilon}, NO_ENTRY};
  return true;
}

inline int context_at(const GroupArc& group_arc, int index, const LmWorkspace& work) {
  return (int)(uint32)work.buffers->order[work.buffers->groups[group_arc.group].begin + index];
}

// Reserve capacity for the first candidate of each thread in offer_all. For lattices offer_all reserves
// it. Call with all threads.
inline void reserve_for_first(LmWorkspace& work) {
  if (!KEEPS_LINKS) reserve_after_barrier(1, work);
}

// Offer the candidate of token m, and for lattices also of all tokens after it. Call with all threads.
inline void offer_all(const Step& step, int arc, int m, int64 lm, float difference, LmWorkspace& work) {
  do {
    if (KEEPS_LINKS) reserve_after_barrier(1, work);
    Candidate candidate{};
    const bool found = candidate_of(step, arc, m, lm, difference, work, candidate);
    offer(found, candidate, work);
    m = next_token_of(m, work);
  } while (KEEPS_LINKS && __syncthreads_or(m != NONE));
}

// Take arcs without a word, for all contexts without a pending word. Afterwards the cutoff is the one after
// all candidates without LM queries. Call with all threads after a barrier; ends with one.
inline void expand_without_lm(const Row& row, LmWorkspace& work) {
  const int num_group_arcs = work.lm_counters->num_group_arcs;
  for (int first = 0; first < num_group_arcs; first += threads()) {
    const int within = num_within_cutoff(row, first + thread(), false, work.cutoff(), work.shared);
    const int total = work.arc_items.start(within);
    for (int item = 0; item < total; item += threads()) {
      reserve_for_first(work);
      Step step{};
      int64 lm = 0;
      int arc = NONE, m = NONE;
      if (item + thread() < total) {
        const int owner = work.arc_items.owner(item + thread());
        const GroupArc group_arc = work.buffers->group_arcs[first + owner];
        const int h = context_at(group_arc, item + thread() - work.arc_items.begins[owner], work);
        const GroupToken& best = work.buffers->group_tokens[work.buffers->contexts[h].best];
        step = step_of(row, group_arc.arc, best.key, work);
        arc = group_arc.arc;
        lm = best.lm;
        if (best.olabel == 0) m = first_token_of(step, h, work);
      }
      offer_all(step, arc, m, lm, 0.0f, work);
    }
  }
  __syncthreads();
}
