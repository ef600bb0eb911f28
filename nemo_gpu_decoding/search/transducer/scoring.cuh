// Scores of tokens and blanks, with an LM and a boosting tree fused in. Counterpart of scoring.py.
#pragma once

#include "fusion/fusion.cuh"
#include "search/numerics.cuh"
#include "search/transducer/beam.cuh"

// LM, boosting tree and weights of one utterance.
struct UtteranceFusion {
  Automaton lm;
  Automaton boosting;
  float lm_weight;  // 0: no LM
  float boosting_weight;
  double inverse_lm_weight;  // 0: unknown

  float alpha() const { return lm_weight + boosting_weight; }

  // Upper bound of the weighted LM and boosting scores of the next token of a hypothesis.
  float bound(const Hypothesis& hypothesis) const {
    float most = 0.0f;
    if (lm_weight > 0) most = lm_weight * lm.states[hypothesis.lm_state].upper_bound;
    if (boosting_weight > 0) {
      most += boosting_weight * boosting.states[hypothesis.boosting_state].upper_bound;
    }
    return most;
  }
};

// Weighted LM and boosting scores of a token (or a score that contains them), and the states after it.
struct Fused {
  float score;  // -inf if a partial sum shows that it is below `least`
  int lm_state;
  int boosting_state;
};

// Boosting trees are small and LMs are large: the cheap look-up comes first and may make the other one unnecessary.
inline Fused fused_token(
  const UtteranceFusion& fusion, int lm_state, int boosting_state, int label, float least
) {
  Reading weight{0.0f, lm_state}, bonus{0.0f, boosting_state};
  if (fusion.boosting_weight > 0) {
    bonus = lookup(fusion.boosting, boosting_state, label, negative_infinity());
    bonus.weight *= fusion.boosting_weight;
  }
  if (fusion.lm_weight > 0) {
    // a double's division would be a call into a subroutine, and the slack for rounding covers this
    double slack = 1e-6 * fabs((double)least) + 1e-5, scale = fusion.inverse_lm_weight;
    double least_weight = ((double)least - bonus.weight - slack) * scale;
    if (!(scale > 0)) least_weight = negative_infinity();
    weight = lookup(fusion.lm, lm_state, label, least_weight);
    weight.weight *= fusion.lm_weight;
  }
  return {weight.weight + bonus.weight, weight.state, bonus.state};
}

// Score of the blank by eq. 2 (NO_SCORE) or eq. 3 (LM_WEIGHTED_FULL).
inline float fused_blank(float blank_log_prob, const UtteranceFusion& fusion, int blank_mode) {
  return blank_mode == LM_WEIGHTED_FULL ? blank_log_prob * (1.0f + fusion.alpha()) : blank_log_prob;
}

__noinline__ float weighted_offset(float blank_log_prob, float alpha, float ceiling) {
  float blank = fminf((float)exp((double)blank_log_prob), ceiling);
  return (float)log1p(-(double)blank) * alpha;
}

// The term of every token's score besides log p(v) and the weighted LM score.
inline float token_offset(
  float blank_log_prob, const SearchParams& params, const UtteranceFusion& fusion
) {
  const float alpha = fusion.alpha();
  if (params.blank_mode != LM_WEIGHTED_FULL || !(alpha > 0)) return 0.0f;
  return weighted_offset(blank_log_prob, alpha, params.blank_ceiling);
}

// The constants that turn logits into log-probs.
struct Normaliser {
  double label_max, label_log_sum;
  double duration_max, duration_log_sum;
};

// Shared memory of `normalise`.
struct NormaliseScratch {
  double sums[LANES];
  Normaliser own, prefix;  // of the hypothesis, and of one of its prefixes
};

