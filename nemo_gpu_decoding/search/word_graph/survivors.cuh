// Step 4 of a frame: the tokens that survive, what they remember, and the links between them. Twin of
// survivors.py.
#pragma once

#include "search/word_graph/ways.cuh"

// The part of the beam that a cost lies in.
struct Steps {
  float best;
  float beam;
  float scale;

  bool within(float cost) const { return cost <= best + beam; }

  int of(float cost) const {
    int64 step = (int64)((cost - best) * scale);
    return step < BINS - 1 ? (int)step : BINS - 1;
  }
};

// The last step that is taken from the best on, while not more than max_active hypotheses are in the sum.
// Call with all threads after a barrier; ends with one.
inline int last_step(const Steps& steps, int count, Workspace& work) {
  if (count <= work.search.max_active) return BINS - 1;
  for (int i = thread(); i < BINS; i += threads()) work.histogram[i] = 0;
  __syncthreads();
  for (int e = thread(); e < count; e += threads()) {
    const float cost = work.followers.entries[e].cost;
    if (steps.within(cost)) atomicAdd(&work.histogram[steps.of(cost)], 1);
  }
  __syncthreads();
  if (thread() == 0) {
    int last = 0;
    int64 total = work.histogram[0];
    while (last < BINS - 1 && total + work.histogram[last + 1] <= work.search.max_active) {
      total += work.histogram[++last];
    }
    work.tally->last_step = last;
  }
  __syncthreads();
  return work.tally->last_step;
}

// What reading an arc means: a blank, the last label again, or something new; see survivors.py.
inline int move_of(const Origin& origin, const Token& source, const Workspace& work) {
  if (origin.arc < 0) return origin.arc;
  const GraphArc arc = work.graph.arcs[origin.arc];
  if (work.search.topology != GRAPH || origin.epsilon != NONE || arc.word != 0) return NEW_TOKEN;
  if (arc.label == work.search.blank_id) return BLANK_MOVE;
  if (arc.target != state_of(source.key) || source.record == NONE) return NEW_TOKEN;
  const int last_label = work.graph.arcs[work.records[source.record].arc].label;
  return arc.label == last_label ? REPEAT_MOVE : NEW_TOKEN;
}

// The column that a move to a token with this key reads.
inline int label_read(int arc, const Key& key, const Workspace& work) {
  if (arc >= 0) return work.graph.arcs[arc].label;
  return arc == REPEAT_MOVE ? label_of(key) - 1 : work.search.blank_id;
}

// The surviving token with its past: that of its source, and a new record if it has a new label.
inline Token remembered(const Row& row, const Entry& entry, float best, int frame, Workspace& work) {
  const Token source = work.current[entry.origin.source];
  const int move = move_of(entry.origin, source, work);
  Token token{entry.key, entry.cost - best, source.record, source.run, source.probability};
  if (move == BLANK_MOVE) return token;
  const int label = label_read(entry.origin.arc, entry.key, work);
  const bool is_token = label != work.search.blank_id;
  const float probability = is_token ? (float)exp((double)row[label]) : 0.0f;
  if (move == REPEAT_MOVE) {
    token.run++;
    token.probability += probability;
    return token;
  }
  token.record = atomicAdd(&work.tally->num_records, 1);
  work.records[token.record] = Record{
    source.record, entry.origin.arc, entry.origin.epsilon, frame, source.run, source.probability
  };
  token.run = is_token;
  token.probability = probability;
  return token;
}

// Make the link of a listed one that stays; `best`: number of the target's token, or NOTHING, in the
// followers. False if the link goes.
inline bool complete(const Row& row, const Steps& steps, int64 frame, Link& link, const Workspace& work) {
  const Entry& target = work.followers.entries[link.target];
  if (target.best == NOTHING || !steps.within(link.acoustic_cost)) return false;
  const Token source = work.current[link.source];
  if (is_hopeless(source.cost, link.cost, target.cost, work.search)) return false;
  link.label = label_read(link.arc, target.key, work);
  link.move = move_of(Origin{link.arc, link.source, link.epsilon}, source, work);
  link.acoustic_cost = cost_of(row[link.label], work.search);
  link.target = (int)target.best;
  link.frame = (int)frame;
  return true;
}

// Keep the frame's links between survivors; those of the next frame go behind them. Call with all threads
// after a barrier.
inline void keep_links(const Row& row, const Steps& steps, Progress& now, Workspace& work) {
  const int count = work.tally->num_links;
  int kept = 0;
  for (int first = 0; first < count; first += threads()) {
    const int i = first + thread();
    Link link{};
    if (i < count) link = work.links[i];
    const bool stays = i < count && complete(row, steps, now.frames, link, work);
    int more;
    const int place = kept + block_exclusive_sum(int(stays), (int*)work.scratch, &more);
    if (stays) work.links[place] = link;
    kept += more;
  }
  now.links += kept;
  work.links += kept;
  work.max_links -= kept;
}

// What survives becomes `current`. False if there may be no room for its records: nothing has happened
// then. Call with all threads after a barrier; ends with one.
inline bool commit(const Row& row, Progress& now, Workspace& work) {
  Table& followers = work.followers;
  Tally& tally = *work.tally;
  const int count = followers.size();
  const Steps steps{work.best(), work.search.beam, (float)BINS / work.search.beam};
  const int last = last_step(steps, count, work);
  uint64 sums = 0;  // those within the beam, and in the lower half those that are kept
  for (int e = thread(); e < count; e += threads()) {
    const float cost = followers.entries[e].cost;
    if (steps.within(cost)) sums += (1ull << 32) + (steps.of(cost) <= last);
  }
  sums = block_reduce(sums, Sum(), work.scratch);
  const int kept = (int)(uint32)sums, within = (int)(sums >> 32);
  if (now.records + kept > work.max_records) {
    now.wanted = kept;
    return false;
  }
  if (thread() == 0) {
    tally.kept = 0;
    tally.num_records = now.records;
  }
  __syncthreads();
  for (int first = 0; first < count; first += threads()) {
    const int e = first + thread();
    const float cost = e < count ? followers.entries[e].cost : 0.0f;
    const bool survives = e < count && steps.within(cost) && steps.of(cost) <= last;
    const int place = warp_append(survives, &tally.kept);
    if (KEEPS_LINKS && e < count) followers.entries[e].best = survives ? place : NOTHING;
    if (!survives) continue;
    work.next[place] = remembered(row, followers.entries[e], steps.best, (int)now.frames, work);
    if (cost == steps.best) atomicExch(&tally.best_token, place);
  }
  __syncthreads();
  if (KEEPS_LINKS) keep_links(row, steps, now, work);
  now.tokens = kept;
  now.records = tally.num_records;
  now.limited += kept < within || work.last_rank != ANY_RANK;
  now.cost += steps.best;
  now.frames++;
  now.half ^= 1;
  Token* before = work.current;
  work.current = work.next;
  work.next = before;
  return true;
}
