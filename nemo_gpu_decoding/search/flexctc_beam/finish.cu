// Final and partial results: final weights, n-best order, trace-back. The steps of finish.py, one block per
// utterance.

#include "search/flexctc_beam/beam.cuh"
#include "search/flexctc_beam/backpointers.cuh"

constexpr int MAX_THREADS = 256;

// The hypotheses of one utterance and their order; arrays are in shared memory.
struct Ending {
  Hypothesis* beam;  // [K], `size` of them are live
  float* scores;  // [K], with final weights if the utterance has ended
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

  // The number of k in the order of merged scores, equal ones by slot.
  int rank_of(int k) const {
    int rank = 0;
    for (int i = 0; i < size; i++) {
      rank += merged[i] > merged[k] || (merged[i] == merged[k] && i < k);
    }
    return rank;
  }

  // Order the texts and write the scores of the N best; true if any score is finite. Call with all threads,
  // each of which has fetched the hypotheses that it reads first. Ends with a barrier.
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

// Frames at the beginning of utterance b that its hypotheses share, from one common ancestor. Call with all threads
// behind a barrier; overwrites the order. Ends with a barrier.
inline int64 shared_frames(
  const BackPointers& back_pointers, BackPointerTile& tile, int b, int64 frames, const Ending& ending
) {
  int* slots = ending.order;
  for (int k = thread(); k < ending.size; k += threads()) slots[k] = k;
  __syncthreads();
  int64 t = frames, begin = frames;
  while (t > 0) {
    bool differs = false;
    for (int k = thread(); k < ending.size; k += threads()) differs |= slots[k] != slots[0];
    if (!__syncthreads_or(differs)) break;
    if (t == begin) {
      begin = t > tile.frames ? t - tile.frames : 0;
      tile.fetch(back_pointers, b, begin, t);
      __syncthreads();
    }
    t--;
    for (int k = thread(); k < ending.size; k += threads()) {
      slots[k] = tile.parents[(int)(t - begin) * back_pointers.beam_size + slots[k]];
    }
    __syncthreads();
  }
  return t;
}

// Sort the hypotheses of utterance rows[r], r = blockIdx.x, and trace back the N best with different texts.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1) finish(const FinishArgs args) {
  extern __shared__ __align__(16) unsigned char smem[];
  const int64 r = blockIdx.x, first_frame = args.first[r];
  const int b = args.rows[r], beam_size = args.beam_size, n_best = args.n_best;
  const Progress now = args.progress[b];
  const BackPointers back_pointers{
    args.back_pointer_labels, args.back_pointer_parents, args.back_pointer_log_probs, args.capacity,
    beam_size,
  };
  Ending ending;
  ending.beam = (Hypothesis*)smem;
  ending.scores = (float*)(ending.beam + beam_size);
  ending.merged = ending.scores + beam_size;
  ending.order = (int*)(ending.merged + beam_size);
  ending.size = now.frames == 0 ? 1 : now.size;
  ending.n_best = n_best;
  ending.merge = args.params.merge;
  ending.utterance = args.utterances[b];
  ending.lm_states = args.lm_states;
  ending.boosting_states = args.boosting_states;
  BackPointerTile tile((uint8*)(ending.order + beam_size), args.tile_frames, beam_size);

  const Hypothesis* stored = args.beams + (int64)b * beam_size;
  for (int k = thread(); k < ending.size; k += threads()) {
    ending.beam[k] = now.frames == 0 ? first_hypothesis(ending.utterance) : stored[k];
  }
  float* best_scores = args.scores + r * n_best;
  bool left_out = args.final && !ending.sort(true, best_scores);
  // the LM forbids the end after every hypothesis: return them without final weights
  if (!args.final || left_out) ending.sort(false, best_scores);
  if (thread() == 0) {
    args.reached[r] = now;
    args.without_final[r] = left_out;
  }
  for (int n = thread(); n < n_best; n += threads()) args.order[r * n_best + n] = ending.order[n];

  const Trace all{
    args.tokens, args.frames, args.repeats, args.confidence, args.alignment, args.alignment_log_probs,
  };
  for (int first = 0; first < n_best; first += threads()) {  // one thread per path
    int n = first + thread();
    TraceBack back{n < n_best ? ending.order[n] : -1, first_frame};
    const Trace trace = all.of(r * n_best + n, args.max_tokens);
    for (int64 end = now.frames; end > first_frame; end -= tile.frames) {
      int64 begin = end - first_frame > tile.frames ? end - tile.frames : first_frame;
      __syncthreads();
      tile.fetch(back_pointers, b, begin, end);
      __syncthreads();
      if (back.slot >= 0) back.follow(tile, begin, end, beam_size, args.params.blank_id, trace);
    }
    if (n < n_best) args.lengths[r * n_best + n] = back.count;
  }
  __syncthreads();
  int64 shared = args.final ? now.frames : shared_frames(back_pointers, tile, b, now.frames, ending);
  if (thread() == 0) args.shared[r] = shared;
  for (int n = 0; n < n_best; n++) {
    reverse(all.of(r * n_best + n, args.max_tokens), args.lengths[r * n_best + n]);
  }
}
