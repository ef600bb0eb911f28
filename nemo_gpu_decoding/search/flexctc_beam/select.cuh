// Candidates become the new beam: rank, threshold, recombination, back-pointers. Counterpart of cpu.select.
#pragma once

#include "search/flexctc_beam/frame.cuh"

// The hypothesis that a candidate stands for.
inline Hypothesis extended(const Workspace& work, float score, const CandidateItem& candidate) {
  if (candidate.lm_state < 0) {  // merge=prefix: a text that stays
    int k = ~candidate.lm_state;
    Hypothesis text = work.beam[k];
    text.score = score;
    text.blank_score = work.kept[k].blank_score;
    text.token_score = work.kept[k].token_score;
    return text;
  }
  Hypothesis next = work.beam[candidate.parent];
  next.score = score;
  if (candidate.label >= 0) {
    next.last_label = candidate.label;
    return next;
  }
  int token = ~candidate.label;
  next.last_label = token;
  next.parent_hash = next.text_hash;
  next.text_hash = extended_hash(next.text_hash, token);
  next.length++;
  next.lm_state = candidate.lm_state;
  next.boosting_state = candidate.boosting_state;
  next.lm_bound = work.fusion.lm_bound(candidate.lm_state);
  next.boosting_bound = work.fusion.boosting_bound(candidate.boosting_state);
  next.blank_score = negative_infinity();
  next.token_score = score;
  return next;
}

// The first of `next` with the text and last label of number i (that is i itself for most), or -1 if i
// is too far below the best.
inline int leader_of(int i, const Workspace& work) {
  const Hypothesis* next = work.next;
  if (i > 0 && !(next[i].score > next[0].score - work.params.threshold)) return -1;
  if (work.params.merge == MERGE_PREFIX) return i;  // one slot per text: there are no equals
  for (int j = 0; j < i; j++) {
    if (same_text(next[j], next[i]) && next[j].last_label == next[i].last_label) return j;
  }
  return i;
}

// The score of number i with those of its equals (merge=sum), added in the order of their ranks.
inline float merged_score(int i, int count, const Workspace& work) {
  float score = work.next[i].score;
  if (work.params.merge != MERGE_SUM) return score;
  for (int j = i + 1; j < count; j++) {
    if (work.leaders[j] == i) score = log_add(score, work.next[j].score);
  }
  return score;
}

// Fill the new beam and frame t of the back-pointers from the candidates; the counters are reset for the next
// frame. Call with all threads after a barrier; a barrier must follow.
inline void select(const Row& row, Workspace& work, const BackPointers& back_pointers, int b, int64 t) {
  Counters& counters = *work.counters;
  const Candidates& candidates = work.candidates;
  int num_candidates = counters.num_candidates;
  int count = min(num_candidates, work.beam_size);
  for (int i = thread(); i < num_candidates; i += threads()) {
    uint64 key = candidates.keys[i];
    int rank = candidates.rank_of(key, num_candidates);
    if (rank >= count) continue;
    work.next[rank] = extended(work, score_of(key), candidates.items[i]);
    work.origins[rank] = candidates.items[i].parent;
    work.emitted[rank] = candidates.items[i].label;
  }
  if (thread() == 0) counters.best_new_score = 0;
  __syncthreads();
  for (int i = thread(); i < count; i += threads()) {
    work.leaders[i] = leader_of(i, work);
  }
  __syncthreads();
  for (int i = thread(); i < count; i += threads()) {
    int slot = 0;  // leaders before this one
    for (int j = 0; j < i; j++) slot += work.leaders[j] == j;
    bool leads = work.leaders[i] == i;
    if (i == count - 1) counters.beam_size = slot + leads;
    if (!leads) continue;
    Hypothesis& hypothesis = work.beam[slot];
    hypothesis = work.next[i];
    hypothesis.score = merged_score(i, count, work);
    int label = work.emitted[i];
    back_pointers.write(b, t, slot, label, work.origins[i], row[label >= 0 ? label : ~label]);
    atomicMax(&counters.best_new_score, ordered_key(best_new_score(hypothesis, work.params.beam_beta)));
  }
  if (thread() == 0) {
    counters.best_key = counters.kth_key = 0;
    counters.num_candidates = counters.num_labels = counters.num_pairs = 0;
  }
}
