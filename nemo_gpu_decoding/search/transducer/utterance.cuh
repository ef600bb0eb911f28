// What both kernels of a step know of their utterance, and how a step ends: who reads which frame next.
#pragma once

#include "search/transducer/beam.cuh"

// The arrays of all utterances, in global memory.
struct Batch {
  const Utterance* utterances;  // [B]
  Hypothesis* beams;  // [B, K]
  Progress* progress;  // [B]
  int64* frame_rows;  // [B, K] frame that a hypothesis gives to the joint next, or NOTHING
  int64* text_rows;  // [B, K] its entry in the memory of predictions, or NOTHING
};

// Decide which hypotheses of utterance b are given the joint next. An utterance waits while one of its
// open hypotheses needs a frame that has not come; if it has ended, such a hypothesis is finished.
// `beam` and `now` hold its state, alike for all threads. Call with all threads after a barrier.
inline void plan(
  const Batch& batch, int b, const Hypothesis* beam, Progress now, const Options& options, int entries,
  int room
) {
  const Utterance& utterance = batch.utterances[b];
  bool reads_any = false, blocked = false;
  for (int k = 0; k < now.size; k++) {
    bool known = beam[k].frame < utterance.end;
    reads_any |= beam[k].open && known;
    blocked |= beam[k].open && !known && !utterance.ended;
  }
  bool full = now.node_count - now.node_base + options.beam_size > room;
  now.activity = !reads_any || blocked ? IDLE : full ? FULL : GOING;
  for (int k = thread(); k < options.beam_size; k += threads()) {
    int64 i = (int64)b * options.beam_size + k;
    bool reads = now.activity == GOING && k < now.size && beam[k].open && beam[k].frame < utterance.end;
    batch.frame_rows[i] = reads ? utterance.first_row + beam[k].frame : NOTHING;
    batch.text_rows[i] = reads ? (int64)b * entries + beam[k].memo : NOTHING;
  }
  if (thread() == 0) batch.progress[b] = now;
}
