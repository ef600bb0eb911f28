// Deferred LM queries. An arc with a word, or a context with a pending word, queries the LMs if it is not
// above the cutoff by the small LM. Then the context takes the arc at its true cost.
#pragma once

#include "search/word_graph/large_lm/group_arcs.cuh"
#include "search/word_graph/large_lm/query_cache.cuh"

// Answer all listed queries, and offer their candidates. Call with all threads after a barrier; ends with one.
inline void expand_queried(const Row& row, LmWorkspace& work) {
  LmCounters& lm_counters = *work.lm_counters;
  const int count = lm_counters.num_queries;
  answer_queries(work.buffers, work.lm_counters);  // for pending words
  for (int i = thread(); i < count; i += threads()) {
    LmQuery& query = work.buffers->queries[i];
    query.olabel = scored_label(work.graph.arcs[query.arc].olabel, work);
  }
  answer_queries(work.buffers, work.lm_counters);
  for (int first = 0; first < count; first += threads()) {
    reserve_for_first(work);
    LmQuery query{};
    Step step{};
    int m = NONE;
    if (first + thread() < count) {
      query = work.buffers->queries[first + thread()];
      const int64 key = work.buffers->group_tokens[work.buffers->contexts[query.context].best].key;
      step = step_of(row, query.arc, key, work);
      m = first_token_of(step, query.context, work);
    }
    offer_all(step, query.arc, m, query.lm, query.difference, work);
  }
  if (thread() == 0) lm_counters.num_queries = 0;
  __syncthreads();
}

// The query of a context at an arc; false if it needs none. Counts its look-ups; a pending word counts once.
inline bool query_of(
  const GroupArc& group_arc, int index, LmWorkspace& work, LmQuery& query, int& look_ups
) {
  const int h = context_at(group_arc, index, work);
  const GroupToken& best = work.buffers->group_tokens[work.buffers->contexts[h].best];
  const int word = work.graph.arcs[group_arc.arc].olabel, pending = scored_label(best.olabel, work);
  if (best.olabel == 0 && word == 0) return false;
  look_ups += scored_label(word, work) != 0;
  if (pending != 0) look_ups += atomicExch(&work.buffers->contexts[h].queried, 1) == 0;
  query = LmQuery{best.lm, pending, NO_ENTRY, 0.0f, group_arc.arc, h, 0};
  return true;
}

// List queries up to the capacity, from item `item` of the group arcs from `first` on. Advances both; true
// once all queries are listed. Call with all threads; a barrier must follow.
inline bool list_queries(
  const Row& row, float cutoff, int& first, int& item, int& look_ups, LmWorkspace& work
) {
  const LmBuffers& buffers = *work.buffers;
  const int num_group_arcs = work.lm_counters->num_group_arcs;
  int listed = 0;  // upper bound of the listed queries, the same in all threads
  for (; first < num_group_arcs; first += threads(), item = 0) {
    const int total =
      work.closure_items.start(num_within_cutoff(row, first + thread(), true, cutoff, work.shared));
    for (; item < total; item += threads()) {
      listed += threads();
      if (listed > buffers.capacity.queries) return false;
      LmQuery query{};
      bool wants = false;
      if (item + thread() < total) {
        const int owner = work.closure_items.owner(item + thread());
        const int index = item + thread() - work.closure_items.begins[owner];
        wants = query_of(buffers.group_arcs[first + owner], index, work, query, look_ups);
      }
      const int at = warp_append(wants, &work.lm_counters->num_queries);
      if (wants) buffers.queries[at] = query;
    }
  }
  return true;
}

// Make all deferred LM queries, and take their arcs. Call with all threads after a barrier; ends with one.
inline void expand_with_lm(const Row& row, LmWorkspace& work) {
  const float cutoff = work.cutoff();  // fixed before the first answer
  int first = 0, item = 0, look_ups = 0;
  bool all = false;
  while (!all) {
    all = list_queries(row, cutoff, first, item, look_ups, work);
    __syncthreads();
    expand_queried(row, work);
  }
  count_look_ups(look_ups, *work.lm_counters);
}