// The joint's logits for one hypothesis, read as log-probs: a softmax over labels, in TDT one over
// durations beside it. Normalised in double and rounded once, so that CPU and GPU agree.
struct Row {
  const Logit* logits;  // [V + 1 (+ D)]
  double inverse_temperature;
  int num_labels;  // V + 1
  int num_durations;  // D
  bool timed;
  const Normaliser* normaliser = nullptr;  // in shared memory, see `normalise`
  const float* log_probs = nullptr;  // [V + 1] in shared memory, if they are stored

  Row(const Logit* logits, double inverse_temperature, const SearchParams& params)
      : logits(logits),
        inverse_temperature(inverse_temperature),
        num_labels(params.vocab_size + 1),
        num_durations(params.num_durations),
        timed(params.timed) {}

  double logit(int column) const {
    return to_float(logits[column]) * inverse_temperature;
  }

  float operator[](int label) const {
    if (log_probs) return log_probs[label];
    return (float)(logit(label) - normaliser->label_max - normaliser->label_log_sum);
  }

  // Compute the log-probs of all labels once and read them from `into` [V + 1] from now on. Call with all threads;
  // ends with a barrier.
  void store(float* into) {
    for (int v = thread(); v < num_labels; v += threads()) into[v] = (*this)[v];
    log_probs = into;
    __syncthreads();
  }

  // Log-probability of the d-th duration.
  float duration(int d) const {
    if (!timed) return 0.0f;
    double value = logit(num_labels + d);
    return (float)(value - normaliser->duration_max - normaliser->duration_log_sum);
  }

  // Index of the most probable duration, the first of equal ones.
  int longest_duration() const {
    int best = 0;
    for (int d = 1; d < num_durations; d++) {
      if (duration(d) > duration(best)) best = d;
    }
    return best;
  }
};

// Score of a label, blank or token, after a hypothesis, with LM and boosting. offset: `token_offset`.
inline Fused fused_label(
  const Row& row, int label, float offset, const Hypothesis& hypothesis, const UtteranceFusion& fusion,
  const SearchParams& params
) {
  Fused fused{0.0f, hypothesis.lm_state, hypothesis.boosting_state};
  if (label == params.vocab_size) {
    fused.score = fused_blank(row[label], fusion, params.blank_mode);
  } else {
    fused = fused_token(fusion, fused.lm_state, fused.boosting_state, label, negative_infinity());
    fused.score = (row[label] + offset) + fused.score;
  }
  return fused;
}

// Maximum and logarithm of the sum of columns begin .. end - 1; true if they are no logits. scratch:
// shared, 32 doubles. Call with all threads.
inline bool normalise_part(
  const Row& row, int begin, int end, double* scratch, double& most, double& log_sum
) {
  double highest = negative_infinity();
  bool bad = false;
  for (int i = begin + thread(); i < end; i += threads()) {
    double value = row.logit(i);
    bad |= value != value;
    highest = fmax(highest, value);
  }
  most = block_reduce(highest, Max{}, scratch);
  if (__syncthreads_or(bad) || !(most - most == 0.0)) return true;  // NaN, +inf or all -inf
  double sum = 0.0;
  for (int i = begin + thread(); i < end; i += threads()) sum += exp(row.logit(i) - most);
  log_sum = log(block_reduce(sum, Sum{}, scratch));
  return false;
}

// Fill the row's normaliser; returns false if its logits are no logits or nothing is possible. normaliser: shared;
// sums: shared, 32 doubles. Call with all threads; ends with a barrier if true.
inline bool normalise(Row& row, Normaliser& normaliser, double* sums) {
  Normaliser n{};
  if (normalise_part(row, 0, row.num_labels, sums, n.label_max, n.label_log_sum)) return false;
  if (row.timed) {
    int begin = row.num_labels, end = begin + row.num_durations;
    if (normalise_part(row, begin, end, sums, n.duration_max, n.duration_log_sum)) return false;
  }
  if (thread() == 0) normaliser = n;
  row.normaliser = &normaliser;
  __syncthreads();
  return true;
}
