// Ways from one frame into the next: what they cost, and which of several to one key stays. Twin of
// ways.py and of the group ranks in groups.py.
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

inline int first_of_compound(int word, int times, const Graph& graph) {
  for (; times > 0; times--) word = graph.compounds[2 * (word - graph.num_words)];
  return word;
}

// Bonus of a word label, and the boosting state after it.
inline Boost boosted(int word, int state, const Workspace& work) {
  Boost boost{0.0f, state};
  if (word == 0 || !work.search.boosts) return boost;
  const Graph& graph = work.graph;
  int depth = 0;  // a chain of words is compounded from the left: from its first word on
  for (int w = word; w >= graph.num_words; depth++) w = first_of_compound(w, 1, graph);
  for (int level = depth; level >= 0; level--) {
    int label = first_of_compound(word, level, graph);
    if (level < depth) label = graph.compounds[2 * (label - graph.num_words) + 1];
    Reading reading = lookup(work.boosting, boost.state, label, negative_infinity());
    boost.bonus += work.search.boosting_weight * reading.weight;
    boost.state = reading.state;
  }
  return boost;
}

// Cost of a way before its arc: that of its source, and of an epsilon record.
inline float cost_before(const Origin& origin, const Workspace& work) {
  const Token& token = work.current[origin.source];
  if (origin.epsilon == NONE) return token.cost;
  const Epsilon record = work.graph.epsilons[origin.epsilon];
  float bonus = boosted(record.word, boost_of(token.key), work).bonus;
  return token.cost + work.search.lm_weight * record.cost - bonus;
}

// Of two ways to one key at the same cost, whether a is the better one: arc, cost before it, key of the
// source, epsilon record.
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

// The origin of the way that `best` names, in an entry or in its second place.
inline Origin origin_of(
  Rank best, const Origin& stored, const Entry& entry, const Table& table, const Workspace& work
) {
  uint32 way = (uint32)best;
  if (way == FORMER_BEST) return entry.origin;
  return way >= table.base ? work.ways[way - table.base].origin : stored;
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

// Second places after the first ones are known: for ways with another last label. One thread for each
// way of the list.
inline void compete_for_second(int i, const Table& table, const Workspace& work) {
  const Way& way = work.ways[i];
  const Entry& entry = table.entries[way.place];
  Second& second = table.seconds[way.place];
  const int closed = last_label(origin_of(entry.best, entry.origin, entry, table, work), work);
  if (last_label(way.origin, work) != closed) {
    compete(
      rank(way.cost, table.base + i), way.origin, &second.best, second.origin, entry, closed, table, work
    );
  }
  bool replaced = (uint32)entry.best >= table.base && entry.origin.source != NONE;
  if (replaced && last_label(entry.origin, work) != closed) {
    compete(
      rank(entry.cost, FORMER_BEST), entry.origin, &second.best, second.origin, entry, closed, table,
      work
    );
  }
}

// Write down origins while the list is still there. Of an entry's ways one thread does it.
inline void settle(int i, const Table& table, const Workspace& work) {
  const Way& way = work.ways[i];
  Entry& entry = table.entries[way.place];
  const uint32 first = (uint32)entry.best, own = table.base + i;
  if (first >= table.base && first != own) return;
  if (!KEEPS_LINKS && table.seconds) {
    Second& second = table.seconds[way.place];
    const uint32 other = (uint32)second.best;
    if (first != own && other != own) return;
    if (second.best != NOTHING && other >= table.base) {
      second.origin = origin_of(second.best, second.origin, entry, table, work);
      second.cost = cost_of_rank(second.best);
      if (other == FORMER_BEST) second.best = rank(second.cost, 0);
    }
  }
  if (first != own) return;
  entry.origin = way.origin;
  entry.cost = way.cost;
}

// Give a key its entry. One thread: that whose way has claimed the slot.
inline void open_entry(Way& way, Table& table, Tally& tally) {
  int at = ~way.place, e = atomicAdd(table.count, 1);
  way.place = at;
  if (e >= table.capacity) {
    atomicExch(&tally.full, 1);
    table.slots[at] = 0;
    return;
  }
  table.slots[at] = e + 1;
  table.entries[e] = Entry{way.key, NOTHING, 0.0f, {0, NONE, NONE}};
  if (table.seconds) table.seconds[e].best = NOTHING;
}

inline bool is_admitted(const Way& way, const Workspace& work) {
  return work.last_rank == ANY_RANK || rank_of(way.cost, way.key) <= work.last_rank;
}

// Enter the listed ways into a table; of equal keys the better one stays. `ranked`: those that rank too
// low are dropped, and the others are noted as links, if these are kept. Call with all threads after a
// barrier; ends with one.
inline void recombine(Table& table, bool ranked, Workspace& work) {
  const int count = work.tally->num_ways;
  const float cutoff = work.cutoff();
  Way* ways = work.ways;
  for (int i = thread(); i < count; i += threads()) {
    bool wanted = !ranked || (ways[i].cost <= cutoff && is_admitted(ways[i], work));
    ways[i].place = wanted ? table.find_or_claim(ways[i].key, i, ways) : NO_PLACE;
  }
  __syncthreads();
  for (int i = thread(); i < count; i += threads()) {
    if (ways[i].place < 0 && ways[i].place != NO_PLACE) open_entry(ways[i], table, *work.tally);
  }
  __syncthreads();
  for (int i = thread(); i < count; i += threads()) {
    if (ways[i].place == NO_PLACE) continue;
    int e = table.slots[ways[i].place] - 1;
    ways[i].place = e < 0 ? NO_PLACE : e;
    if (e < 0) continue;
    Entry& entry = table.entries[e];
    Rank own = rank(ways[i].cost, table.base + i);
    compete(own, ways[i].origin, &entry.best, entry.origin, entry, NONE, table, work);
  }
  __syncthreads();
  if (!KEEPS_LINKS && table.seconds) {
    for (int i = thread(); i < count; i += threads()) {
      if (ways[i].place != NO_PLACE) compete_for_second(i, table, work);
    }
    __syncthreads();
  }
  if (ranked && KEEPS_LINKS) note_links(count, table, work);
  for (int i = thread(); i < count; i += threads()) {
    if (ways[i].place != NO_PLACE) settle(i, table, work);
  }
  if (thread() == 0) work.tally->num_ways = 0;
  __syncthreads();
  table.base += work.max_ways;
  work.reserved = 0;
}

// Room in the list for `more` ways of each thread into the next frame. Call with all threads after a
// barrier.
inline void make_room(int more, Workspace& work) {
  if (work.reserve(more)) return;
  recombine(work.followers, true, work);
  work.reserve(more);
}

// Note a way into the next frame if it is not above the cutoff. Call with all lanes of a warp.
inline void offer(bool possible, const Way& way, Workspace& work) {
  bool wants = possible && way.cost <= work.cutoff();
  if (wants) work.lower_best(way.cost);
  work.append(wants, way);
}
