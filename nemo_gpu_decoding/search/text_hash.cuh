// Texts of hypotheses are compared by a hash of 64 bits, extended token by token. See text_hash.py.
#pragma once

#include "cuda/common.cuh"

constexpr uint64 HASH_MULTIPLIER = 6364136223846793005ull;  // Knuth's MMIX generator

// The hash of a text after one more token.
inline uint64 extended_hash(uint64 text_hash, int label) {
  return text_hash * HASH_MULTIPLIER + (uint64)(label + 1);
}
