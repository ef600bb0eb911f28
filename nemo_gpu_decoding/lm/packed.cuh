// Counterpart of lm/packed.py on the device: n-gram LMs in packed form.
//
// Sums have the order of packed.py, so that CPU and GPU results are equal to the bit. Each array may be in
// device memory or in pinned host memory.
#pragma once

#include "lm/records.cuh"

constexpr int LM_COST_BITS = 32;  // packed.COST_BITS
constexpr int64 LM_ROOT = 0;  // packed.ROOT

struct PackedLM {  // packed.PackedArrays
  Global<const LmState> states;  // [S + 1]
  Global<const uint64> labels;  // A labels, packed
  Global<const uint64> arcs;  // A pairs (target, cost), packed
  int label_bits, target_bits;
};

// The cost (natural log) of a label, and the state after it.
struct LMStep {
  float cost;
  int64 target;
};

// Integer `index` of a packed array, see packed.py; at most 63 bits.
inline uint64 read_bits(const uint64* words, int bits, int64 index) {
  int64 position = index * bits;
  const uint64* word = words + (position >> 6);
  int shift = int(position & 63);
  // shifted in two steps, because a shift by all 64 bits is undefined
  return ((word[0] >> shift) | (word[1] << 1 << (63 - shift))) & ((1ull << bits) - 1);
}

inline int64 arc_label(const PackedLM& lm, int64 arc) {
  return int64(read_bits(lm.labels, lm.label_bits, arc));
}

// The bits of an arc, see packed.py.
inline uint64 arc_bits(const PackedLM& lm, int64 arc) {
  return read_bits(lm.arcs, lm.target_bits + LM_COST_BITS, arc);
}

inline LMStep cost_and_target(const PackedLM& lm, uint64 bits) {
  int64 target = int64(bits & ((1ull << lm.target_bits) - 1));
  return {__uint_as_float(uint32(bits >> lm.target_bits)), target};
}

// The state's own arc with `label`, or -1.
inline int64 find_arc(const PackedLM& lm, int64 state, int64 label) {
  if (state == LM_ROOT) return label;
  const int64 end = lm.states[state + 1].arc_begin;
  const int64 low =  // one label per step: three would spill registers in the calling kernel
    first_not_below<true>(int64(lm.states[state].arc_begin), end, label, [&](int64 arc) { return arc_label(lm, arc); });
  return low < end && arc_label(lm, low) == label ? low : -1;
}

// Cost of `label`, 0 .. V - 1, after `state`, including back-offs, and the state after it.
// bits_of(arc): reads the bits of an arc, for example through a cache.
template <class BitsOf>
inline LMStep lookup_by(const PackedLM& lm, int64 state, int64 label, BitsOf bits_of) {
  float cost = 0.0f;
  while (true) {
    int64 arc = find_arc(lm, state, label);
    if (arc >= 0) {
      LMStep step = cost_and_target(lm, bits_of(arc));
      return {cost + step.cost, step.target};
    }
    cost += lm.states[state].backoff_cost;
    state = lm.states[state].backoff_to;  // ends at the latest in the root, which has every label
  }
}

inline LMStep lookup(const PackedLM& lm, int64 state, int64 label) {
  return lookup_by(lm, state, label, [&](int64 arc) { return arc_bits(lm, arc); });
}
