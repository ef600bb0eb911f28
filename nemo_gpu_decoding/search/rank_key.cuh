// What competes for a beam is ranked by keys of 64 bits: a greater key is better. Scores order first, the
// higher the better; equal ones by their index, the lower the better. Where no two are alike, ranks
// do not depend on the order in which threads arrive.
#pragma once

#include "cuda/common.cuh"

inline uint64 rank_key(float score, uint32 index) {
  return (uint64)ordered_key(score + 0.0f) << 32 | ~index;  // -0 becomes +0
}

inline float score_of(uint64 key) { return float_of_key((uint32)(key >> 32)); }

inline uint32 index_of(uint64 key) { return ~(uint32)key; }
