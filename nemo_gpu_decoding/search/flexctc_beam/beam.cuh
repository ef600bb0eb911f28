// The beam of an utterance, and what LM and boosting add to it. Counterpart of frame.py.
#pragma once

#include "fusion/fusion.cuh"
#include "search/flexctc_beam/records.cuh"
#include "search/log_space.cuh"
#include "search/text_hash.cuh"

enum Merge { MERGE_MAX = 0, MERGE_SUM = 1, MERGE_PREFIX = 2 };
constexpr int NO_LABEL = -1;
constexpr int FEW_ARCS = 16;  // an LM state with no more has its own arcs offered apart from the scan

// Why a search stands still: Progress.status.
enum Status {
  FINE = 0,
  BAD_INPUT = -1,  // the next frame holds NaN or a value above most_log_prob()
  NO_LABEL_POSSIBLE = -2,  // the next frame leaves no label possible
  BAD_LENGTH = -3,  // the length of the chunk is below 0 or above its T
  BACK_POINTERS_FULL = -4,  // the chunk has more frames than the back-pointers have room for
};

// LM and boosting of one utterance; that of fusion/batch.py, with what they need to know of the columns.
struct UtteranceFusion {
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

  // The most that the LM can add to the next token, where that is not offered apart.
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
