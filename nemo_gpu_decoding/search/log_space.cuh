// Scores are natural logarithms, float32. Counterpart of log_space.py.
#pragma once

#include "cuda/common.cuh"

// No log-probability exceeds it; above 0 because types such as bfloat16 round.
inline float most_log_prob() { return 0.01f; }

// log(exp(a) + exp(b)), rounded once: in double, libraries and devices agree to the last bit.
inline float log_add(float a, float b) {
  if (a < b) {
    float swap = a;
    a = b;
    b = swap;
  }
  if (b == negative_infinity()) return a;
  return (float)(a + log1p(exp((double)b - (double)a)));
}
