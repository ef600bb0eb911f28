// Step 3 of a frame: each group takes the arcs of its state. Twin of take_arcs in groups.py.
//
// Items of work (runs.cuh) of all groups are dealt out evenly: states have from one to many thousand arcs.
#pragma once

#include "search/word_graph/groups.cuh"
#include "search/word_graph/runs.cuh"

// The way by one arc. False if it is closed or hopeless.
inline bool take_arc(const Row& row, const Run& run, const Workspace& work, Way& way) {
  const Search& search = work.search;
  const Entry& group = work.groups.entries[run.group];
  const GraphArc arc = work.graph.arcs[run.arc];
  const float acoustic_cost = cost_of(row[arc.label], search);
  if (!(least_total(group.cost, arc.cost, acoustic_cost, search) <= work.cutoff())) return false;
  Boost boosting{0.0f, boost_of(group.key)};
  if (search.boosts && arc.word != 0) boosting = boosted(arc.word, boosting.state, work);
  const int label = arc.label + 1;
  const bool remembers = search.topology == COMPACT || search.topology == NORMAL;
  float cost = group.cost;
  Origin origin = group.origin;
  if (search.topology == NORMAL && label == last_label(origin, work)) {
    if (KEEPS_LINKS) return false;
    const Second& second = work.groups.seconds[run.group];
    if (second.best == NOTHING) return false;
    cost = second.cost;
    origin = second.origin;
  }
  origin.arc = run.arc;
  const float total = cost + search.lm_weight * arc.cost - boosting.bonus + acoustic_cost;
  way = Way{key_of(arc.target, boosting.state, remembers ? label : 0), total, origin, NO_PLACE};
  return true;
}

// All arcs of all groups, which are void after the next barrier. Call with all threads after a barrier.
inline void take_arcs(const Row& row, float least, Workspace& work) {
  gather(work);
  const int num_groups = work.groups.size();
  for (int first = 0; first < num_groups; first += threads()) {
    const int g = first + thread();
    const int total = work.states.start(g < num_groups ? items_of(work.groups.entries[g], least, work) : 0);
    for (int item = 0; item < total; item += threads()) {
      Run run{};
      if (item + thread() < total) {
        const int owner = work.states.owner(item + thread());
        const int own = item + thread() - work.states.begins[owner];
        run = run_of(row, work.groups.entries[first + owner], first + owner, own, work);
      }
      do {
        make_room(1, work);
        Way way{};
        const bool found = run.any() && take_arc(row, run, work, way);
        offer(found, way, work);
        if (run.any()) run.go_on(work.graph);
      } while (__syncthreads_or(run.any()));
    }
  }
  recombine(work.followers, true, work);
  if (!KEEPS_LINKS) work.groups.clear();
  __syncthreads();
  if (thread() == 0) *work.groups.count = 0;
}

// Steps 2 and 3. Where there is no room for another group, those that there are go first. Call with all
// threads after a barrier; the followers are complete then.
inline void move(const Row& row, int count, Workspace& work) {
  const float least = least_acoustic_cost(row, work);
  int first = 0, item = 0;
  bool all = false;
  while (!all) {
    all = join_groups(first, item, count, least, work);
    __syncthreads();
    take_arcs(row, least, work);
  }
}
