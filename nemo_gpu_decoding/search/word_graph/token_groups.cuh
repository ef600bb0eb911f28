// Epsilon closure: the tokens in one graph state, their own or one that a closure arc leads to, form a group.
// Counterpart of token_groups.py.
//
// An item of work is a token in its own state, or a token with one closure arc.
#pragma once

#include "search/word_graph/candidates.cuh"

// Move the list of candidates into groups. Call with all threads after a barrier; ends with one.
inline void recombine_groups(Workspace& work) {
  if (KEEPS_LINKS) one_group_each(work);
  else recombine(work.groups, false, work);
}

// Whether the list and the groups have capacity for one candidate of each thread. Call with all threads.
inline bool reserve_groups(Workspace& work) {
  Table& groups = work.groups;
  bool listed = work.reserve(1);
  if (listed && *groups.count + work.reserved <= groups.capacity) return true;
  __syncthreads();
  recombine_groups(work);
  return *groups.count + threads() <= groups.capacity && work.reserve(1);
}

// The group that token i joins in its own state (e is NONE) or by closure arc e. False if all its arcs lead above
// the cutoff.
inline bool join(int i, int e, float least, const Workspace& work, Candidate& candidate) {
  const Search& search = work.search;
  const Token token = work.current[i];
  int target = state_of(token.key), boost = boost_of(token.key);
  float cost = token.cost, least_arc;
  if (e == NONE) {
    least_arc = work.graph.states[target].least_cost;
  } else {
    const Epsilon closure = work.graph.epsilons[e];
    cost += search.lm_weight * closure.cost;
    target = closure.target;
    least_arc = closure.least_cost;
    if (closure.olabel != 0 && search.boosts) {
      if (!(least_total(cost - search.most_bonus, least_arc, least, search) <= work.cutoff())) {
        return false;
      }
      const Boost boosting = boosted(closure.olabel, boost, work);
      cost -= boosting.bonus;
      boost = boosting.state;
    }
  }
  candidate = Candidate{key_of(target, boost, 0), cost, {0, i, e}, NO_ENTRY};
  return least_total(cost, least_arc, least, search) <= work.cutoff();
}

// Step 2: tokens join groups, from item `item` of the tokens `first` and later, until the groups are full.
// Updates both; true if all tokens have joined. Call with all threads after a barrier; a barrier must follow.
inline bool epsilon_closure(int& first, int& item, int count, float least, Workspace& work) {
  const Graph& graph = work.graph;
  for (; first < count; first += threads(), item = 0) {
    int items = 0;
    if (first + thread() < count) {
      const GraphState state = graph.states[state_of(work.current[first + thread()].key)];
      items = 1 + state.epsilon_end - state.epsilon_begin;
    }
    const int total = work.closure_items.start(items);
    for (; item < total; item += threads()) {
      if (!reserve_groups(work)) return false;
      const int own = item + thread();
      Candidate candidate{};
      bool joins = false;
      if (own < total) {
        const int owner = work.closure_items.owner(own), i = first + owner;
        const int begin = graph.states[state_of(work.current[i].key)].epsilon_begin;
        const int e = own - work.closure_items.begins[owner] - 1;
        joins = join(i, e < 0 ? NONE : begin + e, least, work, candidate);
      }
      work.append(joins, candidate);
    }
  }
  return true;
}
