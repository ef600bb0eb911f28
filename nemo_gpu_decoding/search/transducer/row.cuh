// The joint's logits for one hypothesis, read as log-probs: a softmax over labels, in TDT one over
// durations beside it. Normalised in double and rounded once, so that CPU and GPU agree.
#pragma once

#include "search/transducer/beam.cuh"

// What turns logits into log-probs. Twin of launch_shape.NORMALISER.
struct Normaliser {
  double label_max, label_log_sum;
  double duration_max, duration_log_sum;
  int bad;  // 1: NaN or +inf among the logits, or nothing is possible
};
static_assert(sizeof(Normaliser) == 40, "Normaliser differs from launch_shape.NORMALISER");

struct Row {
  const Logit* logits;  // [V + 1 (+ D)]
  double inverse_temperature;
  int num_labels;  // V + 1
  int num_durations;  // D
  bool timed;
  Normaliser normaliser;

  Row(const Logit* logits, double inverse_temperature, const Options& options)
      : logits(logits),
        inverse_temperature(inverse_temperature),
        num_labels(options.vocab_size + 1),
        num_durations(options.num_durations),
        timed(options.timed) {}

  double logit(int column) const {
    return to_float(logits[column]) * inverse_temperature;
  }

  float operator[](int label) const {
    return (float)(logit(label) - normaliser.label_max - normaliser.label_log_sum);
  }

  // Log-probability of the d-th duration.
  float duration(int d) const {
    if (!timed) return 0.0f;
    double value = logit(num_labels + d);
    return (float)(value - normaliser.duration_max - normaliser.duration_log_sum);
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

// Fill row.normaliser, alike in all threads. scratch: shared, 32 doubles. Call with all threads.
inline void normalise(Row& row, double* scratch) {
  Normaliser& n = row.normaliser;
  n.duration_max = n.duration_log_sum = 0.0;
  n.bad = normalise_part(row, 0, row.num_labels, scratch, n.label_max, n.label_log_sum);
  if (row.timed && !n.bad) {
    int begin = row.num_labels, end = begin + row.num_durations;
    n.bad = normalise_part(row, begin, end, scratch, n.duration_max, n.duration_log_sum);
  }
}
