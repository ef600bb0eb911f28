// Tightening the cutoff: before the epsilon closure forms groups, offer the best token's best candidate by
// the small LM at its true cost.
#pragma once

#include "search/word_graph/large_lm/group_arcs.cuh"
#include "search/word_graph/large_lm/query_cache.cuh"

// Set counters.best_token to the token with the least key among the tokens with the least cost. Call with
// all threads after a barrier; ends with one.
inline void find_best_token(int count, Workspace& work) {
  int* best = &work.counters->best_token;
  // volatile: other threads change it, so the compiler must not keep it in a register
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

// An arc of the best token.
struct BestArc {
  float total;
  int epsilon;
  int arc;  // NONE: no arc is better than the candidates so far
};

// Set `best` to the best arc after closure arc e (or NONE) among this thread's labels, if that is better.
inline void find_best_arc(
  const Row& row, const Token& token, int e, const Workspace& work, BestArc& best
) {
  const Search& search = work.search;
  int source = state_of(token.key), boost = boost_of(token.key);
  float cost = token.cost;
  if (e != NONE) {
    const Epsilon closure = work.graph.epsilons[e];
    const Boost boosting = boosted(closure.olabel, boost, work);
    cost += search.lm_weight * closure.cost;
    cost -= boosting.bonus;
    boost = boosting.state;
    source = closure.target;
  }
  const GraphState state = work.graph.states[source];
  for (int i = thread(); i < work.counters->num_labels; i += threads()) {
    const int label = work.labels[i];
    const float acoustic_cost = cost_of(row[label], search);
    if (least_total(cost, state.least_cost, acoustic_cost, search) > best.total) continue;
    if (search.topology == NORMAL && label == label_of(token.key) - 1) continue;
    for (int a = first_arc(work.graph, state, label); a < state.arc_end; a++) {
      const GraphArc arc = work.graph.arcs[a];
      if (arc.ilabel != label) break;
      const float bonus = boosted(arc.olabel, boost, work).bonus;
      const float total = cost + search.lm_weight * arc.cost - bonus + acoustic_cost;
      const bool precedes = best.arc != NONE && best.epsilon == e && a < best.arc;
      if (total < best.total || (total == best.total && precedes)) best = BestArc{total, e, a};
    }
  }
}

// The best arc of the best token. Ties go to the first closure arc, then to the first arc. Call with all
// threads after a barrier.
__noinline__ BestArc best_arc_of(Row row, const LmWorkspace* shared) {
  const LmWorkspace& work = *shared;
  const Token token = work.current[work.counters->best_token];
  const GraphState state = work.graph.states[state_of(token.key)];
  BestArc own{work.best(), NONE, NONE};
  find_best_arc(row, token, NONE, work, own);
  for (int e = state.epsilon_begin; e < state.epsilon_end; e++) find_best_arc(row, token, e, work, own);
  const float total = block_reduce(own.total, Min(), (float*)work.scratch);
  uint64 name = ~0ull;
  if (own.arc != NONE && own.total == total) name = (uint64)(uint32)(own.epsilon + 1) << 32 | own.arc;
  name = block_reduce(name, Min(), work.scratch);
  if (name == ~0ull) return {total, NONE, NONE};
  return {total, (int)(name >> 32) - 1, (int)(uint32)name};
}

// List one query, for the words of the best arc. Call with all threads; a barrier must follow.
inline void query_best_arc(const BestArc& best, const Token& token, LmWorkspace& work) {
  if (thread() != 0) return;
  LmCounters& lm_counters = *work.lm_counters;
  const int silent = best.epsilon == NONE ? 0 : work.graph.epsilons[best.epsilon].olabel;
  const int olabel = scored_label(silent, work);
  count_look_ups((olabel != 0) + (scored_label(work.graph.arcs[best.arc].olabel, work) != 0), lm_counters);
  work.buffers->queries[0] = LmQuery{token.key.lm, olabel, NO_ENTRY, 0.0f, NONE, NONE, 0};
  lm_counters.num_queries = 1;
}

// The key of the token after the best arc from a token with key `key`, without the LM context.
__noinline__ int64 key_after(Row row, BestArc best, int64 key, const LmWorkspace* shared) {
  const LmWorkspace& work = *shared;
  int boost = boost_of(key);
  if (best.epsilon != NONE) boost = boosted(work.graph.epsilons[best.epsilon].olabel, boost, work).state;
  return step_of(row, best.arc, key_of(0, boost, 0), work).key;
}

// Offer the candidate by the best arc, if it is better than all candidates so far. Call with all threads
// after a barrier, with an empty list of candidates; ends with a barrier.
inline void tighten_cutoff(const Row& row, int count, LmWorkspace& work) {
  find_best_token(count, work);
  const int source = work.counters->best_token;
  const Token token = work.current[source];
  const BestArc best = best_arc_of(row, work.shared);
  if (best.arc == NONE) return;
  query_best_arc(best, token, work);
  __syncthreads();
  answer_queries(work.buffers, work.lm_counters);
  if (thread() == 0) {
    work.buffers->queries[0].olabel = scored_label(work.graph.arcs[best.arc].olabel, work);
  }
  answer_queries(work.buffers, work.lm_counters);
  work.reserve(1);
  Candidate candidate{};
  if (thread() == 0) {
    const int64 key = key_after(row, best, token.key.key, work.shared);
    const LmQuery& query = work.buffers->queries[0];
    candidate = Candidate{
      {key, query.lm}, best.total + query.difference, {best.arc, source, best.epsilon}, NO_ENTRY
    };
    work.lm_counters->num_queries = 0;
    work.lm_counters->tightened_by = candidate.origin;
  }
  offer(thread() == 0, candidate, work);
  __syncthreads();
}
