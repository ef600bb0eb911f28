// merge=prefix: one slot per text with blank and token scores apart. Counterpart of frame.py.
#pragma once

#include "search/flexctc_beam/frame.cuh"

// The slot with this text, or -1.
inline int find_text(const Hypothesis* beam, int size, uint64 text_hash, int length) {
  for (int i = 0; i < size; i++) {
    if (beam[i].text_hash == text_hash && beam[i].length == length) return i;
  }
  return -1;
}

// Offer the unchanged text k: by a blank, by its last token repeated, or by a new token after its parent. One
// thread.
inline void offer_same_text(const Row& row, int size, int k, Workspace& work) {
  const Hypothesis& text = work.beam[k];
  float blank = text.score + row[work.params.blank_id];
  float repeat = negative_infinity(), arrival = negative_infinity();
  int parent = -1;
  if (text.length > 0) {
    int token = text.last_label;
    repeat = text.token_score + row[token];
    parent = find_text(work.beam, size, text.parent_hash, text.length - 1);
    if (parent >= 0) {
      const Hypothesis& before = work.beam[parent];
      float base = score_before(before, token) + row[token] + work.params.beam_beta;
      CandidateItem unused;
      arrival = fused(base, before, token, negative_infinity(), work.fusion, unused);
    }
  }
  float token_score = log_add(repeat, arrival);
  work.kept[k] = {blank, token_score};
  // the back-pointer follows the likeliest of the three
  CandidateItem item{k, work.params.blank_id, ~k, 0};
  if (arrival > blank && arrival > repeat) {
    item.parent = parent;
    item.label = ~text.last_label;
  } else if (repeat > blank) {
    item.label = text.last_label;
  }
  work.candidates.append(log_add(blank, token_score), item);
}
