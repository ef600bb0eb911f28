// What flexctc_beam remembers of an utterance between frames and launches. Twin of cpu.HYPOTHESIS.
#pragma once

#include "fusion/fusion.cuh"
#include "search/log_space.cuh"
#include "search/text_hash.cuh"

enum Merge { MERGE_MAX = 0, MERGE_SUM = 1, MERGE_PREFIX = 2 };
constexpr int NO_LABEL = -1;
constexpr int FEW_ARCS = 16;  // an LM state with no more has its own arcs offered apart from the scan

// One hypothesis of the beam. Scores are natural log.
struct Hypothesis {
  float score;
  int last_label;  // of the last frame (max, sum) or last token (prefix); or NO_LABEL
  uint64 text_hash;
  int length;  // tokens so far
  int lm_state;
  int boosting_state;
  float lm_bound;  // what LM and boosting can add to the next token at most, weighted
  float boosting_bound;
  // merge=prefix only: the probability of the text, split by what its alignments end in
  float blank_score;
  float token_score;
  uint64 parent_hash;  // of the text without its last token
};
static_assert(sizeof(Hypothesis) == HYPOTHESIS_BYTES, "Hypothesis differs from cpu.HYPOTHESIS");

// What an utterance wants; stays the same from its first frame to its last. Twin of cuda.UTTERANCE.
struct Utterance {
  int lm_start;  // states before the first token
  int boosting_start;
  float lm_weight;  // 0: no LM
  float boosting_weight;
};
static_assert(sizeof(Utterance) == 16, "Utterance differs from cuda.UTTERANCE");

// How far an utterance has come. Twin of cuda.PROGRESS. All zeros: nothing read yet.
struct Progress {
  int size;  // hypotheses in the beam; what the beam holds counts from the first frame on
  int status;  // Status: 0, or why the search stands still
  int64 frames;  // frames read
};
static_assert(sizeof(Progress) == 16, "Progress differs from cuda.PROGRESS");

enum Status {
  FINE = 0,
  BAD_INPUT = -1,  // the next frame holds NaN or +inf
  NO_LABEL_POSSIBLE = -2,  // the next frame leaves no label possible
  BAD_LENGTH = -3,  // the length of the chunk is below 0 or above its T
  HISTORY_FULL = -4,  // the chunk has more frames than the history has room for
};

// What is added to the acoustic score of one utterance.
struct Fusion {
  Automaton lm;
  Automaton boosting;
  float lm_weight;  // 0: no LM
  float boosting_weight;
  int blank_id;

  // Automata number the labels without the blank.
  int label_of(int column) const { return column > blank_id ? column - 1 : column; }

  int column_of(int label) const { return label >= blank_id ? label + 1 : label; }

  // Whether the labels that the LM state has arcs for are offered apart from the scan of the row.
  bool offers_arcs(const State& state) const {
    return lm_weight > 0 && state.arc_end - state.arc_begin <= FEW_ARCS;
  }

  // What the LM can add to the next token at most, where that is not offered apart.
  float lm_bound(int number) const {
    if (!(lm_weight > 0)) return 0.0f;
    const State& state = lm.states[number];
    return lm_weight * (offers_arcs(state) ? state.backoff_bound : state.upper_bound);
  }

  float boosting_bound(int state) const {
    return boosting_weight > 0 ? boosting_weight * boosting.states[state].upper_bound : 0.0f;
  }
};

// The beam before the first frame: the empty text in slot 0.
inline Hypothesis first_hypothesis(const Utterance& utterance) {
  Hypothesis first{};
  first.last_label = NO_LABEL;
  first.lm_state = utterance.lm_start;
  first.boosting_state = utterance.boosting_start;
  first.token_score = negative_infinity();
  return first;
}

inline bool same_text(const Hypothesis& a, const Hypothesis& b) {
  return a.text_hash == b.text_hash && a.length == b.length;
}
