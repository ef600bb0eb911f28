// The word graph and the parameters of its search.
#pragma once

#include "fusion/fusion.cuh"
#include "search/word_graph/keys.cuh"

struct Graph {
  const GraphState* states;  // [S]
  const GraphArc* arcs;  // [A], those of a state sorted by label
  const Epsilon* epsilons;  // [E], arcs of the epsilon closure
  const int* word_sequences;  // [C, 2]: the word-sequence label num_words + i stands for these two labels
  int num_words;
};

// Options of the batch and of one utterance.
struct Search : SearchParams, StreamParams {};

enum Topology { COMPACT, NORMAL, MINIMAL, GRAPH };  // graph/topology.py
enum Move { BLANK_MOVE = -2, REPEAT_MOVE = -1, NEW_TOKEN = 0 };  // the former two in place of an arc
// what a frame may end with
enum Status { DONE, BAD_FRAME, NO_TOKEN, BACK_POINTERS_FULL, LINKS_FULL, GROUPS_FULL };
constexpr int NONE = -1;
constexpr int BINS = 256;  // of the histogram of costs

// A number that orders candidates by cost, and keys of equal cost somehow, but always alike.
constexpr int64 ANY_RANK = 0x7fffffffffffffffll;
constexpr int HASH_BITS = 31;
inline int64 rank_of(float cost, const Key& key) {
  int bits = __float_as_int(cost + 0.0f);  // -0 becomes +0
  int64 ordered = bits < 0 ? -(int64)(bits & 0x7fffffff) : bits;
  return ordered * (1ll << HASH_BITS) + (int64)(hash_of(key) >> (64 - HASH_BITS));
}

// The first arc of the state with a label that is not smaller.
inline int first_arc(const Graph& graph, const GraphState& state, int label) {
  return first_not_below(state.arc_begin, state.arc_end, label, [&](int arc) { return graph.arcs[arc].ilabel; });
}
