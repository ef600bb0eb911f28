// Pruning: the tokens that survive a frame, with their back-pointers, and the links between them.
// Counterpart of prune.py.
#pragma once

#include "search/word_graph/candidates.cuh"

// The histogram bins of costs within the beam.
struct CostBins {
  float best;
  float beam;
  float scale;

  bool within(float cost) const { return cost <= best + beam; }

  int of(float cost) const {
    int64 bin = (int64)((cost - best) * scale);
    return bin < BINS - 1 ? (int)bin : BINS - 1;
  }
};

// Whether fewer than min_active next tokens are within the beam of the frame; if so, a wider one is set. `beam` is
// that of the options. Call with all threads after a barrier.
inline bool widen_beam(float beam, Workspace& work) {
  if (work.search.min_active == 0 || work.search.beam >= WIDEST * beam) return false;
  const float most = work.best() + work.search.beam;
  int within = 0;
  for (int e = thread(); e < work.next_tokens.size(); e += threads()) {
    within += work.next_tokens.entries[e].cost <= most;
  }
  if (block_reduce(within, Sum(), (int*)work.scratch) >= work.search.min_active) return false;
  work.search.beam *= WIDENING;
  return true;
}

// The last bin that survives: the cheapest bins that have at most max_active tokens together, and in a widened beam
// no more than min_active tokens need. Call with all threads after a barrier; ends with one.
inline int last_bin(const CostBins& bins, int count, bool is_widened, Workspace& work) {
  if (count <= work.search.max_active && !is_widened) return BINS - 1;
  for (int i = thread(); i < BINS; i += threads()) work.histogram[i] = 0;
  __syncthreads();
  for (int e = thread(); e < count; e += threads()) {
    const float cost = work.next_tokens.entries[e].cost;
    if (bins.within(cost)) atomicAdd(&work.histogram[bins.of(cost)], 1);
  }
  __syncthreads();
  if (thread() == 0) {
    int last = 0;
    int64 total = work.histogram[0];
    while (last < BINS - 1 && total + work.histogram[last + 1] <= work.search.max_active) {
      if (is_widened && total >= work.search.min_active) break;
      total += work.histogram[++last];
    }
    work.counters->last_bin = last;
  }
  __syncthreads();
  return work.counters->last_bin;
}

// The move of an arc; see `move_of` in prune.py.
inline int move_of(const Origin& origin, const Token& source, const Workspace& work) {
  if (origin.arc < 0) return origin.arc;
  const GraphArc arc = work.graph.arcs[origin.arc];
  if (work.search.topology != GRAPH || origin.epsilon != NONE || arc.olabel != 0) return NEW_TOKEN;
  if (arc.ilabel == work.search.blank_id) return BLANK_MOVE;
  if (arc.target != state_of(source.key) || source.back_pointer == NONE) return NEW_TOKEN;
  const int last_label = work.graph.arcs[work.back_pointers[source.back_pointer].arc].ilabel;
  return arc.ilabel == last_label ? REPEAT_MOVE : NEW_TOKEN;
}

// The label (column of the log-probs) that an arc or a move to a token with this key reads.
inline int label_read(int arc, const Key& key, const Workspace& work) {
  if (arc >= 0) return work.graph.arcs[arc].ilabel;
  return arc == REPEAT_MOVE ? label_of(key) - 1 : work.search.blank_id;
}

// A surviving token, with the back-pointer of its source, or with a new one if it has a new label.
inline Token next_token(const Row& row, const Entry& entry, float best, int frame, Workspace& work) {
  const Token source = work.current[entry.origin.source];
  const int move = move_of(entry.origin, source, work);
  Token token{entry.key, entry.cost - best, source.back_pointer, source.run, source.probability};
  if (move == BLANK_MOVE) return token;
  const int label = label_read(entry.origin.arc, entry.key, work);
  const bool is_token = label != work.search.blank_id;
  const float probability = is_token ? (float)exp((double)row[label]) : 0.0f;
  if (move == REPEAT_MOVE) {
    token.run++;
    token.probability += probability;
    return token;
  }
  token.back_pointer = atomicAdd(&work.counters->num_back_pointers, 1);
  work.back_pointers[token.back_pointer] = BackPointer{
    source.back_pointer, entry.origin.arc, entry.origin.epsilon, frame, source.run, source.probability
  };
  token.run = is_token;
  token.probability = probability;
  return token;
}

