// Token keys: what a token is known by, and the records that hold a key. Counterpart of key_of and
// hash_of on the CPU.
//
//   COMPOSE=0  int64  graph state, boosting state, last label + 1 (0 after a blank)
//   COMPOSE=1  LmKey  the same, and the LM context: the states of two LMs (paged_biglm)
#pragma once

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
