// LM query cache. A query is looked up once in a frame, for any number of contexts. It is not looked up if
// the cache still has its answer from an earlier frame.
#pragma once

#include "search/word_graph/large_lm/workspace.cuh"

inline uint64 hash_of_query(int olabel, int64 lm) { return hash_of(LmKey{olabel, lm}); }

// The slot of the answer to query i, or ~slot if this query must look it up.
inline int find_or_claim(int i, const LmBuffers& buffers) {
  const int olabel = buffers.queries[i].olabel;
  const int64 lm = buffers.queries[i].lm;
  for (int at = (int)(hash_of_query(olabel, lm) >> 24) & (buffers.capacity.cache_slots - 1);;
       at = (at + 1) & (buffers.capacity.cache_slots - 1)) {
    int seen = __ldcg(&buffers.cache_slots[at]);
    if (seen == 0) seen = atomicCAS(&buffers.cache_slots[at], 0, ~i);
    if (seen == 0) return ~at;
    if (seen > 0) {
      const CachedScore& answer = buffers.cached_scores[seen - 1];
      if (answer.lm == lm && answer.olabel == olabel) return at;
    } else {
      const LmQuery& other = buffers.queries[~seen];
      if (other.lm == lm && other.olabel == olabel) return at;
    }
  }
}

// Reserve capacity for `count` more answers; empties the cache if it is too full. Call with all threads
// after a barrier; ends with one.
inline void reserve_answers(int count, const LmBuffers& buffers, LmCounters& lm_counters) {
  const bool full = lm_counters.num_cached + count > buffers.capacity.cached_scores;
  __syncthreads();
  if (full) {
    for (int at = thread(); at < buffers.capacity.cache_slots; at += threads()) buffers.cache_slots[at] = 0;
    if (thread() == 0) lm_counters.num_cached = 0;
  }
  if (thread() == 0) lm_counters.num_unanswered = 0;
  __syncthreads();
}

// Look up one query. Call with one thread. Not inlined, to save registers of the caller.
__noinline__ void look_up(LmQuery* query, const LmBuffers* buffers, LmCounters* lm_counters) {
  LookupCounters counters{};
  const LMStep step = cost_of_label(query->olabel, query->lm, buffers->graph, buffers->lms, counters);
  const int at = ~query->slot, a = atomicAdd(&lm_counters->num_cached, 1);
  buffers->cached_scores[a] = CachedScore{query->lm, step.target, query->olabel, step.cost};
  buffers->cache_slots[at] = a + 1;
  query->slot = at;
  if (counters.hits) atomicAdd(&lm_counters->cache_hits, counters.hits);
  if (counters.misses) atomicAdd(&lm_counters->cache_misses, counters.misses);
  if (counters.sectors) atomicAdd(&lm_counters->cache_sectors, counters.sectors);
}

inline void count_look_ups(int look_ups, LmCounters& lm_counters) {
  if (look_ups == 0) return;
  atomicAdd(&lm_counters.look_ups, look_ups);
  atomicAdd(&lm_counters.answered, look_ups);  // answer_queries subtracts the queries that it looks up
}

// Answer all listed queries: adds to their LM score differences, and advances their LM contexts. Call with
// all threads, after a barrier if queries have been listed. A thread may then change queries thread(),
// thread() + threads() and so on. A barrier must follow before it accesses other queries.
__noinline__ void answer_queries(const LmBuffers* shared_buffers, LmCounters* shared_counters) {
  const LmBuffers& buffers = *shared_buffers;
  LmCounters& lm_counters = *shared_counters;
  const int count = lm_counters.num_queries;
  reserve_answers(count, buffers, lm_counters);
  for (int first = 0; first < count; first += threads()) {
    const int i = first + thread();
    bool claimed = false;
    if (i < count && buffers.queries[i].olabel != 0) {
      const int slot = find_or_claim(i, buffers);
      buffers.queries[i].slot = slot;
      claimed = slot < 0;
    }
    const int at = warp_append(claimed, &lm_counters.num_unanswered);
    if (claimed) buffers.unanswered[at] = i;
  }
  __syncthreads();
  for (int n = thread(); n < lm_counters.num_unanswered; n += threads()) {
    look_up(&buffers.queries[buffers.unanswered[n]], &buffers, &lm_counters);
  }
  __syncthreads();
  for (int i = thread(); i < count; i += threads()) {
    LmQuery& query = buffers.queries[i];
    if (query.olabel == 0) continue;
    const CachedScore answer = buffers.cached_scores[buffers.cache_slots[query.slot] - 1];
    query.difference += weighted(answer.cost, buffers.lms);
    query.lm = answer.lm_after;
  }
  if (thread() == 0) lm_counters.answered -= lm_counters.num_unanswered;
}
