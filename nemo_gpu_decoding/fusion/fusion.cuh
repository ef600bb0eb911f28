// Look up labels in back-off automata; counterpart of automaton.py.
//
// Sums are formed in the order of automaton.py, so that CPU and GPU agree to the bit (no contraction of
// a * b + c: compile with --fmad=false).
#pragma once

#include "cuda/common.cuh"
#include "fusion/automaton.cuh"

// One or several back-off automata over the labels 0 .. vocab_size - 1.
struct Automaton {
  Global<const State> states;  // [S]
  Global<const Arc> arcs;  // [A], grouped by state; within a state sorted by label
  int vocab_size;
};

// The result of reading a label.
struct Reading {
  float weight;  // natural log; -inf: below `least`
  int state;  // the state after it
};

// The number of the state's own arc for `label`, or -1; HALVES: see first_not_below.
template <bool HALVES = false>
inline int find_arc(const Automaton& automaton, const State& state, int label) {
  int low = state.arc_begin;
  if (state.arc_end - low == automaton.vocab_size) return low + label;
  const auto label_at = [&](int arc) { return automaton.arcs[arc].label; };
  low = first_not_below<HALVES>(low, state.arc_end, label, label_at);
  return low < state.arc_end && automaton.arcs[low].label == label ? low : -1;
}

// Weight of `label` in state number `number`, and the state after it; see automaton.py.
// Returns weight -inf as soon as bounds show that the weight is below `least` (float or double).
template <bool HALVES = false, class Number>
inline Reading lookup(const Automaton& automaton, int number, int label, Number least) {
  float weight = 0.0f;
  while (true) {
    const State state = automaton.states[number];
    int arc = find_arc<HALVES>(automaton, state, label);
    if (arc >= 0) return {weight + automaton.arcs[arc].weight, automaton.arcs[arc].target};
    if (!(weight + state.backoff_bound >= least)) return {negative_infinity(), number};
    weight += state.backoff_weight;
    number = state.backoff_to;  // ends at the latest in a root, which has every label
  }
}
