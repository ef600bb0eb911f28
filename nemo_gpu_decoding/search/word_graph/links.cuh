// Links between the tokens of two frames, for lattices: every way that was found, not just the best one
// to a key. Twin of what recombine in ways.py and _keep_links in survivors.py do for them.
//
// While a frame is worked on, its links are ways whose target is an entry of the followers; those that
// are not hopeless for the lattice stay when the frame is committed. Their order depends on the order in
// which threads arrive, and the lattice that is made of them does not.
#pragma once

#include "search/word_graph/tables.cuh"

// Whether what leads through a link costs too much above the best way to its target. A target's cost
// sinks while a frame is worked on, so that a link that is hopeless once remains so.
inline bool is_hopeless(float source_cost, float cost, float target_cost, const Search& search) {
  return source_cost + cost - target_cost > search.lattice_beam;
}

// Note `count` listed ways as links of the frame. Counts on where there is no room. Call with all threads
// when the best listed way to every key is known.
inline void note_links(int count, const Table& followers, Workspace& work) {
  for (int first = 0; first < count; first += threads()) {
    const int i = first + thread();
    bool wants = i < count && work.ways[i].place != NO_PLACE;
    Link link{};
    if (wants) {
      const Way& way = work.ways[i];
      const float before = work.current[way.origin.source].cost;
      link = Link{
        way.origin.source, way.place, way.origin.arc, way.origin.epsilon, way.cost - before, way.cost,
      };
      const float best = cost_of_rank(followers.entries[way.place].best);
      wants = !is_hopeless(before, link.cost, best, work.search);
    }
    const int at = warp_append(wants, &work.tally->num_links);
    if (wants && at < work.max_links) work.links[at] = link;
  }
}

// Make every listed way a group of its own: all of them count, not just the best one to a state. Call
// with all threads after a barrier; ends with one.
inline void split_groups(Workspace& work) {
  const int count = work.tally->num_ways, before = *work.groups.count;
  for (int i = thread(); i < count; i += threads()) {
    const Way& way = work.ways[i];
    work.groups.entries[before + i] = Entry{way.key, NOTHING, way.cost, way.origin};
  }
  __syncthreads();
  if (thread() == 0) {
    work.tally->num_ways = 0;
    *work.groups.count = before + count;
  }
  __syncthreads();
  work.reserved = 0;
}

// Whether all links of the frame have found room. Call with all threads after a barrier.
inline bool has_room_for_links(Progress& now, const Workspace& work) {
  now.wanted = work.tally->num_links;
  return now.wanted <= work.max_links;
}
