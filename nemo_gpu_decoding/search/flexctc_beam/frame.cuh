// What the steps of a frame share: the row of log-probs, the options and the shared memory of a block.
#pragma once

#include "search/flexctc_beam/candidates.cuh"
#include "search/history.cuh"
#include "search/rows.cuh"

// Options that hold for all utterances, see config.py.
struct Options {
  int beam_size;  // K
  int columns;  // V + 1
  int blank_id;
  int merge;  // Merge
  float beam_beta;
  float threshold;
};

// A text that stays as it is, by a blank or by its last token (merge=prefix).
struct KeptText {
  float blank_score;
  float token_score;
};

// How many entries the lists have; chosen by launch_shape.py, which also sums up the bytes.
struct ListSizes {
  int candidates;  // at least 2 K + threads of the block
  int labels;  // columns scanned together
  int pairs;  // (label, hypothesis) pairs tested together
};

// All that a block works with. The lists are in shared memory, in the order in which they stand here;
// twin of LaunchShape.shared_bytes.
struct Workspace {
  Options options;
  ListSizes sizes;
  Fusion fusion;
  Candidates candidates;
  Hypothesis* beam;  // [K]
  Hypothesis* next;  // [K], in the order of their scores, equal ones not merged yet
  KeptText* kept;  // [K] by hypothesis of the beam
  int* labels;  // [sizes.labels] columns that may enter the beam
  // [sizes.pairs] what may enter the beam: label number * live hypotheses + hypothesis, or
  // ~(hypothesis * FEW_ARCS + arc) for an arc that its LM state has of its own
  int* pairs;
  int* origins;  // [K] candidate that each of `next` comes from: its parent ...
  int* emitted;  // [K] ... and its label
  int* leaders;  // [K] the first of `next` with that text and last label, or -1: below the threshold
  uint8* rows;  // two frames of log-probs, each in row_bytes
  Tally* tally;

  Workspace(uint8* shared, const Options& options, const ListSizes& sizes, const Fusion& fusion)
    : options(options), sizes(sizes), fusion(fusion) {
    int K = options.beam_size;
    tally = take<Tally>(shared, 1);
    candidates.items = take<Continuation>(shared, sizes.candidates);
    candidates.best_items = take<Continuation>(shared, K);
    candidates.keys = take<uint64>(shared, sizes.candidates);
    candidates.best_keys = take<uint64>(shared, K);
    candidates.tally = tally;
    candidates.capacity = sizes.candidates;
    candidates.beam_size = K;
    candidates.columns = options.columns;
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
};

// What a new label of log-probability 0 could score at best after this hypothesis.
inline float room_of(const Hypothesis& hypothesis, float beam_beta) {
  return hypothesis.score + beam_beta + hypothesis.lm_bound + hypothesis.boosting_bound;
}

// `base` plus LM and boosting for a new token: the score, and in `item` the states after it.
// Gives -inf if that is found to be below `floor` on the way; boosting trees are small and LMs large, so
// the cheap look-up comes first.
inline float fused(
  float base, const Hypothesis& hypothesis, int column, float floor, const Fusion& fusion,
  Continuation& item
) {
  int label = fusion.label_of(column);
  Reading weight{0.0f, hypothesis.lm_state}, bonus{0.0f, hypothesis.boosting_state};
  if (fusion.boosting_weight > 0) {
    bonus = lookup(fusion.boosting, bonus.state, label, negative_infinity());
    bonus.weight *= fusion.boosting_weight;
  }
  if (fusion.lm_weight > 0) {
    double least = least_lm_weight(floor, base, bonus.weight, fusion.lm_weight);
    weight = lookup(fusion.lm, weight.state, label, least);
    weight.weight *= fusion.lm_weight;
  }
  item.lm_state = weight.state;
  item.boosting_state = bonus.state;
  return base + weight.weight + bonus.weight;
}
