// One frame of the search with a large LM, composition "lazy". Counterpart of frame.py with an LM.
#pragma once

#include "search/word_graph/large_lm/queries.cuh"
#include "search/word_graph/large_lm/tighten_cutoff.cuh"

// Reset the tokens and counters of the next frame. Call with all threads after a barrier; ends with one.
inline void begin_frame(LmWorkspace& work) {
  work.next_tokens.clear();
  __syncthreads();
  if (thread() == 0) {
    Counters& counters = *work.counters;
    counters.best = ordered_key(largest_float());
    counters.num_next_tokens = counters.full = counters.num_links = 0;
    const int num_cached = work.lm_counters->num_cached;
    *work.lm_counters = LmCounters{};
    work.lm_counters->num_cached = num_cached;
    work.lm_counters->tightened_by.source = NONE;
    work.shared->current = work.current;
    if (WIDENS) work.shared->search.beam = work.search.beam;
  }
  __syncthreads();
}

// choose_labels, not inlined.
__noinline__ bool list_labels(Row row, int columns, LmWorkspace* shared) {
  return choose_labels(row, columns, *shared);
}

// Expand all emitting arcs. Call with all threads after a barrier; ends with one.
inline int expand_arcs(const Row& row, int count, LmWorkspace& work) {
  const float least = least_acoustic_cost(row, work);
  if (!epsilon_closure(row, count, least, work.shared)) return GROUPS_FULL;
  if (!list_group_arcs(row, least, work.shared)) return GROUPS_FULL;
  sort_contexts(work.buffers, work.lm_counters);
  expand_without_lm(row, work);
  expand_with_lm(row, work);
  return DONE;
}

// Offer and recombine all candidates below the cutoff, up to the capacity for their keys. Call with all
// threads after a barrier.
inline int expand(const Row& row, int columns, int count, LmWorkspace& work) {
  begin_frame(work);
  if (work.search.topology != GRAPH) {
    offer_blanks_and_repeats(row, count, work);
    recombine(work.next_tokens, true, work);
  }
  const float cutoff = work.cutoff();
  if (!list_labels(row, columns, work.shared)) return BAD_FRAME;
  if (work.counters->num_labels > 0) {
    tighten_cutoff(row, count, work);
    if (work.cutoff() < cutoff) list_labels(row, columns, work.shared);
  }
  if (work.counters->num_labels > 0) {
    const int status = expand_arcs(row, count, work);
    if (status != DONE) return status;
  }
  recombine(work.next_tokens, true, work);
  return work.next_tokens.size() > 0 ? DONE : NO_TOKEN;
}

// Expand a frame. If the keys exceed the capacity, bisect for the rank up to which the cheapest candidates fit.
// Call with all threads after a barrier.
inline int bisect_last_rank(
  const Row& row, int columns, int count, RankLimits& limits, bool& overflowed, LmWorkspace& work
) {
  enum { ALL, BELOW_CUTOFF, BELOW_RANK };
  int kept = ALL;
  work.last_rank = ANY_RANK;
  while (true) {
    const int status = expand(row, columns, count, work);
    if (status != DONE && (status != NO_TOKEN || kept != BELOW_RANK)) return status;
    const bool full = work.counters->full;
    if (kept == ALL) {
      if (!full) return DONE;
      kept = BELOW_CUTOFF;
      work.last_rank = rank_of(work.cutoff(), {0, 0}) + (1ll << HASH_BITS);
      continue;
    }
    if (kept == BELOW_CUTOFF && !full) {
      work.last_rank = ANY_RANK;  // no candidate was left out
      return DONE;
    }
    const bool half_used = 2 * work.next_tokens.size() >= work.next_tokens.capacity;
    if (!full && (half_used || limits.high - limits.low <= 1)) return status;
    __syncthreads();
    if (thread() == 0) {
      if (kept == BELOW_CUTOFF) limits.low = rank_of(work.best(), {0, 0});
      if (full) limits.high = work.last_rank;
      else limits.low = work.last_rank;
    }
    __syncthreads();
    kept = BELOW_RANK;
    overflowed = true;
    if (limits.low >= limits.high) return status;
    work.last_rank = limits.low + (limits.high - limits.low) / 2;
  }
}

// bisect_last_rank, with `now` in shared memory during the expansion to save registers.
inline int expand_or_bisect(
  const Row& row, int columns, StreamCounters& now, LmShared& shared, LmWorkspace& work
) {
  if (thread() == 0) shared.before = now;
  bool overflowed = false;
  const int status = bisect_last_rank(row, columns, now.tokens, shared.limits, overflowed, work);
  now = shared.before;
  now.overflowed += overflowed;
  return status;
}
