// Candidates for tokens of the next frame: costs and recombination. Counterpart of candidates.py.
#pragma once

#include "search/word_graph/links.cuh"

inline float cost_of(float log_prob, const Search& search) { return -(search.acoustic_scale * log_prob); }

// Lower bound of the total cost of an arc: with the largest bonus, summed in the same order as the exact cost.
inline float least_total(float cost, float arc_cost, float acoustic_cost, const Search& search) {
  return cost + search.lm_weight * arc_cost - search.most_bonus + acoustic_cost;
}

struct Boost {
  float bonus;  // weighted
  int state;  // of the boosting automaton, after the word
};

// Number of words of an output label.
inline int count_words(int olabel, const Graph& graph) {
  int count = 1;
  for (; olabel >= graph.num_words; count++) olabel = graph.word_sequences[2 * (olabel - graph.num_words)];
  return count;
}

// The word of an output label before its last n words.
inline int word_from_end(int olabel, int n, const Graph& graph) {
  for (; n > 0; n--) olabel = graph.word_sequences[2 * (olabel - graph.num_words)];
  return olabel < graph.num_words ? olabel : graph.word_sequences[2 * (olabel - graph.num_words) + 1];
}

constexpr bool SHORT_LISTS = true;  // boosting trees are small: see first_not_below

// Bonus of an output label, and the boosting state after it.
inline Boost boosted(int olabel, int state, const Workspace& work) {
  Boost boost{0.0f, state};
  if (olabel == 0 || !work.search.boosts) return boost;
  const Graph& graph = work.graph;
  for (int n = count_words(olabel, graph) - 1; n >= 0; n--) {
    const int word = word_from_end(olabel, n, graph);
    Reading reading = lookup<SHORT_LISTS>(work.boosting, boost.state, word, negative_infinity());
    boost.bonus += work.search.boosting_weight * reading.weight;
    boost.state = reading.state;
  }
  return boost;
}

// Cost of a candidate before its arc: the cost of its source plus the cost of the closure arc.
inline float cost_before(const Origin& origin, const Workspace& work) {
  const Token& token = work.current[origin.source];
  if (origin.epsilon == NONE) return token.cost;
  const Epsilon closure = work.graph.epsilons[origin.epsilon];
  float bonus = boosted(closure.olabel, boost_of(token.key), work).bonus;
  return token.cost + work.search.lm_weight * closure.cost - bonus;
}

// Whether a is the better one of two candidates with equal keys and costs. Ties are broken by arc, cost before
// the arc, key of the source, closure arc.
inline bool breaks_tie(const Origin& a, const Origin& b, const Workspace& work) {
  if (a.arc != b.arc) return a.arc < b.arc;
  float own = cost_before(a, work), other = cost_before(b, work);
  if (own != other) return own < other;
  Key key = work.current[a.source].key, other_key = work.current[b.source].key;
  return key != other_key ? key < other_key : a.epsilon < b.epsilon;
}

inline int last_label(const Origin& origin, const Workspace& work) {
  return label_of(work.current[origin.source].key);
}

// The origin of the candidate that `best` refers to, for an entry or its second.
inline Origin origin_of(
  Rank best, const Origin& stored, const Entry& entry, const Table& table, const Workspace& work
) {
  uint32 candidate = (uint32)best;
  if (candidate == FORMER_BEST) return entry.origin;
  return candidate >= table.base ? work.candidates[candidate - table.base].origin : stored;
}

// Replace *best by `own` if `own` is better. Threads may call it at the same time.
inline void compete(
  Rank own, const Origin& origin, Rank* best, const Origin& stored, const Entry& entry, int closed,
  const Table& table, const Workspace& work
) {
  Rank old = __ldcg(best);
  while (true) {
    bool better = own >> 32 < old >> 32;
    if (old != NOTHING) {
      Origin other = origin_of(old, stored, entry, table, work);
      if (closed != NONE && last_label(other, work) == closed) better = true;
      else if (own >> 32 == old >> 32) better = breaks_tie(origin, other, work);
    }
    if (!better) return;
    Rank seen = atomicCAS(best, old, own);
    if (seen == old) return;
    old = seen;
  }
}

// Update the second of an entry, which has another last label than the best candidate. Call it when the best
// candidates are known, with one thread for each candidate of the list.
inline void compete_for_second(int i, const Table& table, const Workspace& work) {
  const Candidate& candidate = work.candidates[i];
  const Entry& entry = table.entries[candidate.entry];
  Second& second = table.seconds[candidate.entry];
  const int closed = last_label(origin_of(entry.best, entry.origin, entry, table, work), work);
  if (last_label(candidate.origin, work) != closed) {
    const Rank own = rank(candidate.cost, table.base + i);
    compete(own, candidate.origin, &second.best, second.origin, entry, closed, table, work);
  }
  bool replaced = (uint32)entry.best >= table.base && entry.origin.source != NONE;
  if (replaced && last_label(entry.origin, work) != closed) {
    const Rank former = rank(entry.cost, FORMER_BEST);
    compete(former, entry.origin, &second.best, second.origin, entry, closed, table, work);
  }
}

