// Expansion: the arcs of all token groups, and with them one frame of the search without composition.
//
// Arc ranges of all groups are spread evenly over the threads: states have from one to many thousand
// arcs.
#pragma once

#include "search/word_graph/arc_ranges.cuh"
#include "search/word_graph/token_groups.cuh"

// The candidate by one arc. False if it is closed or hopeless.
inline bool candidate_of(
  const Row& row, const ArcRange& range, const Workspace& work, Candidate& candidate
) {
  const Search& search = work.search;
  const Entry& group = work.groups.entries[range.group];
  const GraphArc arc = work.graph.arcs[range.arc];
  const float acoustic_cost = cost_of(row[arc.ilabel], search);
  if (!(least_total(group.cost, arc.cost, acoustic_cost, search) <= work.cutoff())) return false;
  Boost boosting{0.0f, boost_of(group.key)};
  if (search.boosts && arc.olabel != 0) boosting = boosted(arc.olabel, boosting.state, work);
  const int label = arc.ilabel + 1;
  const bool remembers = search.topology == COMPACT || search.topology == NORMAL;
  float cost = group.cost;
  Origin origin = group.origin;
  if (search.topology == NORMAL && label == last_label(origin, work)) {
    if (KEEPS_LINKS) return false;
    const Second& second = work.groups.seconds[range.group];
    if (second.best == NOTHING) return false;
    cost = second.cost;
    origin = second.origin;
  }
  origin.arc = range.arc;
  const float total = cost + search.lm_weight * arc.cost - boosting.bonus + acoustic_cost;
  const int64 key = key_of(arc.target, boosting.state, remembers ? label : 0);
  candidate = Candidate{key, total, origin, NO_ENTRY};
  return true;
}

// All arcs of all groups, which are void after the next barrier. Call with all threads after a barrier.
inline void expand_groups(const Row& row, float least, Workspace& work) {
  recombine_groups(work);
  const int num_groups = work.groups.size();
  for (int first = 0; first < num_groups; first += threads()) {
    const int g = first + thread();
    const int items = g < num_groups ? num_items(work.groups.entries[g], least, work) : 0;
    const int total = work.arc_items.start(items);
    for (int item = 0; item < total; item += threads()) {
      ArcRange range{};
      if (item + thread() < total) {
        const int owner = work.arc_items.owner(item + thread());
        const int own = item + thread() - work.arc_items.begins[owner];
        range = arc_range_of(row, work.groups.entries[first + owner], first + owner, own, work);
      }
      do {
        reserve_candidates(1, work);
        Candidate candidate{};
        const bool found = range.any() && candidate_of(row, range, work, candidate);
        offer(found, candidate, work);
        if (range.any()) range.next(work.graph);
      } while (__syncthreads_or(range.any()));
    }
  }
  recombine(work.next_tokens, true, work);
  if (!KEEPS_LINKS) work.groups.clear();
  __syncthreads();
  if (thread() == 0) *work.groups.count = 0;
}

// All emitting arcs. Where there is no capacity for another group, those that there are go first. Call
// with all threads after a barrier; the next tokens are complete then.
inline void expand_arcs(const Row& row, int count, Workspace& work) {
  const float least = least_acoustic_cost(row, work);
  int first = 0, item = 0;
  bool all = false;
  while (!all) {
    all = epsilon_closure(first, item, count, least, work);
    __syncthreads();
    expand_groups(row, least, work);
  }
}
