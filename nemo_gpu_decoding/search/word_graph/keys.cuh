// Keys of tokens, the records that contain keys, and the word graph. Counterpart of keys.py.
//
//   COMPOSE=0  int64  graph state, boosting state, last label + 1 (0 after a blank)
//   COMPOSE=1  LmKey  the same, and the LM context: the states of both LMs (paged_biglm)
#pragma once

#include "fusion/fusion.cuh"
#include "search/word_graph/kernel_abi.cuh"

#ifndef COMPOSE
#define COMPOSE 0
#endif

#if COMPOSE
typedef LmKey Key;
typedef LmToken Token;
typedef LmCandidate Candidate;
typedef LmEntry Entry;
#else
typedef int64 Key;
typedef PlainToken Token;
typedef PlainCandidate Candidate;
typedef PlainEntry Entry;
#endif

inline int64 key_of(int state, int boost, int label) {
  return (int64)state << 32 | (int64)boost << 16 | label;
}
inline int state_of(int64 key) { return (int)(key >> 32); }
inline int boost_of(int64 key) { return (int)(key >> 16) & 0xffff; }
inline int label_of(int64 key) { return (int)key & 0xffff; }
inline int64 after_blank(int64 key) { return key - label_of(key); }
inline uint64 hash_of(int64 key) { return (uint64)key * 0x9e3779b97f4a7c15ull; }

inline int state_of(const LmKey& key) { return state_of(key.key); }
inline int boost_of(const LmKey& key) { return boost_of(key.key); }
inline int label_of(const LmKey& key) { return label_of(key.key); }
inline LmKey after_blank(const LmKey& key) { return {after_blank(key.key), key.lm}; }
inline uint64 hash_of(const LmKey& key) {
  return ((uint64)key.key ^ (uint64)key.lm * 0xc2b2ae3d27d4eb4full) * 0x9e3779b97f4a7c15ull;
}
inline bool operator==(const LmKey& a, const LmKey& b) { return a.key == b.key && a.lm == b.lm; }
inline bool operator!=(const LmKey& a, const LmKey& b) { return !(a == b); }
inline bool operator<(const LmKey& a, const LmKey& b) {
  return a.key != b.key ? a.key < b.key : a.lm < b.lm;
}

struct Graph {
  Global<const GraphState> states;  // [S]
  Global<const GraphArc> arcs;  // [A], the arcs of a state are sorted by ilabel
  Global<const Epsilon> epsilons;  // [E], arcs of the epsilon closure
  Global<const int> word_sequences;  // [C, 2]: the word-sequence label num_words + i stands for these two labels
  int num_words;
};

// Options of the batch and of one utterance.
struct Search : SearchParams, StreamParams {};

enum Topology { COMPACT, NORMAL, MINIMAL, GRAPH };  // graph/csr.py
enum Move { BLANK_MOVE = -2, REPEAT_MOVE = -1, NEW_TOKEN = 0 };  // the first two stand in place of an arc
enum Status { DONE, BAD_FRAME, NO_TOKEN, BACK_POINTERS_FULL, LINKS_FULL, GROUPS_FULL };
constexpr int NONE = -1;
constexpr int BINS = 256;  // of the histogram of costs
constexpr float WIDENING = 1.25f;  // factor of the beam if fewer than min_active tokens are within it
constexpr float WIDEST = 16.0f;  // the beam of a frame is widened while it is narrower than this times the beam

// A number with the order of candidates: by cost, then by the hash of the key.
constexpr int64 ANY_RANK = 0x7fffffffffffffffll;
constexpr int HASH_BITS = 31;
inline int64 rank_of(float cost, const Key& key) {
  int bits = __float_as_int(cost + 0.0f);  // -0 becomes +0
  int64 ordered = bits < 0 ? -(int64)(bits & 0x7fffffff) : bits;
  return ordered * (1ll << HASH_BITS) + (int64)(hash_of(key) >> (64 - HASH_BITS));
}

// The first arc of a state whose label is not below `label`.
inline int first_arc(const Graph& graph, const GraphState& state, int label) {
  return first_not_below(state.arc_begin, state.arc_end, label, [&](int arc) { return graph.arcs[arc].ilabel; });
}
