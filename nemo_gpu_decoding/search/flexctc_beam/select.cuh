// Candidates become the new beam: rank, threshold, recombination, back-pointers. Counterpart of `select` in frame.py.
#pragma once

#include "search/flexctc_beam/frame.cuh"

// Slot of the hypothesis that a candidate continues.
inline int source_of(const CandidateItem& candidate) {
  return candidate.lm_state < 0 ? ~candidate.lm_state : candidate.parent;
}

// Turn `next`, a copy of that hypothesis, into the hypothesis of the candidate. One thread.
inline void extend(const Workspace& work, float score, const CandidateItem& candidate, Hypothesis& next) {
  next.score = score;
  if (candidate.lm_state < 0) {  // merge=prefix: an unchanged text
    int k = source_of(candidate);
    next.blank_score = work.kept[k].blank_score;
    next.token_score = work.kept[k].token_score;
    return;
  }
  if (candidate.label >= 0) {
    next.last_label = candidate.label;
    return;
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
}

// The first of `next` with the text and last label of number i < count (that is i itself for most), or -1 if
// i is too far below the best. A team looks for it; call with all lanes of a warp.
inline int leader_of(int i, int count, const Workspace& work) {
  const Hypothesis* next = work.next;
  int leader = i;
  if (i < count && work.params.merge != MERGE_PREFIX) {  // prefix: one slot per text, so no duplicates
    for (int j = team_lane(); j < i && leader == i; j += TEAM) {
      if (same_text(next[j], next[i]) && next[j].last_label == next[i].last_label) leader = j;
    }
  }
  leader = team_reduce(leader, Min());
  return i > 0 && i < count && !(next[i].score > next[0].score - work.params.threshold) ? -1 : leader;
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
  for (int first = 0; first < num_candidates; first += teams()) {
    int i = first + team();
    uint64 key = i < num_candidates ? candidates.keys[i] : 0;
    int rank = candidates.rank_of(key, num_candidates);
    bool kept = i < num_candidates && rank < count;
    const CandidateItem item = candidates.items[kept ? i : 0];
    Hypothesis* next = kept ? work.next + rank : nullptr;
    team_copy(next, work.beam + source_of(item));
    if (!kept || team_lane() != 0) continue;
    extend(work, score_of(key), item, *next);
    work.origins[rank] = item.parent;
    work.emitted[rank] = item.label;
  }
  if (thread() == 0) counters.best_new_score = 0;
  __syncthreads();
  for (int first = 0; first < count; first += teams()) {
    int i = first + team(), leader = leader_of(i, count, work);
    if (i < count && team_lane() == 0) work.leaders[i] = leader;
  }
  __syncthreads();
  for (int first = 0; first < count; first += teams()) {
    int i = first + team(), before = 0;  // leaders before this one
    if (i < count) {
      for (int j = team_lane(); j < i; j += TEAM) before += work.leaders[j] == j;
    }
    int slot = team_reduce(before, Sum());
    bool leads = i < count && work.leaders[i] == i;
    if (i == count - 1 && team_lane() == 0) counters.beam_size = slot + leads;
    team_copy(leads ? work.beam + slot : nullptr, work.next + i);
    if (!leads || team_lane() != 0) continue;
    Hypothesis& hypothesis = work.beam[slot];
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
