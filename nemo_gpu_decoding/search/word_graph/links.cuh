// Links between the tokens of two frames, for lattices: every candidate that was found, not just the
// best one with a key.
//
// While a frame is worked on, its links are candidates whose target is an entry of the next tokens;
// those that are not hopeless for the lattice stay when the frame is pruned. Their order depends on the
// order in which threads arrive, and the lattice that is made of them does not.
#pragma once

#include "search/word_graph/workspace.cuh"

// Whether what leads through a link costs too much above the best path to its target. A target's cost
// sinks while a frame is worked on, so that a link that is hopeless once remains so.
inline bool is_hopeless(float source_cost, float cost, float target_cost, const Search& search) {
  return source_cost + cost - target_cost > search.lattice_beam;
}

// Note `count` listed candidates as links of the frame. Counts on beyond the capacity. Call with all
// threads when the best listed candidate with every key is known.
inline void note_links(int count, const Table& next_tokens, Workspace& work) {
  for (int first = 0; first < count; first += threads()) {
    const int i = first + thread();
    bool wants = i < count && work.candidates[i].entry != NO_ENTRY;
    Link link{};
    if (wants) {
      const Candidate& candidate = work.candidates[i];
      const Origin& origin = candidate.origin;
      const float before = work.current[origin.source].cost;
      link = Link{
        origin.source, candidate.entry, origin.arc, origin.epsilon, candidate.cost - before, candidate.cost,
      };
      const float best = cost_of_rank(next_tokens.entries[candidate.entry].best);
      wants = !is_hopeless(before, link.cost, best, work.search);
    }
    const int at = warp_append(wants, &work.counters->num_links);
    if (wants && at < work.max_links) work.links[at] = link;
  }
}

// Make every listed candidate a group of its own: all of them count, not just the best one in a state.
// Call with all threads after a barrier; ends with one.
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

// Whether the links of the frame were within the capacity. Call with all threads after a barrier.
inline bool has_capacity_for_links(StreamCounters& now, const Workspace& work) {
  now.needed = work.counters->num_links;
  return now.needed <= work.max_links;
}
