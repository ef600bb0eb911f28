// One frame of the search without a large LM [CUDA-WFST]. Counterpart of frame.py.
#pragma once

#include "search/word_graph/arc_ranges.cuh"
#include "search/word_graph/token_groups.cuh"

// The candidate of an arc; false if the group cannot take the arc, or if it leads above the cutoff.
inline bool candidate_of(
  const Row& row, const ArcRange& range, const Workspace& work, Candidate& candidate
) {
  const Search& search = work.search;
  const Entry& group = work.groups.entries[range.group];
  const GraphArc arc = work.graph.arcs[range.arc];
  const float acoustic_cost = cost_of(row[arc.ilabel], search);
  if (!(least_total(group.cost, arc.cost, acoustic_cost, search) <= work.cutoff())) return false;
  Boost boosting{0.0f, boost_of(group.key)};
  if (search.boosts && arc.olabel != 0) boosting = boosted(arc.olabel, boosting.state, work);
  const int label = arc.ilabel + 1;
  const bool keeps_label = search.topology == COMPACT || search.topology == NORMAL;
  float cost = group.cost;
  Origin origin = group.origin;
  if (search.topology == NORMAL && label == last_label(origin, work)) {
    if (KEEPS_LINKS) return false;
    const Second& second = work.groups.seconds[range.group];
    if (second.best == NOTHING) return false;
    cost = second.cost;
    origin = second.origin;
  }
  origin.arc = range.arc;
  const float total = cost + search.lm_weight * arc.cost - boosting.bonus + acoustic_cost;
  const int64 key = key_of(arc.target, boosting.state, keeps_label ? label : 0);
  candidate = Candidate{key, total, origin, NO_ENTRY};
  return true;
}

// Step 3: expand the arcs of all groups, then empty the groups. The arcs are spread evenly over the threads,
// because states have between one and many thousand arcs. Call with all threads after a barrier; a barrier
// must follow.
inline void expand_groups(const Row& row, float least, Workspace& work) {
  recombine_groups(work);
  const int num_groups = work.groups.size();
  for (int first = 0; first < num_groups; first += threads()) {
    const int g = first + thread();
    const int items = g < num_groups ? num_items(work.groups.entries[g], least, work) : 0;
    const int total = work.arc_items.start(items);
    for (int item = 0; item < total; item += threads()) {
      ArcRange range{};
      if (item + thread() < total) {
        const int owner = work.arc_items.owner(item + thread());
        const int own = item + thread() - work.arc_items.begins[owner];
        range = arc_range_of(row, work.groups.entries[first + owner], first + owner, own, work);
      }
      do {
        reserve_candidates(1, work);
        Candidate candidate{};
        const bool found = range.any() && candidate_of(row, range, work, candidate);
        offer(found, candidate, work);
        if (range.any()) range.next(work.graph);
      } while (__syncthreads_or(range.any()));
    }
  }
  recombine(work.next_tokens, true, work);
  if (!KEEPS_LINKS) work.groups.clear();
  __syncthreads();
  if (thread() == 0) *work.groups.count = 0;
}

// Steps 2 and 3. If the groups are full, they are expanded before further tokens join groups. Call with all
// threads after a barrier; then the next tokens are complete.
inline void expand_arcs(const Row& row, int count, Workspace& work) {
  const float least = least_acoustic_cost(row, work);
  int first = 0, item = 0;
  bool all = false;
  while (!all) {
    all = epsilon_closure(first, item, count, least, work);
    __syncthreads();
    expand_groups(row, least, work);
  }
}

// Steps 1 to 3: all candidates below the cutoff become next tokens, as far as there is capacity for their
// keys. `best` is the cost of the best candidate if it is known, else the largest float. Call with all
// threads after a barrier.
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

// The tokens of the next frame; if they exceed the capacity, the cheapest of them. Call with all threads
// after a barrier.
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
