// The beam of an utterance, and what LM and boosting add to it. Counterpart of scoring.py.
#pragma once

#include "fusion/fusion.cuh"
#include "search/flexctc_beam/records.cuh"
#include "search/numerics.cuh"

constexpr int FEW_ARCS = 16;  // the arcs of LM states with at most this many are offered one by one

// LM and boosting of one utterance, as in fusion/batch.py, and the column of the blank.
struct UtteranceFusion {
  Automaton lm;
  Automaton boosting;
  float lm_weight;  // 0: no LM
  float boosting_weight;
  int blank_id;

  // Automata number the labels without the blank.
  int label_of(int column) const { return column > blank_id ? column - 1 : column; }

  int column_of(int label) const { return label >= blank_id ? label + 1 : label; }

  // Whether the labels of the LM state's own arcs are offered one by one, before the scan of the row.
  bool offers_arcs(const State& state) const {
    return lm_weight > 0 && state.arc_end - state.arc_begin <= FEW_ARCS;
  }

  // Upper bound of the weighted LM score of the next token, except for labels that are offered one by one.
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
