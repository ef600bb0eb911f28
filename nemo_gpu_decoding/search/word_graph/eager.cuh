// Eager composition: each token is expanded by each arc, and the LMs are queried before anything is
// pruned [PagedBigLM]. Counterpart of eager.py, the baseline of benchmarks.
//
// Every token, in its own state or after a closure arc, is a context of its own, and every arc of it a
// query.
#pragma once

#include "search/word_graph/lm_queries.cuh"

// Make a context of each group token. Call with all threads after a barrier; one must follow.
inline void separate_contexts(const LmWorkspace& work) {
  int look_ups = 0;
  for (int m = thread(); m < work.lm_counters->num_group_tokens; m += threads()) {
    work.buffers->contexts[m] = LmContext{m, NONE, m, NONE, 0, NONE, NONE};
    look_ups += work.buffers->group_tokens[m].olabel != 0;
  }
  count_look_ups(look_ups, *work.lm_counters);
}

// The query of a token at an arc; false if the arc is closed to it.
inline bool eager_query(int m, int arc, const LmWorkspace& work, LmQuery& query) {
  const GroupToken& token = work.buffers->group_tokens[m];
  query = LmQuery{token.lm, token.olabel, NO_ENTRY, 0.0f, arc, m, 0};
  const int label = work.graph.arcs[arc].ilabel;
  return !(work.search.topology == NORMAL && label + 1 == last_label(token, work));
}

// List all arcs of all group tokens as queries, from item number `item` of the tokens from `first` on,
// as far as there is capacity. Moves both on; true if all are listed. Call with all threads; a barrier
// must follow.
inline bool query_all_arcs(int& first, int& item, LmWorkspace& work) {
  const GroupToken* group_tokens = work.buffers->group_tokens;
  const int num_group_tokens = work.lm_counters->num_group_tokens;
  int listed = 0;  // at most so many are, the same in all threads
  for (; first < num_group_tokens; first += threads(), item = 0) {
    int arcs = 0;
    if (first + thread() < num_group_tokens) {
      const GraphState state = work.graph.states[state_of(group_tokens[first + thread()].key)];
      arcs = state.arc_end - state.arc_begin;
    }
    const int total = work.closure_items.start(arcs);
    for (; item < total; item += threads()) {
      listed += threads();
      if (listed > work.buffers->capacity.queries) return false;
      LmQuery query{};
      bool wants = false;
      if (item + thread() < total) {
        const int owner = work.closure_items.owner(item + thread());
        const int begin = work.graph.states[state_of(group_tokens[first + owner].key)].arc_begin;
        const int arc = begin + item + thread() - work.closure_items.begins[owner];
        wants = eager_query(first + owner, arc, work, query);
        atomicAdd(&work.lm_counters->arc_visits, 1);
        if (wants) count_look_ups(work.graph.arcs[arc].olabel != 0, *work.lm_counters);
      }
      const int at = warp_append(wants, &work.lm_counters->num_queries);
      if (wants) work.buffers->queries[at] = query;
    }
  }
  return true;
}

// All arcs of all tokens. False if there is no capacity for them. Call with all threads after a
// barrier; ends with one.
inline bool expand_eagerly(const Row& row, int count, LmWorkspace& work) {
  if (!list_group_tokens(count, 0.0f, work)) return false;
  separate_contexts(work);
  if (thread() == 0) work.lm_counters->expanded = count;
  __syncthreads();
  int first = 0, item = 0;
  bool all = false;
  while (!all) {
    all = query_all_arcs(first, item, work);
    __syncthreads();
    expand_queried(row, work);
  }
  return true;
}
