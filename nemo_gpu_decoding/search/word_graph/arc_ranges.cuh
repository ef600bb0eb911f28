// Arc ranges: the arcs that a token group tries.
//
// An item of work is one arc of a small state, or one label of a large state; binary search finds the arcs
// with that label. `Group` has a key, and the cost of its best token.
#pragma once

#include "search/word_graph/labels.cuh"

constexpr int SMALL_STATE = 8;  // all arcs of a state with at most this many are tried

inline bool tries_all(const GraphState& state, int num_labels) {
  int arcs = state.arc_end - state.arc_begin;
  return arcs <= SMALL_STATE || arcs <= 4 * num_labels;
}

// The number of items of a group.
template <class Group>
inline int num_items(const Group& group, float least, const Workspace& work) {
  const GraphState state = work.graph.states[state_of(group.key)];
  if (least_total(group.cost, state.least_cost, least, work.search) > work.cutoff()) return 0;
  const int num_labels = work.counters->num_labels;
  return tries_all(state, num_labels) ? state.arc_end - state.arc_begin : num_labels;
}

// Arcs of one thread, one after the other: those with one label from `arc` on.
struct ArcRange {
  int group;
  int arc;
  int end;
  int label;

  bool any() const { return arc < end; }

  void next(const Graph& graph) {
    arc++;
    if (arc < end && graph.arcs[arc].ilabel != label) end = arc;
  }
};

// The arcs of an item of group g.
template <class Group>
inline ArcRange arc_range_of(
  const Row& row, const Group& group, int g, int item, const Workspace& work
) {
  const GraphState state = work.graph.states[state_of(group.key)];
  if (tries_all(state, work.counters->num_labels)) {
    return {g, state.arc_begin + item, state.arc_begin + item + 1, NONE};
  }
  const int label = work.labels[item];
  const float acoustic_cost = cost_of(row[label], work.search);
  if (least_total(group.cost, state.least_cost, acoustic_cost, work.search) > work.cutoff()) {
    return {g, 0, 0, NONE};
  }
  const int arc = first_arc(work.graph, state, label);
  const bool found = arc < state.arc_end && work.graph.arcs[arc].ilabel == label;
  return {g, arc, found ? state.arc_end : arc, label};
}
