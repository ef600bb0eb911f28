// What competes for the beam in a step of aes_pp: the hypotheses that have left the frame, and the
// extensions of the others. Twins of cpu._is_counted, _best_of, _force_blanks and _next_frame.
#pragma once

#include "search/transducer/merge.cuh"

// One candidate per extension, in shared memory; number k * M + rank.
struct Pool {
  uint64* texts;  // [K * M] equal for equal text and frame
  float* scores;  // [K * M], -inf for what does not compete
  uint64* keys;  // [K * M] greater ones are better; 0: recombined with another, or does not compete
  int size;  // numbers in use
  int per_hypothesis;  // M

  // Behind `work` in shared memory.
  Pool(const MergeWorkspace& work, int live, const Place& place)
      : size(live * place.per_hypothesis), per_hypothesis(place.per_hypothesis) {
    const int beam_size = place.options.beam_size;
    keys = work.keys;
    texts = (uint64*)(work.free_entries + 2 * ((beam_size + 1) / 2));
    scores = (float*)(texts + beam_size * per_hypothesis);
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
  Pool& pool, const MergeWorkspace& work, const Extension* extensions, int size, const Place& place
) {
  for (int i = thread(); i < pool.size; i += threads()) {
    int k = i / pool.per_hypothesis;
    pool.scores[i] = negative_infinity();
    if (i % pool.per_hypothesis >= work.counts[k]) continue;
    Hypothesis next = work.beam[k];
    extend(next, extensions[i].choice, place.durations, place.options);
    if (is_counted(next, work.beam[k], work.beam, size, place.options.timed)) continue;
    pool.texts[i] = extended_hash(next.text_hash, next.frame);
    pool.scores[i] = extensions[i].score;
  }
}

// The score of number i with those of its equals, added in their order; -inf if i is not the best of them.
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

// Recombine what is equal in text and frame, and put the K best into work.choices; returns how many,
// alike in all threads. Call with all threads after a barrier; ends with one.
inline int choose_from_pool(
  Pool& pool, MergeWorkspace& work, const Extension* extensions, const Options& options
) {
  const uint32 choices = (uint32)(options.vocab_size + 1) * options.num_durations + 1;
  for (int i = thread(); i < pool.size; i += threads()) {
    float score = recombined(pool, i);
    int k = i / pool.per_hypothesis;
    uint32 place = (uint32)k * choices + (uint32)(extensions[i].choice + 1);
    bool competes = score > negative_infinity();
    pool.keys[i] = competes ? rank_key(score, place) : 0;
  }
  __syncthreads();
  int kept = 0;
  for (int first = 0; first < pool.size; first += threads()) {
    int i = first + thread();
    bool keeps = i < pool.size && pool.keys[i] != 0;
    int rank = 0;
    for (int j = 0; keeps && j < pool.size; j++) rank += pool.keys[j] > pool.keys[i];
    keeps &= rank < options.beam_size;
    if (keeps) {
      const Extension& from = extensions[i];
      float score = score_of(pool.keys[i]);
      work.choices[rank] = {
        score, i / pool.per_hypothesis, from.choice, from.lm_state, from.boosting_state, from.log_prob};
    }
    kept += __syncthreads_count(keeps);
  }
  return kept;
}

// Give every open hypothesis its blank, recombine what has become equal and write the beam; `now` is
// brought up to date. The first extension of a hypothesis is its blank, or STAY. Call with all threads
// after a barrier; ends with one.
inline void force_blanks(
  MergeWorkspace& work, const Extension* extensions, Progress& now, const Place& place
) {
  const Options& options = place.options;
  for (int k = thread(); k < now.size; k += threads()) {
    const Extension& blank = extensions[k * place.per_hypothesis];
    Hypothesis next = work.beam[k];
    if (gets_node(blank.choice, options)) {
      int before = 0;
      for (int j = 0; j < k; j++) before += work.beam[j].open;
      next.node = now.node_count + before;
      int frames = frames_of(blank.choice, place.durations, options);
      place.buffer.at(place.b, next.node, now) = {
        work.beam[k].node, options.vocab_size, next.frame, frames, blank.log_prob};
    }
    extend(next, blank.choice, place.durations, options);
    next.score = blank.score;
    work.next[k] = next;
  }
  if (options.alignments) {
    for (int k = 0; k < now.size; k++) now.node_count += work.beam[k].open;
  }
  __syncthreads();
  if (thread() == 0) {  // seldom, and each step depends on the one before
    int size = 0;
    for (int k = 0; k < now.size; k++) {
      const Hypothesis next = work.next[k];
      if (next.score == negative_infinity()) continue;
      int twin = 0;
      while (twin < size && !are_twins(work.next[twin], next)) twin++;
      if (twin == size) {
        work.next[size++] = next;
        continue;
      }
      float best = work.next[twin].score, total = log_add(best, next.score);
      if (next.score > best) work.next[twin] = next;
      work.next[twin].score = total;
    }
    work.counts[0] = size;
  }
  __syncthreads();
  now.size = work.counts[0];
}

// Go to the next frame that a hypothesis has come to, and open those that have. Call with all threads
// after a barrier; ends with one.
inline void next_frame(Hypothesis* beam, Progress& now) {
  int frame = 0x7fffffff;
  for (int k = 0; k < now.size; k++) frame = min(frame, beam[k].frame);
  for (int k = thread(); k < now.size; k += threads()) beam[k].open = beam[k].frame == frame;
  now.expansions = 0;
  __syncthreads();
}

// The last step of a frame: forced blanks. Call with all threads after a barrier; ends with one.
inline void end_frame(
  MergeWorkspace& work, const Extension* extensions, Progress& now, const Place& place
) {
  force_blanks(work, extensions, now, place);
  copy_records(place.beam(), work.next, now.size);
  place.wishes.clear_all(place.first(), place.options.beam_size);
  __syncthreads();
  next_frame(place.beam(), now);
}

// Any other step: the K best of the pool become the beam. Call with all threads after a barrier; ends with
// one.
inline void expand_in_frame(
  MergeWorkspace& work, const Extension* extensions, Progress& now, const Place& place
) {
  Pool pool(work, now.size, place);
  fill_pool(pool, work, extensions, now.size, place);
  __syncthreads();
  int count = choose_from_pool(pool, work, extensions, place.options);
  merge_choices(work, count, now, place);
  now.expansions++;
  bool any_open = false;
  for (int k = 0; k < now.size; k++) any_open |= place.beam()[k].open;
  __syncthreads();
  if (!any_open) next_frame(place.beam(), now);
}
