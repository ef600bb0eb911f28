// The workspace of a block, which the steps of a frame share.
#pragma once

#include "search/flexctc_beam/candidates.cuh"
#include "search/flexctc_beam/backpointers.cuh"
#include "search/rows.cuh"

// The workspace of a block. The lists are in shared memory, in the order of the fields and of shared_bytes in
// cuda_engine.py.
struct Workspace {
  SearchParams params;
  int beam_size;  // K
  ListSizes sizes;
  UtteranceFusion fusion;
  Candidates candidates;
  Hypothesis* beam;  // [K]
  Hypothesis* next;  // [K], in the order of their scores, equal ones not merged yet
  KeptText* kept;  // [K] by hypothesis of the beam
  int* labels;  // [sizes.labels] columns that may enter the beam
  // [sizes.pairs] pairs that may enter the beam: label number * live hypotheses + hypothesis, or
  // ~(hypothesis * FEW_ARCS + arc) for an arc that its LM state has of its own
  int* pairs;
  int* origins;  // [K] candidate that each of `next` comes from: its parent ...
  int* emitted;  // [K] ... and its label
  int* leaders;  // [K] the first of `next` with that text and last label, or -1: below the threshold
  uint8* rows;  // see RowReader
  Counters* counters;

  Workspace(
    uint8* shared, const SearchParams& params, int beam_size, const ListSizes& sizes,
    const UtteranceFusion& fusion
  )
    : params(params), beam_size(beam_size), sizes(sizes), fusion(fusion) {
    int K = beam_size;
    counters = take<Counters>(shared, 1);
    candidates.items = take<CandidateItem>(shared, sizes.candidates);
    candidates.best_items = take<CandidateItem>(shared, K);
    candidates.keys = take<uint64>(shared, sizes.candidates);
    candidates.best_keys = take<uint64>(shared, K);
    candidates.counters = counters;
    candidates.capacity = sizes.candidates;
    candidates.beam_size = K;
    candidates.columns = columns();
    beam = take<Hypothesis>(shared, K);
    next = take<Hypothesis>(shared, K);
    kept = take<KeptText>(shared, K);
    labels = take<int>(shared, sizes.labels);
    pairs = take<int>(shared, sizes.pairs);
    origins = take<int>(shared, K);
    emitted = take<int>(shared, K);
    leaders = take<int>(shared, K);
    rows = (uint8*)(((size_t)shared + 15) & ~(size_t)15);
  }

  int columns() const { return params.vocab_size + 1; }
};

// Upper bound of the score of a new label with log-probability 0 after this hypothesis.
inline float best_new_score(const Hypothesis& hypothesis, float beam_beta) {
  return hypothesis.score + beam_beta + hypothesis.lm_bound + hypothesis.boosting_bound;
}

// The score that a new token adds to. A token can follow itself only after a blank: the blank score of a
// hypothesis that ends in a token is -inf, but for merge=prefix.
inline float score_before(const Hypothesis& hypothesis, int column) {
  return column == hypothesis.last_label ? hypothesis.blank_score : hypothesis.score;
}

// `base` plus LM and boosting for a new token: the score, and in `item` the states after it.
// Returns -inf if a partial sum shows that the score is below `floor`. Boosting trees are small and LMs are
// large: the cheap look-up comes first.
inline float fused(
  float base, const Hypothesis& hypothesis, int column, float floor, const UtteranceFusion& fusion,
  CandidateItem& item
) {
  int label = fusion.label_of(column);
  Reading weight{0.0f, hypothesis.lm_state}, bonus{0.0f, hypothesis.boosting_state};
  if (fusion.boosting_weight > 0) {
    bonus = lookup(fusion.boosting, bonus.state, label, negative_infinity());
    bonus.weight *= fusion.boosting_weight;
  }
  if (fusion.lm_weight > 0) {
    float least = least_lm_weight(floor, base, bonus.weight, fusion.lm_weight);
    weight = lookup(fusion.lm, weight.state, label, least);
    weight.weight *= fusion.lm_weight;
  }
  item.lm_state = weight.state;
  item.boosting_state = bonus.state;
  return base + weight.weight + bonus.weight;
}
