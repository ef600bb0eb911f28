// What tells tokens apart. Twin of key_of and hash_of in word_graph/tokens.py and word_graph/composition/tokens.py.
//
// The macro TOKEN_KEY says which key the tokens of a kernel have:
//
//   int64       graph state, boosting state, last label + 1 (0 after a blank)
//   HistoryKey  the same, and the states of two LMs (paged_biglm)
#pragma once

#include "cuda/common.cuh"

#ifndef TOKEN_KEY
#define TOKEN_KEY int64
#endif

inline int64 key_of(int state, int boost, int label) {
  return (int64)state << 32 | (int64)boost << 16 | label;
}
inline int state_of(int64 key) { return (int)(key >> 32); }
inline int boost_of(int64 key) { return (int)(key >> 16) & 0xffff; }
inline int label_of(int64 key) { return (int)key & 0xffff; }
inline int64 after_blank(int64 key) { return key - label_of(key); }
inline uint64 hash_of(int64 key) { return (uint64)key * 0x9e3779b97f4a7c15ull; }

struct HistoryKey {
  int64 key;
  int64 lm;  // of the large LM in the upper half, of the small one in the lower half
};

inline int state_of(const HistoryKey& key) { return state_of(key.key); }
inline int boost_of(const HistoryKey& key) { return boost_of(key.key); }
inline int label_of(const HistoryKey& key) { return label_of(key.key); }
inline HistoryKey after_blank(const HistoryKey& key) { return {after_blank(key.key), key.lm}; }
inline uint64 hash_of(const HistoryKey& key) {
  return ((uint64)key.key ^ (uint64)key.lm * 0xc2b2ae3d27d4eb4full) * 0x9e3779b97f4a7c15ull;
}
inline bool operator==(const HistoryKey& a, const HistoryKey& b) { return a.key == b.key && a.lm == b.lm; }
inline bool operator!=(const HistoryKey& a, const HistoryKey& b) { return !(a == b); }
inline bool operator<(const HistoryKey& a, const HistoryKey& b) {
  return a.key != b.key ? a.key < b.key : a.lm < b.lm;
}

typedef TOKEN_KEY Key;
