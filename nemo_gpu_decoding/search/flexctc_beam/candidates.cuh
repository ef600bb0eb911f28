// The candidates of a frame: continuations that may be among the K best, in shared memory. Counterpart of `Candidates` in
// search/numerics.py.
//
// The list is filled in any order by all threads. Candidates order by score down, then parent up, then
// label up, and no two are equal: the rank of a candidate is the number of greater keys.
#pragma once

#include "search/flexctc_beam/beam.cuh"
#include "search/rank_key.cuh"

struct Candidates {
  CandidateItem* items;  // [capacity]
  uint64* keys;  // [capacity]
  CandidateItem* best_items;  // [K], where `keep_best` puts them meanwhile
  uint64* best_keys;  // [K]
  Counters* counters;
  int capacity;  // at least 2 K + threads of the block
  int beam_size;  // K
  int columns;  // V + 1; 2 K (V + 1) fits into 32 bits

  // Ties: ascending parent, then `choice` of search/numerics.py.
  uint64 key_of(float score, int parent, int label) const {
    uint32 is_new = label < 0;
    uint32 column = is_new ? ~label : label;
    uint32 order = ((uint32)parent * columns + column) * 2 + is_new;
    return rank_key(score, order);
  }

  // Append a candidate, from any thread. The caller has reserved an entry.
  void append(float score, CandidateItem item) {
    if (score == negative_infinity()) return;
    int i = atomicAdd(&counters->num_candidates, 1);
    keys[i] = key_of(score, item.parent, item.label);
    items[i] = item;
  }

  // The number of better candidates among the first `count`, counted by a team. Call with all lanes of a warp.
  int rank_of(uint64 key, int count) const {
    int rank = 0;
    for (int i = team_lane(); i < count; i += TEAM) rank += keys[i] > key;
    return team_reduce(rank, Sum());
  }

  // Note the best and the K-th best key in the counters. Call with all threads between two barriers.
  void note_best() {
    int count = counters->num_candidates;
    for (int first = 0; first < count; first += teams()) {
      int i = first + team();
      uint64 key = i < count ? keys[i] : 0;
      int rank = rank_of(key, count);
      if (i < count && team_lane() == 0) note(key, rank);
    }
  }

  // Drop all but the K best, and note as above. Call with all threads after a barrier; ends with one.
  void keep_best() {
    int count = counters->num_candidates, kept = min(count, beam_size);
    for (int first = 0; first < count; first += teams()) {
      int i = first + team();
      uint64 key = i < count ? keys[i] : 0;
      int rank = rank_of(key, count);
      if (i >= count || team_lane() != 0) continue;
      note(key, rank);
      if (rank < beam_size) {
        best_keys[rank] = key;
        best_items[rank] = items[i];
      }
    }
    __syncthreads();
    for (int i = thread(); i < kept; i += threads()) {
      keys[i] = best_keys[i];
      items[i] = best_items[i];
    }
    if (thread() == 0) counters->num_candidates = kept;
    __syncthreads();
  }

  // The score that a candidate must reach: the K-th best score so far, and the best less the threshold.
  float floor_of(float threshold) const {
    if (counters->best_key == 0) return negative_infinity();
    float floor = score_of(counters->best_key) - threshold;
    return counters->kth_key == 0 ? floor : fmaxf(floor, score_of(counters->kth_key));
  }

  void note(uint64 key, int rank) {
    if (rank == 0) counters->best_key = key;
    if (rank == beam_size - 1) counters->kth_key = key;
  }
};

// Lower bound of the log-probability of labels that can reach the floor, with slack for float32 rounding.
// best: upper bound of the score of a label with log-probability 0.
inline float least_log_prob(float floor, float best) {
  float slack = 2e-6f * (fabsf(floor) + fabsf(best)) + 1e-5f;
  return floor - best - slack;
}

// Lower bound of the LM weights with which base + bonus reaches the floor, with slack for float32 rounding.
inline float least_lm_weight(float floor, float base, float bonus, float lm_weight) {
  float slack = 2e-6f * (fabsf(floor) + fabsf(base) + fabsf(bonus)) + 1e-5f;
  return (floor - base - bonus - slack) / lm_weight;
}
