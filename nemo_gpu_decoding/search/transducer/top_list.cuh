// The best extensions of one hypothesis found so far, in shared memory, filled by all threads.
//
// Extensions order by score down, then choice up; no two are equal.
#pragma once

#include "search/rank_key.cuh"
#include "search/transducer/beam.cuh"

// LM and boosting after an extension.
struct States {
  int lm;
  int boosting;
};

// What the threads of a block count together.
struct __align__(16) Tally {
  int num_items;
  int num_labels;
  float floor;  // what an extension must reach to be kept
  float threshold;  // log-probability of labels that are looked at first
};
static_assert(sizeof(Tally) == 16, "Tally differs from ListSizes.shared_bytes");

inline int choice_of(uint64 key) { return (int)place_of(key); }

struct TopList {
  uint64* keys;  // [capacity]
  uint64* best_keys;  // [capacity]
  States* states;  // [capacity]
  States* best_states;  // [capacity]
  Tally* tally;
  int capacity;  // at least wanted + threads of the block
  int wanted;  // so many are kept
  float gamma;  // and only those better than the best less this

  // Append an extension, from any thread. The caller sees to it that there is room.
  void append(float score, int choice, int lm_state, int boosting_state) {
    if (!(score >= tally->floor && score > negative_infinity())) return;
    int i = atomicAdd(&tally->num_items, 1);
    keys[i] = rank_key(score, choice);
    states[i] = {lm_state, boosting_state};
  }

  // Empty the list. Call with all threads, at first or after `keep_best`; ends with a barrier.
  void clear() {
    if (thread() == 0) {
      tally->num_items = 0;
      tally->floor = negative_infinity();
    }
    __syncthreads();
  }

  // Make room for one more extension by each thread. `reserved`: an upper bound of the length, the same
  // in all threads. Call with all threads after a barrier; ends with one.
  void make_room(int& reserved) {
    if (reserved + threads() > capacity) {
      reserved = tally->num_items;
      __syncthreads();
    }
    if (reserved + threads() > capacity) reserved = keep_best();
    reserved += threads();
  }

  // Drop all but the best, sort them and raise the floor; returns how many are left. Call with all
  // threads after a barrier; ends with one.
  int keep_best() {
    int count = tally->num_items, kept = min(count, wanted);
    for (int i = thread(); i < count; i += threads()) {
      int rank = 0;
      for (int j = 0; j < count; j++) rank += keys[j] > keys[i];
      if (rank < wanted) {
        best_keys[rank] = keys[i];
        best_states[rank] = states[i];
      }
    }
    __syncthreads();
    for (int i = thread(); i < kept; i += threads()) {
      keys[i] = best_keys[i];
      states[i] = best_states[i];
    }
    if (thread() == 0) {
      tally->num_items = kept;
      float floor = kept == 0 ? negative_infinity() : score_of(best_keys[0]) - gamma;
      tally->floor = kept < wanted ? floor : fmaxf(floor, score_of(best_keys[wanted - 1]));
    }
    __syncthreads();
    return kept;
  }
};
