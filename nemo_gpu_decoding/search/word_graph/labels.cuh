// Steps before tokens are expanded: which labels may matter in this frame, and how low the cutoff is.
// Counterpart of labels.py.
#pragma once

#include "search/numerics.cuh"
#include "search/word_graph/candidates.cuh"

// Step 1: a blank, or the last label again. Call with all threads after a barrier; ends with one.
inline void offer_blanks_and_repeats(const Row& row, int count, Workspace& work) {
  const Search& search = work.search;
  const float blank_cost = cost_of(row[search.blank_id], search);
  for (int first = 0; first < count; first += threads()) {
    reserve_candidates(2, work);
    const int i = first + thread();
    Candidate candidate{{}, 0.0f, {BLANK_MOVE, i, NONE}, NO_ENTRY};
    Token token{};
    int label = 0;  // stays 0 after a blank, and always with topology "minimal"
    if (i < count) {
      token = work.current[i];
      label = label_of(token.key);
    }
    candidate.key = after_blank(token.key);
    candidate.cost = token.cost + blank_cost;
    offer(i < count, candidate, work);
    candidate.key = token.key;
    candidate.origin.arc = REPEAT_MOVE;
    if (label > 0) candidate.cost = token.cost + cost_of(row[label - 1], search);
    offer(label > 0, candidate, work);
    __syncthreads();
  }
}

// List the labels that can stay below the cutoff. Call with all threads after a barrier; ends with one.
// False if the frame holds NaN or a value above most_log_prob().
inline bool choose_labels(const Row& row, int columns, Workspace& work) {
  const Search& search = work.search;
  const double most = (double)work.cutoff() - search.least_cost;
  const double slack = 1e-6 * fabs(most) + 1e-5;  // for rounding
  const double limit = -(most + slack) / search.acoustic_scale;
  const float least = (float)fmax(limit, -(double)largest_float());
  bool bad = false;
  if (thread() == 0) work.counters->num_labels = 0;
  __syncthreads();
  for (int first = 0; first < columns; first += threads()) {
    const int column = first + thread();
    const float value = column < columns ? row[column] : negative_infinity();
    bad |= !(value <= most_log_prob());
    const bool is_blank = column == search.blank_id && search.topology != GRAPH;
    const bool wants = value >= least && !is_blank;
    const int at = warp_append(wants, &work.counters->num_labels);
    if (wants) work.labels[at] = column;
  }
  return !__syncthreads_or(bad);
}

// The cost of the likeliest label that is listed. Call with all threads after a barrier.
inline float least_acoustic_cost(const Row& row, Workspace& work) {
  float least = largest_float();
  for (int i = thread(); i < work.counters->num_labels; i += threads()) {
    least = fminf(least, cost_of(row[work.labels[i]], work.search));
  }
  return block_reduce(least, Min(), (float*)work.scratch);
}

// Lower the best cost by the arcs of one state. Any threads.
inline void tighten_by_arcs(
  const Row& row, float cost, int last_label, const GraphState& state, Workspace& work
) {
  const Search& search = work.search;
  for (int i = thread(); i < work.counters->num_labels; i += threads()) {
    const int label = work.labels[i];
    const float acoustic_cost = cost_of(row[label], search);
    if (!(cost + search.lm_weight * state.least_cost + acoustic_cost < work.best())) continue;
    if (search.topology == NORMAL && label == last_label - 1) continue;
    for (int a = first_arc(work.graph, state, label); a < state.arc_end; a++) {
      const GraphArc arc = work.graph.arcs[a];
      if (arc.ilabel != label) break;
      if (arc.olabel != 0 && search.boosts) continue;
      work.lower_best(cost + search.lm_weight * arc.cost + acoustic_cost);
    }
  }
}

// Lower the best cost by the best token's own arcs, before anything is entered for them. Call with all
// threads after a barrier; a barrier must follow.
inline void tighten_cutoff(const Row& row, Workspace& work) {
  const Graph& graph = work.graph;
  const Token token = work.current[work.counters->best_token];
  const GraphState state = graph.states[state_of(token.key)];
  tighten_by_arcs(row, token.cost, label_of(token.key), state, work);
  for (int e = state.epsilon_begin; e < state.epsilon_end; e++) {
    const Epsilon closure = graph.epsilons[e];
    // a bonus may be negative, where a phrase breaks off
    if (closure.olabel != 0 && work.search.boosts) continue;
    const float cost = token.cost + work.search.lm_weight * closure.cost;
    tighten_by_arcs(row, cost, label_of(token.key), graph.states[closure.target], work);
  }
}
