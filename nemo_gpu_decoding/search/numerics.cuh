// Scores (natural log, float32) and hashes of texts. Counterpart of numerics.py.
#pragma once

#include "cuda/common.cuh"

constexpr uint64 HASH_MULTIPLIER = 6364136223846793005ull;  // Knuth's MMIX generator

// No log-probability exceeds it; above 0 because types such as bfloat16 round.
inline float most_log_prob() { return 0.01f; }

// The score that is to be subtracted from those of a beam, of which this is the first; see numerics.py.
inline float rebased(float score) {
  return fabsf(score) > 4096.0f && fabsf(score) < 3.402823466e38f ? score : 0.0f;
}

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

// The hash of a text after one more token.
inline uint64 extended_hash(uint64 text_hash, int label) {
  return text_hash * HASH_MULTIPLIER + (uint64)(label + 1);
}
