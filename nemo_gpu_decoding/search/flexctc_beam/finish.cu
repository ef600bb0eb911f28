// The end of an utterance, or a look at it on the way: final weights, equal texts merged, the N best and
// their way back through the history. The steps of cpu.finish, one block per utterance.
#ifndef HYPOTHESIS_BYTES
#define HYPOTHESIS_BYTES 56
#endif

#include "cuda/common.cuh"
#include "search/flexctc_beam/beam.cuh"
#include "search/history.cuh"

constexpr int MAX_THREADS = 256;

// The hypotheses of one utterance and what orders them; arrays are in shared memory.
struct Ending {
  Hypothesis* beam;  // [K], `size` of them are live
  float* scores;  // [K], with final weights if they count
  float* merged;  // [K], equal texts recombined: -inf where another is kept
  int* order;  // [N] slots, best first, -1 where there are fewer
  int size;
  int n_best;  // N
  int merge;
  Utterance utterance;
  const State* lm_states;
  const State* boosting_states;

  float final_weights(const Hypothesis& hypothesis, float score) const {
    if (utterance.lm_weight > 0) {
      score += utterance.lm_weight * lm_states[hypothesis.lm_state].final_weight;
    }
    if (utterance.boosting_weight > 0) {
      score += utterance.boosting_weight * boosting_states[hypothesis.boosting_state].final_weight;
    }
    return score;
  }

  // At most two hypotheses share a text, of which one ends in a blank.
  float merged_score(int k) const {
    for (int i = 0; i < size; i++) {
      if (i == k || !same_text(beam[i], beam[k])) continue;
      if (scores[i] > scores[k] || (scores[i] == scores[k] && i < k)) return negative_infinity();
      return merge == MERGE_SUM ? log_add(scores[k], scores[i]) : scores[k];
    }
    return scores[k];
  }

  // The place of k in the order of merged scores, equal ones by slot.
  int rank_of(int k) const {
    int rank = 0;
    for (int i = 0; i < size; i++) {
      rank += merged[i] > merged[k] || (merged[i] == merged[k] && i < k);
    }
    return rank;
  }

  // Order the texts and write the scores of the N best. True if there is any with a finite score.
  // Call with all threads; each reads first the hypotheses that it has brought. Ends with a barrier.
  bool sort(bool final, float* best_scores) {
    for (int k = thread(); k < size; k += threads()) {
      scores[k] = final ? final_weights(beam[k], beam[k].score) : beam[k].score;
    }
    for (int n = thread(); n < n_best; n += threads()) order[n] = -1;
    __syncthreads();
    bool any = false;
    for (int k = thread(); k < size; k += threads()) {
      merged[k] = merged_score(k);
      any |= merged[k] > negative_infinity();
    }
    any = __syncthreads_or(any);
    for (int k = thread(); k < size; k += threads()) {
      int rank = rank_of(k);
      if (rank >= n_best || !(merged[k] > negative_infinity())) continue;
      order[rank] = k;
      best_scores[rank] = merged[k];
    }
    __syncthreads();
    return any;
  }
};

// Sort the hypotheses of every utterance b = blockIdx.x and trace back the N best with different texts.
extern "C" __global__ void __launch_bounds__(MAX_THREADS) finish(
  const Utterance* utterances,  // [B]
  const Hypothesis* beams,  // [B, K]
  const Progress* progress,  // [B]
  int* history_labels,  // [B, capacity, K]
  short* history_parents,  // [B, capacity, K]
  float* history_log_probs,  // [B, capacity, K]
  const State* lm_states,  // [S]
  const State* boosting_states,  // [S']
  // results: N paths of each utterance, with room for T tokens each
  Progress* reached,  // [B] a copy of `progress`, so that all results lie together
  int* without_final,  // [B] 1: the LM forbids the end everywhere, so final weights were left out
  int* order,  // [B, N] slots, best first, -1 where there are fewer
  float* scores,  // [B, N]
  int* lengths,  // [B, N] tokens of each path
  int* tokens, int* frames, int* repeats,  // [B, N, T]
  float* confidence,  // [B, N, T]
  int* alignment, float* alignment_log_probs,  // [B, N, T], or null
  int capacity, int beam_size, int n_best, int room,  // capacity of the history, K, N, T
  int blank_id, int merge, int final,
  int tile_frames  // frames of the history in shared memory at a time
) {
  extern __shared__ __align__(16) unsigned char smem[];
  const int b = blockIdx.x;
  const Progress now = progress[b];
  const History history{history_labels, history_parents, history_log_probs, capacity, beam_size};
  Ending ending;
  ending.beam = (Hypothesis*)smem;
  ending.scores = (float*)(ending.beam + beam_size);
  ending.merged = ending.scores + beam_size;
  ending.order = (int*)(ending.merged + beam_size);
  ending.size = now.frames == 0 ? 1 : now.size;
  ending.n_best = n_best;
  ending.merge = merge;
  ending.utterance = utterances[b];
  ending.lm_states = lm_states;
  ending.boosting_states = boosting_states;
  HistoryTile tile((uint8*)(ending.order + beam_size), tile_frames, beam_size);

  const Hypothesis* stored = beams + (int64)b * beam_size;
  for (int k = thread(); k < ending.size; k += threads()) {
    ending.beam[k] = now.frames == 0 ? first_hypothesis(ending.utterance) : stored[k];
  }
  float* best_scores = scores + (int64)b * n_best;
  bool left_out = final && !ending.sort(true, best_scores);
  // an LM may forbid the end everywhere: better a result than none
  if (!final || left_out) ending.sort(false, best_scores);
  if (thread() == 0) {
    reached[b] = now;
    without_final[b] = left_out;
  }
  for (int n = thread(); n < n_best; n += threads()) order[(int64)b * n_best + n] = ending.order[n];

  const Trace all{tokens, frames, repeats, confidence, alignment, alignment_log_probs};
  for (int first = 0; first < n_best; first += threads()) {  // one thread per path
    int n = first + thread();
    TraceBack back{n < n_best ? ending.order[n] : -1};
    const Trace trace = all.of((int64)b * n_best + n, room);
    for (int64 end = now.frames; end > 0; end -= tile.frames) {
      int64 begin = end > tile.frames ? end - tile.frames : 0;
      __syncthreads();
      tile.fetch(history, b, begin, end);
      __syncthreads();
      if (back.slot >= 0) back.follow(tile, begin, end, beam_size, blank_id, trace);
    }
    if (n < n_best) lengths[(int64)b * n_best + n] = back.count;
  }
  __syncthreads();
  for (int n = 0; n < n_best; n++) {
    reverse(all.of((int64)b * n_best + n, room), lengths[(int64)b * n_best + n]);
  }
}
