// Step 3 of a frame: each group takes the arcs of its state. Twin of take_arcs in groups.py.
//
// An item of work is one arc of a small state, or one label of a large one, whose arcs are then found by
// binary search. Items of all groups are dealt out evenly: states have from one to many thousand arcs.
#pragma once

#include "search/cuda_wfst/groups.cuh"
#include "search/cuda_wfst/labels.cuh"

constexpr int SMALL_STATE = 8;  // arcs; a state with no more is walked through whatever the labels

inline bool walks(const GraphState& state, int num_labels) {
  int arcs = state.arc_end - state.arc_begin;
  return arcs <= SMALL_STATE || arcs <= 4 * num_labels;
}

// How many items a group has.
inline int items_of(const Entry& group, float least, const Workspace& work) {
  const GraphState state = work.graph.states[state_of(group.key)];
  if (least_total(group.cost, state.least_cost, least, work.search) > work.cutoff()) return 0;
  const int num_labels = work.tally->num_labels;
  return walks(state, num_labels) ? state.arc_end - state.arc_begin : num_labels;
}

// Arcs that one thread takes one after the other, those with one label from `arc` on.
struct Run {
  int group;
  int arc;
  int end;
  int label;

  bool any() const { return arc < end; }

  void go_on(const Graph& graph) {
    arc++;
    if (arc < end && graph.arcs[arc].label != label) end = arc;
  }
};

inline Run run_of(const Row& row, int g, int item, const Workspace& work) {
  const Entry& group = work.groups.entries[g];
  const GraphState state = work.graph.states[state_of(group.key)];
  if (walks(state, work.tally->num_labels)) {
    return {g, state.arc_begin + item, state.arc_begin + item + 1, NONE};
  }
  const int label = work.labels[item];
  const float acoustic_cost = cost_of(row[label], work.search);
  if (least_total(group.cost, state.least_cost, acoustic_cost, work.search) > work.cutoff()) {
    return {g, 0, 0, NONE};
  }
  const int arc = first_arc(work.graph, state, label);
  const bool found = arc < state.arc_end && work.graph.arcs[arc].label == label;
  return {g, arc, found ? state.arc_end : arc, label};
}

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
  recombine(work.groups, false, work);
  const int num_groups = work.groups.size();
  for (int first = 0; first < num_groups; first += threads()) {
    const int g = first + thread();
    const int total = work.states.start(g < num_groups ? items_of(work.groups.entries[g], least, work) : 0);
    for (int item = 0; item < total; item += threads()) {
      Run run{};
      if (item + thread() < total) {
        const int owner = work.states.owner(item + thread());
        run = run_of(row, first + owner, item + thread() - work.states.begins[owner], work);
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
  work.groups.clear();
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
