// The continuations of a frame that may be among the K best, in shared memory. Twin of candidates.py.
//
// The list is filled in any order by all threads. Candidates order by score down, then parent up, then
// label up, and no two are equal: the rank of a candidate is the number of greater keys.
#pragma once

#include "search/flexctc_beam/beam.cuh"
#include "search/rank_key.cuh"

// One continuation of a hypothesis by the label of a frame.
struct __align__(16) Continuation {
  int parent;  // slot in the beam
  int label;  // ~label for a new token, as in `History`
  int lm_state;  // or ~k: the text of hypothesis k stays as it is, whatever way led to it (merge=prefix)
  int boosting_state;
};

// What the threads of a block count together.
struct __align__(16) Tally {
  uint64 best_key;  // of the candidates seen by `keep_best` and `note_best`; 0: none
  uint64 kth_key;  // the K-th best of them; 0: there are fewer
  int num_candidates;
  int num_labels;
  int num_pairs;
  int beam_size;  // live hypotheses
  uint32 room;  // ordered bits of what a label of log-probability 0 could score at best
};
static_assert(sizeof(Tally) == 48, "Tally differs from LaunchShape.shared_bytes");

struct Candidates {
  Continuation* items;  // [capacity]
  uint64* keys;  // [capacity]
  Continuation* best_items;  // [K], where `keep_best` puts them meanwhile
  uint64* best_keys;  // [K]
  Tally* tally;
  int capacity;  // at least 2 K + threads of the block
  int beam_size;  // K
  int columns;  // V + 1; 2 K (V + 1) fits into 32 bits

  // Equal scores order by parent and label; a label that goes on comes before the same as a new token.
  uint64 key_of(float score, int parent, int label) const {
    uint32 is_new = label < 0;
    uint32 column = is_new ? ~label : label;
    uint32 place = ((uint32)parent * columns + column) * 2 + is_new;
    return rank_key(score, place);
  }

  // Append a candidate, from any thread. The caller sees to it that there is room.
  void append(float score, Continuation item) {
    if (score == negative_infinity()) return;
    int i = atomicAdd(&tally->num_candidates, 1);
    keys[i] = key_of(score, item.parent, item.label);
    items[i] = item;
  }

  // The number of better ones among the first `count`.
  int rank_of(uint64 key, int count) const {
    int rank = 0;
    for (int i = 0; i < count; i++) rank += keys[i] > key;
    return rank;
  }

  // Note the best and the K-th best key in the tally. Call with all threads between two barriers.
  void note_best() {
    int count = tally->num_candidates;
    for (int i = thread(); i < count; i += threads()) note(keys[i], rank_of(keys[i], count));
  }

  // Drop all but the K best, and note as above. Call with all threads after a barrier; ends with one.
  void keep_best() {
    int count = tally->num_candidates, kept = min(count, beam_size);
    for (int i = thread(); i < count; i += threads()) {
      int rank = rank_of(keys[i], count);
      note(keys[i], rank);
      if (rank < beam_size) {
        best_keys[rank] = keys[i];
        best_items[rank] = items[i];
      }
    }
    __syncthreads();
    for (int i = thread(); i < kept; i += threads()) {
      keys[i] = best_keys[i];
      items[i] = best_items[i];
    }
    if (thread() == 0) tally->num_candidates = kept;
    __syncthreads();
  }

  // What a candidate must reach: the K-th best score so far, and the best less the threshold.
  float floor_of(float threshold) const {
    if (tally->best_key == 0) return negative_infinity();
    float floor = score_of(tally->best_key) - threshold;
    return tally->kth_key == 0 ? floor : fmaxf(floor, score_of(tally->kth_key));
  }

  void note(uint64 key, int rank) {
    if (rank == 0) tally->best_key = key;
    if (rank == beam_size - 1) tally->kth_key = key;
  }
};

// No label below this log-probability can reach the floor; with slack for float32 rounding.
inline float least_log_prob(float floor, float room) {
  double slack = 1e-6 * (fabs((double)floor) + fabs((double)room)) + 1e-5;
  return (float)((double)floor - room - slack);
}

// No smaller LM weight lifts base + bonus to the floor; with slack for float32 rounding.
inline double least_lm_weight(float floor, float base, float bonus, float lm_weight) {
  double slack = 1e-6 * (fabs((double)floor) + fabs((double)base)) + 1e-5;
  return ((double)floor - base - bonus - slack) / lm_weight;
}
