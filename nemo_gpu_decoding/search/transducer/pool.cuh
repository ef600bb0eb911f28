// The candidates for the beam in a step of aes_pp: the hypotheses that have left the frame, and the
// extensions of the others. Counterpart of _compete, _best_of, _force_blanks and _next_frame of aes.py.
#pragma once

#include "search/transducer/merge.cuh"

// One candidate per extension, in shared memory; number k * M + rank.
struct Pool {
  uint64* keys;  // [K * M] larger is better; 0: recombined with another, or no candidate
  uint64* texts;  // [K * M] equal for equal text and frame
  float* scores;  // [K * M]; -inf: no candidate
  int size;  // numbers in use
  int max_extensions;  // M

  // Behind `work` in shared memory.
  Pool(const MergeWorkspace& work, int live, const SearchParams& params)
      : keys(work.keys), size(live * params.max_extensions), max_extensions(params.max_extensions) {
    const int beam_size = params.beam_size;
    texts = (uint64*)(work.free_entries + 2 * ((beam_size + 1) / 2));
    scores = (float*)(texts + beam_size * max_extensions);
  }
};

// Whether an extension that stays in the frame leads to a text of the beam: prefix search has counted it.
// In RNN-T that is any text of the beam, as in NeMo; in TDT one at the same frame.
inline bool is_counted(
  const Hypothesis& next, const Hypothesis& parent, const Hypothesis* beam, int size, bool timed
) {
  if (next.length == parent.length || next.frame > parent.frame) return false;
  for (int i = 0; i < size; i++) {
    if (beam[i].text_hash == next.text_hash && (!timed || beam[i].frame == next.frame)) return true;
  }
  return false;
}

// Call with all threads after a barrier; a barrier must follow.
inline void fill_pool(
  Pool& pool, const MergeWorkspace& work, int size, const MergeContext& context
) {
  const Candidate* extensions = context.extensions();
  for (int i = thread(); i < pool.size; i += threads()) {
    int k = i / pool.max_extensions;
    pool.scores[i] = negative_infinity();
    if (i % pool.max_extensions >= work.counts[k]) continue;
    Hypothesis next = work.beam[k];
    extend(next, extensions[i].choice, context.args.durations, context.params());
    if (is_counted(next, work.beam[k], work.beam, size, context.params().timed)) continue;
    pool.texts[i] = extended_hash(next.text_hash, next.frame);
    pool.scores[i] = extensions[i].score;
  }
}

// The sum of the probabilities of number i and its duplicates, in their order; -inf if i is not the best one.
inline float recombined(const Pool& pool, int i) {
  float own = pool.scores[i], total = own;
  if (own == negative_infinity()) return own;
  for (int j = 0; j < pool.size; j++) {
    float other = pool.scores[j];
    if (j == i || other == negative_infinity() || pool.texts[j] != pool.texts[i]) continue;
    if (other > own || (other == own && j < i)) return negative_infinity();
    total = log_add(total, other);
  }
  return total;
}

// Recombine equal texts at the same frame, and put the K best into work.chosen; returns their number,
// the same in all threads. Call with all threads after a barrier; ends with one.
inline int choose_from_pool(Pool& pool, MergeWorkspace& work, const MergeContext& context) {
  const SearchParams& params = context.params();
  const Candidate* extensions = context.extensions();
  for (int i = thread(); i < pool.size; i += threads()) {
    float score = recombined(pool, i);
    bool competes = score > negative_infinity();
    pool.keys[i] = competes ? candidate_key(score, extensions[i], params) : 0;
  }
  __syncthreads();
  int kept = 0;
  for (int first = 0; first < pool.size; first += threads()) {
    int i = first + thread();
    bool keeps = i < pool.size && pool.keys[i] != 0;
    int rank = 0;
    for (int j = 0; keeps && j < pool.size; j++) rank += pool.keys[j] > pool.keys[i];
    keeps &= rank < params.beam_size;
    if (keeps) {
      work.chosen[rank] = extensions[i];
      work.chosen[rank].score = score_of(pool.keys[i]);
    }
    kept += __syncthreads_count(keeps);
  }
  return kept;
}

// Extend every open hypothesis by a blank, recombine duplicates and write the beam; `now` is updated. The first
// extension of a hypothesis is its blank, or KEEP. Call with all threads after a barrier; ends with one.
inline void force_blanks(MergeWorkspace& work, StreamCounters& now, const MergeContext& context) {
  const SearchParams& params = context.params();
  for (int k = thread(); k < now.size; k += threads()) {
    const Candidate& blank = context.extensions()[k * params.max_extensions];
    Hypothesis next = work.beam[k];
    if (gets_node(blank.choice, params)) {
      int before = 0;
      for (int j = 0; j < k; j++) before += work.beam[j].open;
      next.node = now.node_count + before;
      int frames = frames_of(blank.choice, context.args.durations, params);
      context.node(next.node, now) = {
        work.beam[k].node, params.vocab_size, next.frame, frames, blank.log_prob};
    }
    extend(next, blank.choice, context.args.durations, params);
    next.score = blank.score;
    work.next[k] = next;
  }
  if (params.alignments) {
    for (int k = 0; k < now.size; k++) now.node_count += work.beam[k].open;
  }
  __syncthreads();
  if (thread() == 0) {  // seldom, and each step depends on the one before
    int size = 0;
    for (int k = 0; k < now.size; k++) {
      const Hypothesis next = work.next[k];
      if (next.score == negative_infinity()) continue;
      int duplicate = 0;
      while (duplicate < size && !are_duplicates(work.next[duplicate], next)) duplicate++;
      if (duplicate == size) {
        work.next[size++] = next;
        continue;
      }
      float best = work.next[duplicate].score, total = log_add(best, next.score);
      if (next.score > best) work.next[duplicate] = next;
      work.next[duplicate].score = total;
    }
    work.counts[0] = size;
  }
  __syncthreads();
  now.size = work.counts[0];
}

// Advance to the next frame of any hypothesis, and open the hypotheses at that frame. Call with all threads
// after a barrier; a barrier must follow.
inline void next_frame(Hypothesis* beam, StreamCounters& now) {
  int frame = 0x7fffffff;
  for (int k = 0; k < now.size; k++) frame = min(frame, beam[k].frame);
  for (int k = thread(); k < now.size; k += threads()) beam[k].open = beam[k].frame == frame;
  now.expansions = 0;
}

// The last step of a frame: forced blanks. Call with all threads after a barrier; a barrier must follow.
inline void end_frame(MergeWorkspace& work, StreamCounters& now, const MergeContext& context) {
  force_blanks(work, now, context);
  copy_records(context.beam(), work.next, now.size);
  now.new_texts = 0;
  __syncthreads();
  next_frame(context.beam(), now);
}

// Any other step: the K best of the pool become the beam. Call with all threads after a barrier; a barrier
// must follow.
inline void expand_in_frame(MergeWorkspace& work, StreamCounters& now, const MergeContext& context) {
  Pool pool(work, now.size, context.params());
  fill_pool(pool, work, now.size, context);
  __syncthreads();
  int count = choose_from_pool(pool, work, context);
  merge_chosen(work, count, now, context);
  __syncthreads();
  now.expansions++;
  bool any_open = false;
  for (int k = 0; k < now.size; k++) any_open |= context.beam()[k].open;
  __syncthreads();
  if (!any_open) next_frame(context.beam(), now);
}

inline void make_beam(MergeWorkspace& work, StreamCounters& now, const MergeContext& context) {
  if (now.expansions == context.params().max_symbols) end_frame(work, now, context);
  else expand_in_frame(work, now, context);
}
