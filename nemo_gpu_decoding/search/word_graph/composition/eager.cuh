// Eager composition: each token takes each arc, and asks the LMs before anything is pruned [PagedBigLM]. Twin of
// eager.py, the baseline of benchmarks.
//
// Every token, in its own state or after an epsilon record, is a history of its own, and every arc of it an
// errand.
#pragma once

#include "search/word_graph/composition/errands.cuh"

// Make a history of each member. Call with all threads after a barrier; one must follow.
inline void separate_histories(const Space& work) {
  int look_ups = 0;
  for (int m = thread(); m < work.ledger->num_members; m += threads()) {
    work.rooms->histories[m] = History{m, NONE, m, NONE, 0, NONE, NONE};
    look_ups += work.rooms->members[m].word != 0;
  }
  count_look_ups(look_ups, *work.ledger);
}

// The errand of a member at an arc; false if the arc is closed to it.
inline bool eager_errand(int m, int arc, const Space& work, Errand& errand) {
  const Member& member = work.rooms->members[m];
  errand = Errand{member.lm, member.word, NO_PLACE, 0.0f, arc, m, 0};
  const int label = work.graph.arcs[arc].label;
  return !(work.search.topology == NORMAL && label + 1 == last_label(member, work));
}

// List all arcs of all members as errands, from item number `item` of the members from `first` on, for as
// long as there is room. Moves both on; true if all are listed. Call with all threads; a barrier must
// follow.
inline bool list_all_arcs(int& first, int& item, Space& work) {
  const Member* members = work.rooms->members;
  const int num_members = work.ledger->num_members;
  int listed = 0;  // at most so many are, the same in all threads
  for (; first < num_members; first += threads(), item = 0) {
    int arcs = 0;
    if (first + thread() < num_members) {
      const GraphState state = work.graph.states[state_of(members[first + thread()].key)];
      arcs = state.arc_end - state.arc_begin;
    }
    const int total = work.tokens.start(arcs);
    for (; item < total; item += threads()) {
      listed += threads();
      if (listed > work.rooms->max_errands) return false;
      Errand errand{};
      bool wants = false;
      if (item + thread() < total) {
        const int owner = work.tokens.owner(item + thread());
        const int begin = work.graph.states[state_of(members[first + owner].key)].arc_begin;
        const int arc = begin + item + thread() - work.tokens.begins[owner];
        wants = eager_errand(first + owner, arc, work, errand);
        atomicAdd(&work.ledger->arc_visits, 1);
        if (wants) count_look_ups(work.graph.arcs[arc].word != 0, *work.ledger);
      }
      const int at = warp_append(wants, &work.ledger->num_errands);
      if (wants) work.rooms->errands[at] = errand;
    }
  }
  return true;
}

// All arcs of all tokens. False if there is no room for them. Call with all threads after a barrier; ends
// with one.
inline bool take_all_arcs(const Row& row, int count, Space& work) {
  if (!list_members(count, 0.0f, work)) return false;
  separate_histories(work);
  if (thread() == 0) work.ledger->prolonged = count;
  __syncthreads();
  int first = 0, item = 0;
  bool all = false;
  while (!all) {
    all = list_all_arcs(first, item, work);
    __syncthreads();
    run_listed(row, work);
  }
  return true;
}
