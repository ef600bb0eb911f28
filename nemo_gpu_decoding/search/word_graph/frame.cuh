// One frame of the search without composition [CUDA-WFST]. Counterpart of frame.py.
#pragma once

#include "search/word_graph/expand.cuh"

// All candidates that stay below the cutoff, as far as there is capacity for their keys. `best`: cost
// of the best one, if it is known, or the largest float. Call with all threads after a barrier.
inline int expand(const Row& row, int columns, int count, float best, Workspace& work) {
  Counters& counters = *work.counters;
  work.next_tokens.clear();
  __syncthreads();
  if (thread() == 0) {
    counters.best = ordered_key(best);
    counters.num_next_tokens = counters.full = counters.num_links = 0;
  }
  __syncthreads();
  if (work.search.topology != GRAPH) {
    offer_blanks_and_repeats(row, count, work);
    recombine(work.next_tokens, true, work);
  }
  float cutoff = work.cutoff();
  if (!choose_labels(row, columns, work)) return BAD_FRAME;
  if (counters.num_labels > 0) {
    tighten_cutoff(row, work);
    __syncthreads();
    if (work.cutoff() < cutoff) choose_labels(row, columns, work);
  }
  if (counters.num_labels > 0) expand_arcs(row, count, work);
  return work.next_tokens.size() > 0 ? DONE : NO_TOKEN;
}

// The candidates, or the cheapest if they are too many. Call with all threads after a barrier.
inline int expand_or_bisect(const Row& row, int columns, StreamCounters& now, Workspace& work) {
  enum { UNKNOWN_BEST, KNOWN_BEST, LIMITED };
  int phase = UNKNOWN_BEST;
  float best = largest_float();
  int64 low = 0, high = 0;
  work.last_rank = ANY_RANK;
  while (true) {
    const int status = expand(row, columns, now.tokens, best, work);
    if (status != DONE && phase != LIMITED) return status;
    const bool full = work.counters->full;
    if (phase != LIMITED) {
      if (!full) return DONE;
      best = work.best();
      if (phase++ == UNKNOWN_BEST) continue;
      now.overflowed++;
      low = rank_of(best, 0);
      high = rank_of(best + work.search.beam, 0) + (1ll << HASH_BITS);
    } else if (full) {
      high = work.last_rank;
    } else {
      if (high - low <= 1 || 2 * work.next_tokens.size() >= work.next_tokens.capacity) return status;
      low = work.last_rank;
    }
    if (low >= high) return DONE;
    work.last_rank = low + (high - low) / 2;
  }
}
