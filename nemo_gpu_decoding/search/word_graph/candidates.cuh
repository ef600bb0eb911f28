// Candidates for tokens of the next frame: what they cost, and which of several with one key stays.
#pragma once

#include "search/word_graph/links.cuh"

inline float cost_of(float log_prob, const Search& search) { return -(search.acoustic_scale * log_prob); }

// No arc that costs so much leads to less, whatever its word; summed as the true cost is.
inline float least_total(float cost, float arc_cost, float acoustic_cost, const Search& search) {
  return cost + search.lm_weight * arc_cost - search.most_bonus + acoustic_cost;
}

struct Boost {
  float bonus;  // weighted
  int state;  // of the boosting automaton, after the word
};

// Number of words that an output label stands for.
inline int count_words(int olabel, const Graph& graph) {
  int count = 1;
  for (; olabel >= graph.num_words; count++) olabel = graph.word_sequences[2 * (olabel - graph.num_words)];
  return count;
}

// Of these words the one before the last n.
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

// Cost of a candidate before its arc: that of its source, and of a closure arc.
inline float cost_before(const Origin& origin, const Workspace& work) {
  const Token& token = work.current[origin.source];
  if (origin.epsilon == NONE) return token.cost;
  const Epsilon closure = work.graph.epsilons[origin.epsilon];
  float bonus = boosted(closure.olabel, boost_of(token.key), work).bonus;
  return token.cost + work.search.lm_weight * closure.cost - bonus;
}

// Of two candidates to one key at the same cost, whether a is the better one: arc, cost before it, key
// of the source, epsilon closure.
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

// The origin of the candidate that `best` names, in an entry or as its second.
inline Origin origin_of(
  Rank best, const Origin& stored, const Entry& entry, const Table& table, const Workspace& work
) {
  uint32 candidate = (uint32)best;
  if (candidate == FORMER_BEST) return entry.origin;
  return candidate >= table.base ? work.candidates[candidate - table.base].origin : stored;
}

// Put `own` where *best is if that is worse. Any thread, at the same time as others.
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

// Seconds after the best ones are known: for candidates with another last label. One thread for each
// candidate of the list.
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

// Write down origins while the list is still there. Of an entry's candidates one thread does it.
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

// Give a key its entry. One thread: that whose candidate has claimed the slot.
inline void open_entry(Candidate& candidate, Table& table, Counters& counters) {
  int at = ~candidate.entry, e = atomicAdd(table.count, 1);
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

// Enter the listed candidates into a table; of equal keys the better one stays. `ranked`: those that
// rank too low are dropped, and the others are noted as links, if these are kept. Call with all threads
// after a barrier; ends with one.
inline void recombine(Table& table, bool ranked, Workspace& work) {
  const int count = work.counters->num_candidates;
  const float cutoff = work.cutoff();
  Candidate* candidates = work.candidates;
  for (int i = thread(); i < count; i += threads()) {
    bool wanted = !ranked || (candidates[i].cost <= cutoff && is_admitted(candidates[i], work));
    candidates[i].entry = wanted ? table.find_or_claim(candidates[i].key, i, candidates) : NO_ENTRY;
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
  if (ranked && KEEPS_LINKS) note_links(count, table, work);
  for (int i = thread(); i < count; i += threads()) {
    if (candidates[i].entry != NO_ENTRY) settle(i, table, work);
  }
  if (thread() == 0) work.counters->num_candidates = 0;
  __syncthreads();
  table.base += work.max_candidates;
  work.reserved = 0;
}

// Capacity in the list for `more` candidates of each thread. Call with all threads after a barrier.
inline void reserve_candidates(int more, Workspace& work) {
  if (work.reserve(more)) return;
  recombine(work.next_tokens, true, work);
  work.reserve(more);
}

// List a candidate if it is not above the cutoff. Call with all lanes of a warp.
inline void offer(bool possible, const Candidate& candidate, Workspace& work) {
  bool wants = possible && candidate.cost <= work.cutoff();
  if (wants) work.lower_best(candidate.cost);
  work.append(wants, candidate);
}
