// Score difference of the large and the small LM for a word, and the LM context after the word.
// Counterpart of scorer.py.
#pragma once

#include "lm/paged.cuh"
#include "search/word_graph/candidates.cuh"

// Both LMs, and their labels of the words of the graph. W: number of words.
struct LmPair {
  PagedLM large;  // the difference automaton if is_difference
  PagedLM small;  // unused if is_difference
  bool is_difference;
  Global<const int64> large_labels;  // [W], the large LM's label of each word; negative: none
  Global<const int64> small_labels;  // [W]
  float weight;  // of the LM score difference
};

template <class Args>  // kernel arguments with both LMs
inline void open_lms(const Args& args, float weight, LmPair& lms) {
  const int64* large_arcs = args.large_arcs ? args.large_arcs : args.large_host_arcs;
  const int64* small_arcs = args.small_arcs ? args.small_arcs : args.small_host_arcs;
  lms.large = PagedLM{
    {args.large_states, (const uint64*)args.large_labels, (const uint64*)large_arcs, args.large_label_bits,
     args.large_target_bits},
    (CachedArc*)args.large_cache, args.large_cache_slots,
  };
  lms.small = PagedLM{
    {args.small_states, (const uint64*)args.small_labels, (const uint64*)small_arcs, args.small_label_bits,
     args.small_target_bits},
    (CachedArc*)args.small_cache, args.small_cache_slots,
  };
  lms.is_difference = args.is_difference;
  lms.large_labels = args.labels_in_large;
  lms.small_labels = args.labels_in_small;
  lms.weight = weight;
}

inline int64 lm_of(int64 large, int64 small) { return large << 32 | small; }
inline int64 large_of(int64 lm) { return lm >> 32; }
inline int64 small_of(int64 lm) { return lm & 0xffffffff; }

// cost_large - cost_small of a word, unweighted, and the LM context after it. A word without a label costs 0.
inline LMStep difference(int word, int64 lm, const LmPair& lms, LookupCounters& counters) {
  if (lms.large_labels[word] < 0) return {0.0f, lm};
  const LMStep large = lookup(lms.large, large_of(lm), lms.large_labels[word], counters);
  if (lms.is_difference) return {large.cost, lm_of(large.target, 0)};
  const LMStep small = lookup(lms.small, small_of(lm), lms.small_labels[word], counters);
  return {large.cost - small.cost, lm_of(large.target, small.target)};
}

// The same for all words of an output label, which may be a sequence of words.
inline LMStep cost_of_label(
  int olabel, int64 lm, const Graph& graph, const LmPair& lms, LookupCounters& counters
) {
  LMStep total{0.0f, lm};
  for (int n = count_words(olabel, graph) - 1; n >= 0; n--) {
    const LMStep step = difference(word_from_end(olabel, n, graph), total.target, lms, counters);
    total = {total.cost + step.cost, step.target};
  }
  return total;
}

// The words that the LMs score of an output label; 0 for a piece, or the end, of an unknown word.
inline int scored_label(int olabel, const Workspace& work) {
  const bool is_piece = work.search.num_spoken <= olabel && olabel < work.search.num_words;
  return is_piece ? 0 : olabel;
}

inline float weighted(float cost, const LmPair& lms) {
  return lms.weight == 0 ? 0.0f : lms.weight * cost;  // 0 * inf would be NaN
}
