// What the large LM makes of a word: the difference of both LMs, and the state of both after it. Twin of
// composition.py.
#pragma once

#include "lm/paged.cuh"
#include "search/word_graph/ways.cuh"

struct Rescoring {
  PagedLM large;  // or the difference of both, if there is one
  PagedLM small;  // not looked at where `large` is the difference
  bool is_difference;
  const int64* large_labels;  // [W], the large LM's label of each word
  const int64* small_labels;  // [W]
  float weight;  // of the difference
};

inline int64 lm_of(int64 large, int64 small) { return large << 32 | small; }
inline int64 large_of(int64 lm) { return lm >> 32; }
inline int64 small_of(int64 lm) { return lm & 0xffffffff; }

// cost_large - cost_small of a word, unweighted, and both states after it.
inline LMStep difference(int word, int64 lm, const Rescoring& rescoring, LookupCounters& counters) {
  const LMStep large = lookup(rescoring.large, large_of(lm), rescoring.large_labels[word], counters);
  if (rescoring.is_difference) return {large.cost, lm_of(large.target, 0)};
  const LMStep small = lookup(rescoring.small, small_of(lm), rescoring.small_labels[word], counters);
  return {large.cost - small.cost, lm_of(large.target, small.target)};
}

// The same of a word label, which may be a compound.
inline LMStep cost_of_label(
  int word, int64 lm, const Graph& graph, const Rescoring& rescoring, LookupCounters& counters
) {
  int depth = 0;  // a chain of words is compounded from the left: from its first word on
  for (int w = word; w >= graph.num_words; depth++) w = first_of_compound(w, 1, graph);
  LMStep total{0.0f, lm};
  for (int level = depth; level >= 0; level--) {
    int label = first_of_compound(word, level, graph);
    if (level < depth) label = graph.compounds[2 * (label - graph.num_words) + 1];
    const LMStep step = difference(label, total.target, rescoring, counters);
    total = {level < depth ? total.cost + step.cost : step.cost, step.target};
  }
  return total;
}

inline float weighted(float cost, const Rescoring& rescoring) {
  return rescoring.weight == 0 ? 0.0f : rescoring.weight * cost;  // an infinite one would make it NaN
}
