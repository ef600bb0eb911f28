// Before groups are formed the best token looks ahead: of its ways, that which looks best by the small LM
// is taken at once, at its true cost, to lower the cutoff. Twin of _look_ahead in cpu.py.
#pragma once

#include "search/word_graph/composition/answers.cuh"
#include "search/word_graph/composition/visits.cuh"

// Of the tokens with the least cost, tally.best_token becomes the first by its key. Call with all threads
// after a barrier; ends with one.
inline void find_best_token(int count, Workspace& work) {
  int* best = &work.tally->best_token;
  // shared memory that others change: not to be kept in a register
  const auto read = [&] { return *(volatile int*)best; };
  const float least = work.current[read()].cost;
  for (int i = thread(); i < count; i += threads()) {
    if (work.current[i].cost != least) continue;
    int old = read();
    while (work.current[i].key < work.current[old].key) {
      const int seen = atomicCAS(best, old, i);
      if (seen == old) break;
      old = seen;
    }
  }
  __syncthreads();
}

// A way of the best token.
struct Outlook {
  float total;
  int epsilon;
  int arc;  // NONE: no way is better than those that are known
};

// The best way by one epsilon record (or NONE) that this thread finds, if it is better than `best`.
inline void look_out(const Row& row, const Token& token, int e, const Workspace& work, Outlook& best) {
  const Search& search = work.search;
  int source = state_of(token.key), boost = boost_of(token.key);
  float cost = token.cost;
  if (e != NONE) {
    const Epsilon record = work.graph.epsilons[e];
    const Boost boosting = boosted(record.word, boost, work);
    cost += search.lm_weight * record.cost;
    cost -= boosting.bonus;
    boost = boosting.state;
    source = record.target;
  }
  const GraphState state = work.graph.states[source];
  for (int i = thread(); i < work.tally->num_labels; i += threads()) {
    const int label = work.labels[i];
    const float acoustic_cost = cost_of(row[label], search);
    if (least_total(cost, state.least_cost, acoustic_cost, search) > best.total) continue;
    if (search.topology == NORMAL && label == label_of(token.key) - 1) continue;
    for (int a = first_arc(work.graph, state, label); a < state.arc_end; a++) {
      const GraphArc arc = work.graph.arcs[a];
      if (arc.label != label) break;
      const float bonus = boosted(arc.word, boost, work).bonus;
      const float total = cost + search.lm_weight * arc.cost - bonus + acoustic_cost;
      const bool is_first = best.arc != NONE && best.epsilon == e && a < best.arc;
      if (total < best.total || (total == best.total && is_first)) best = Outlook{total, e, a};
    }
  }
}

// The best way of the best token; of equal ones the first by epsilon record and arc. Call with all threads
// after a barrier.
__noinline__ Outlook best_outlook(Row row, const Space* common) {
  const Space& work = *common;
  const Token token = work.current[work.tally->best_token];
  const GraphState state = work.graph.states[state_of(token.key)];
  Outlook own{work.best(), NONE, NONE};
  look_out(row, token, NONE, work, own);
  for (int e = state.epsilon_begin; e < state.epsilon_end; e++) look_out(row, token, e, work, own);
  const float total = block_reduce(own.total, Min(), (float*)work.scratch);
  uint64 name = ~0ull;
  if (own.arc != NONE && own.total == total) name = (uint64)(uint32)(own.epsilon + 1) << 32 | own.arc;
  name = block_reduce(name, Min(), work.scratch);
  if (name == ~0ull) return {total, NONE, NONE};
  return {total, (int)(name >> 32) - 1, (int)(uint32)name};
}

// The only errand: the words of the way that looks best. Call with all threads; a barrier must follow.
inline void list_outlook(const Outlook& best, const Token& token, Space& work) {
  if (thread() != 0) return;
  Ledger& ledger = *work.ledger;
  const int word = best.epsilon == NONE ? 0 : work.graph.epsilons[best.epsilon].word;
  count_look_ups((word != 0) + (work.graph.arcs[best.arc].word != 0), ledger);
  work.rooms->errands[0] = Errand{token.key.lm, word, NO_PLACE, 0.0f, NONE, NONE, 0};
  ledger.num_errands = 1;
}

// The key to which a way leads from a token with this one, but for its history.
__noinline__ int64 key_after(Row row, Outlook way, int64 key, const Space* common) {
  const Space& work = *common;
  int boost = boost_of(key);
  if (way.epsilon != NONE) boost = boosted(work.graph.epsilons[way.epsilon].word, boost, work).state;
  return step_of(row, way.arc, key_of(0, boost, 0), work).key;
}

// Take the way that looks best, if it looks better than all that are known. Call with all threads after
// a barrier, with no ways in the list; ends with a barrier.
inline void look_ahead(const Row& row, int count, Space& work) {
  find_best_token(count, work);
  const int source = work.tally->best_token;
  const Token token = work.current[source];
  const Outlook best = best_outlook(row, work.common);
  if (best.arc == NONE) return;
  list_outlook(best, token, work);
  __syncthreads();
  ask(work.rooms, work.ledger);
  if (thread() == 0) work.rooms->errands[0].word = work.graph.arcs[best.arc].word;
  ask(work.rooms, work.ledger);
  work.reserve(1);
  Way way{};
  if (thread() == 0) {
    const int64 key = key_after(row, best, token.key.key, work.common);
    const Errand& errand = work.rooms->errands[0];
    way = Way{
      {key, errand.lm}, best.total + errand.correction, {best.arc, source, best.epsilon}, NO_PLACE
    };
    work.ledger->num_errands = 0;
    work.ledger->ahead = way.origin;
  }
  offer(thread() == 0, way, work);
  __syncthreads();
}