// Store origins and costs in the entries before the list is emptied. One thread for each candidate; the thread
// of the best candidate writes.
inline void settle(int i, const Table& table, const Workspace& work) {
  const Candidate& candidate = work.candidates[i];
  Entry& entry = table.entries[candidate.entry];
  const uint32 first = (uint32)entry.best, own = table.base + i;
  if (first >= table.base && first != own) return;
  if (!KEEPS_LINKS && table.seconds) {
    Second& second = table.seconds[candidate.entry];
    const uint32 other = (uint32)second.best;
    if (first != own && other != own) return;
    if (second.best != NOTHING && other >= table.base) {
      second.origin = origin_of(second.best, second.origin, entry, table, work);
      second.cost = cost_of_rank(second.best);
      if (other == FORMER_BEST) second.best = rank(second.cost, 0);
    }
  }
  if (first != own) return;
  entry.origin = candidate.origin;
  entry.cost = candidate.cost;
}

// Open an entry for a new key. Call with the thread whose candidate claimed the slot.
inline void open_entry(Candidate& candidate, Table& table, Counters& counters) {
  int at = ~candidate.entry, e = atomicAdd(&*table.count, 1);
  candidate.entry = at;
  if (e >= table.capacity) {
    atomicExch(&counters.full, 1);
    table.slots[at] = 0;
    return;
  }
  table.slots[at] = e + 1;
  table.entries[e] = Entry{candidate.key, NOTHING, 0.0f, {0, NONE, NONE}};
  if (table.seconds) table.seconds[e].best = NOTHING;
}

inline bool is_admitted(const Candidate& candidate, const Workspace& work) {
  return work.last_rank == ANY_RANK || rank_of(candidate.cost, candidate.key) <= work.last_rank;
}

// Move the list of candidates into a table; of equal keys the better one stays. `ranked`: candidates above the
// cutoff or the last rank are dropped, and for lattices the others become links. Call with all threads after a
// barrier; ends with one.
inline void recombine(Table& table, bool ranked, Workspace& work) {
  const int count = work.counters->num_candidates;
  const float cutoff = work.cutoff();
  Candidate* candidates = work.candidates;
  for (int i = thread(); i < count; i += threads()) {
    bool admitted = !ranked || (candidates[i].cost <= cutoff && is_admitted(candidates[i], work));
    candidates[i].entry = admitted ? table.find_or_claim(candidates[i].key, i, candidates) : NO_ENTRY;
  }
  __syncthreads();
  for (int i = thread(); i < count; i += threads()) {
    Candidate& candidate = candidates[i];
    if (candidate.entry < 0 && candidate.entry != NO_ENTRY) open_entry(candidate, table, *work.counters);
  }
  __syncthreads();
  for (int i = thread(); i < count; i += threads()) {
    if (candidates[i].entry == NO_ENTRY) continue;
    int e = table.slots[candidates[i].entry] - 1;
    candidates[i].entry = e < 0 ? NO_ENTRY : e;
    if (e < 0) continue;
    Entry& entry = table.entries[e];
    Rank own = rank(candidates[i].cost, table.base + i);
    compete(own, candidates[i].origin, &entry.best, entry.origin, entry, NONE, table, work);
  }
  __syncthreads();
  if (!KEEPS_LINKS && table.seconds) {
    for (int i = thread(); i < count; i += threads()) {
      if (candidates[i].entry != NO_ENTRY) compete_for_second(i, table, work);
    }
    __syncthreads();
  }
  if (ranked && KEEPS_LINKS) add_links(count, table, work);
  for (int i = thread(); i < count; i += threads()) {
    if (candidates[i].entry != NO_ENTRY) settle(i, table, work);
  }
  if (thread() == 0) work.counters->num_candidates = 0;
  __syncthreads();
  table.base += work.max_candidates;
  work.reserved = 0;
}

// Make room in the list for `more` candidates of each thread. Call with all threads after a barrier.
inline void reserve_candidates(int more, Workspace& work) {
  if (work.reserve(more)) return;
  recombine(work.next_tokens, true, work);
  work.reserve(more);
}

// Append a candidate to the list unless it is above the cutoff. Call with all lanes of a warp.
inline void offer(bool exists, const Candidate& candidate, Workspace& work) {
  bool is_below = exists && candidate.cost <= work.cutoff();
  if (is_below) work.lower_best(candidate.cost);
  work.append(is_below, candidate);
}
