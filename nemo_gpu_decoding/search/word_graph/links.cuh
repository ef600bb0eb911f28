// Links between the tokens of two frames, for lattices: one for every candidate, also for those that lose at
// recombination.
//
// Until the frame is pruned, the target of a link is an entry of the next tokens. `prune` keeps the links within
// the lattice beam. Their order depends on the order of threads; the lattice does not.
#pragma once

#include "search/word_graph/workspace.cuh"

// Whether the path through a link costs more than the best path to its target plus the lattice beam. The cost of
// the target only decreases during a frame, so that a hopeless link stays hopeless.
inline bool is_hopeless(float source_cost, float cost, float target_cost, const Search& search) {
  return source_cost + cost - target_cost > search.lattice_beam;
}

// Append `count` candidates of the list to the links of the frame. The counter goes on beyond the capacity. Call
// with all threads when the best candidate with every key is known.
inline void add_links(int count, const Table& next_tokens, Workspace& work) {
  for (int first = 0; first < count; first += threads()) {
    const int i = first + thread();
    bool is_kept = i < count && work.candidates[i].entry != NO_ENTRY;
    Link link{};
    if (is_kept) {
      const Candidate& candidate = work.candidates[i];
      const Origin& origin = candidate.origin;
      const float before = work.current[origin.source].cost;
      link = Link{
        origin.source, candidate.entry, origin.arc, origin.epsilon, candidate.cost - before, candidate.cost,
      };
      const float best = cost_of_rank(next_tokens.entries[candidate.entry].best);
      is_kept = !is_hopeless(before, link.cost, best, work.search);
    }
    const int at = warp_append(is_kept, &work.counters->num_links);
    if (is_kept && at < work.max_links) work.links[at] = link;
  }
}

// Make a group of every candidate of the list, because a lattice contains all of them. Call with all threads
// after a barrier; ends with one.
inline void one_group_each(Workspace& work) {
  const int count = work.counters->num_candidates, before = *work.groups.count;
  for (int i = thread(); i < count; i += threads()) {
    const Candidate& candidate = work.candidates[i];
    work.groups.entries[before + i] = Entry{candidate.key, NOTHING, candidate.cost, candidate.origin};
  }
  __syncthreads();
  if (thread() == 0) {
    work.counters->num_candidates = 0;
    *work.groups.count = before + count;
  }
  __syncthreads();
  work.reserved = 0;
}

// Whether the links of the frame fit. Call with all threads after a barrier.
inline bool has_capacity_for_links(StreamCounters& now, const Workspace& work) {
  now.needed = work.counters->num_links;
  return now.needed <= work.max_links;
}