// Complete a link that the lattice may need; false if it does not need it. `best` of an entry is the index of its
// token here, or NOTHING.
inline bool complete(const Row& row, const CostBins& bins, int64 frame, Link& link, const Workspace& work) {
  const Entry& target = work.next_tokens.entries[link.target];
  if (target.best == NOTHING || !bins.within(link.acoustic_cost)) return false;
  const Token source = work.current[link.source];
  if (is_hopeless(source.cost, link.cost, target.cost, work.search)) return false;
  link.ilabel = label_read(link.arc, target.key, work);
  link.move = move_of(Origin{link.arc, link.source, link.epsilon}, source, work);
  link.acoustic_cost = cost_of(row[link.ilabel], work.search);
  link.target = (int)target.best;
  link.frame = (int)frame;
  return true;
}

// Keep the links of the frame between surviving tokens. Call with all threads after a barrier.
inline void keep_links(const Row& row, const CostBins& bins, StreamCounters& now, Workspace& work) {
  const int count = work.counters->num_links;
  int kept = 0;
  for (int first = 0; first < count; first += threads()) {
    const int i = first + thread();
    Link link{};
    if (i < count) link = work.links[i];
    const bool stays = i < count && complete(row, bins, now.frames, link, work);
    int more;
    const int index = kept + block_exclusive_sum(int(stays), (int*)work.scratch, &more);
    if (stays) work.links[index] = link;
    kept += more;
  }
  now.links += kept;
  work.links = work.links + kept;
  work.max_links -= kept;
}

// Step 4: the surviving tokens become `current`. False, and nothing changes, if the back-pointers may not fit.
// Call with all threads after a barrier; ends with one.
inline bool prune(const Row& row, bool is_widened, StreamCounters& now, Workspace& work) {
  Table& next_tokens = work.next_tokens;
  Counters& counters = *work.counters;
  const int count = next_tokens.size();
  const CostBins bins{work.best(), work.search.beam, (float)BINS / work.search.beam};
  const int last = last_bin(bins, count, is_widened, work);
  uint64 sums = 0;  // upper half: tokens within the beam; lower half: surviving tokens
  for (int e = thread(); e < count; e += threads()) {
    const float cost = next_tokens.entries[e].cost;
    if (bins.within(cost)) sums += (1ull << 32) + (bins.of(cost) <= last);
  }
  sums = block_reduce(sums, Sum(), work.scratch);
  const int kept = (int)(uint32)sums, within = (int)(sums >> 32);
  if (now.back_pointers + kept > work.max_back_pointers) {
    now.needed = kept;
    return false;
  }
  if (thread() == 0) {
    counters.kept = 0;
    counters.num_back_pointers = now.back_pointers;
  }
  __syncthreads();
  for (int first = 0; first < count; first += threads()) {
    const int e = first + thread();
    const float cost = e < count ? next_tokens.entries[e].cost : 0.0f;
    const bool survives = e < count && bins.within(cost) && bins.of(cost) <= last;
    const int index = warp_append(survives, &counters.kept);
    if (KEEPS_LINKS && e < count) next_tokens.entries[e].best = survives ? index : NOTHING;
    if (!survives) continue;
    work.next[index] = next_token(row, next_tokens.entries[e], bins.best, (int)now.frames, work);
    if (cost == bins.best) atomicExch(&counters.best_token, index);
  }
  __syncthreads();
  if (KEEPS_LINKS) keep_links(row, bins, now, work);
  now.tokens = kept;
  now.back_pointers = counters.num_back_pointers;
  now.limited += (kept < within && !is_widened) || work.last_rank != ANY_RANK;
  now.cost += bins.best;
  now.frames++;
  Token* before = work.current;
  work.current = work.next;
  work.next = before;
  return true;
}
