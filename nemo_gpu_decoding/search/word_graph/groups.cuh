// Step 2 of a frame: tokens of a graph state form a group, also by way of epsilon records. Twin of
// join_groups in groups.py.
//
// An item of work is a token in its own state, or with one epsilon record.
#pragma once

#include "search/word_graph/ways.cuh"

// Make groups of the listed ways. Call with all threads after a barrier; ends with one.
inline void gather(Workspace& work) {
  if (KEEPS_LINKS) split_groups(work);
  else recombine(work.groups, false, work);
}

// Whether the list and the groups have room for what each thread may find. Call with all threads.
inline bool has_room_for_groups(Workspace& work) {
  Table& groups = work.groups;
  bool listed = work.reserve(1);
  if (listed && *groups.count + work.reserved <= groups.capacity) return true;
  __syncthreads();
  gather(work);
  return *groups.count + threads() <= groups.capacity && work.reserve(1);
}

// The group that token i joins in its own state (e: NONE) or by its epsilon record e. False if nothing
// can come of it.
inline bool join(int i, int e, float least, const Workspace& work, Way& way) {
  const Search& search = work.search;
  const Token token = work.current[i];
  int target = state_of(token.key), boost = boost_of(token.key);
  float cost = token.cost, least_arc;
  if (e == NONE) {
    least_arc = work.graph.states[target].least_cost;
  } else {
    const Epsilon record = work.graph.epsilons[e];
    cost += search.lm_weight * record.cost;
    target = record.target;
    least_arc = record.least_cost;
    if (record.word != 0 && search.boosts) {
      if (!(least_total(cost - search.most_bonus, least_arc, least, search) <= work.cutoff())) {
        return false;
      }
      const Boost boosting = boosted(record.word, boost, work);
      cost -= boosting.bonus;
      boost = boosting.state;
    }
  }
  way = Way{key_of(target, boost, 0), cost, {0, i, e}, NO_PLACE};
  return least_total(cost, least_arc, least, search) <= work.cutoff();
}

// Let tokens join groups, from item number `item` of the tokens from `first` on, for as long as there is
// room. Moves both on; true if all have joined. Call with all threads after a barrier; a barrier must
// follow.
inline bool join_groups(int& first, int& item, int count, float least, Workspace& work) {
  const Graph& graph = work.graph;
  for (; first < count; first += threads(), item = 0) {
    int items = 0;
    if (first + thread() < count) {
      const GraphState state = graph.states[state_of(work.current[first + thread()].key)];
      items = 1 + state.epsilon_end - state.epsilon_begin;
    }
    const int total = work.tokens.start(items);
    for (; item < total; item += threads()) {
      if (!has_room_for_groups(work)) return false;
      const int own = item + thread();
      Way way{};
      bool wants = false;
      if (own < total) {
        const int owner = work.tokens.owner(own), i = first + owner;
        const int begin = graph.states[state_of(work.current[i].key)].epsilon_begin;
        const int e = own - work.tokens.begins[owner] - 1;
        wants = join(i, e < 0 ? NONE : begin + e, least, work, way);
      }
      work.append(wants, way);
    }
  }
  return true;
}
