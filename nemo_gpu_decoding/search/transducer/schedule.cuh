// The end of a step: the frame that each hypothesis reads next. Counterpart of `schedule` in cpu_engine.py.
#pragma once

#include "search/transducer/beam.cuh"

// Whether an utterance takes part in the next step.
inline bool has_step(int activity) { return activity == ACTIVE || activity == WAITING; }

// Choose the hypotheses of utterance b that the joint reads next. An utterance waits while one of its open
// hypotheses needs a frame that has not arrived; if it has ended, such a hypothesis is finished. `beam` and
// `now` are its state, the same in all threads. Returns its activity. Call with all threads after a barrier.
inline int schedule_next(
  const ScheduleArgs& args, int b, const Hypothesis* beam, StreamCounters now
) {
  const StreamParams& stream = args.streams[b];
  bool reads_any = false, blocked = false;
  for (int k = 0; k < now.size; k++) {
    bool known = beam[k].frame < stream.end;
    reads_any |= beam[k].open && known;
    blocked |= beam[k].open && !known && !stream.ended;
  }
  bool full = now.node_count - now.node_base + args.beam_size > args.node_capacity;
  now.activity = !reads_any || blocked ? IDLE : full ? FULL : ACTIVE;
  for (int k = thread(); k < args.beam_size; k += threads()) {
    int64 i = (int64)b * args.beam_size + k;
    bool reads = now.activity == ACTIVE && k < now.size && beam[k].open && beam[k].frame < stream.end;
    args.frame_rows[i] = reads ? stream.first_row + beam[k].frame : NO_ROW;
    args.text_rows[i] = reads ? (int64)b * args.cache_entries + beam[k].cache_entry : NO_ROW;
  }
  if (thread() == 0) args.counters[b] = now;
  return now.activity;
}
