// Back-pointers of a running beam search, and the trace-back through them. Counterpart of
// backpointers.py.
#pragma once

#include "cuda/common.cuh"

// One entry per frame and hypothesis.
struct BackPointers {
  int* labels;  // [B, T, K]; ~label for a new token
  short* parents;  // [B, T, K], slot of the hypothesis one frame earlier
  float* log_probs;  // [B, T, K], acoustic log-posterior of the label
  int capacity;  // T
  int beam_size;  // K

  int64 entry(int b, int64 t, int slot) const {
    return (b * (int64)capacity + t) * beam_size + slot;
  }

  void write(int b, int64 t, int slot, int label, int parent, float log_prob) const {
    int64 i = entry(b, t, slot);
    labels[i] = label;
    parents[i] = (short)parent;
    log_probs[i] = log_prob;
  }
};

// Some frames of the back-pointers of one utterance in shared memory. A trace-back is a chain of dependent
// reads, each of which would wait for global memory.
struct BackPointerTile {
  int* labels;  // [frames, K]
  float* log_probs;  // [frames, K]
  short* parents;  // [frames, K]
  int frames;

  BackPointerTile(uint8* shared, int frames, int beam_size) : frames(frames) {
    labels = (int*)shared;
    log_probs = (float*)(labels + frames * beam_size);
    parents = (short*)(log_probs + frames * beam_size);
  }

  // Fetch frames begin .. end - 1. Call with all threads; a barrier must follow.
  void fetch(const BackPointers& back_pointers, int b, int64 begin, int64 end) {
    int64 first = back_pointers.entry(b, begin, 0);
    int count = (int)(end - begin) * back_pointers.beam_size;
    for (int i = thread(); i < count; i += threads()) {
      labels[i] = back_pointers.labels[first + i];
      parents[i] = back_pointers.parents[first + i];
      log_probs[i] = back_pointers.log_probs[first + i];
    }
  }
};

// The tokens of one path, or of many; the last two are null without `alignments`.
struct Trace {
  int* tokens;
  int* frames;
  int* repeats;
  float* confidence;
  int* alignment;
  float* alignment_log_probs;

  // Number `path` of those with `max_tokens` entries each.
  Trace of(int64 path, int max_tokens) const {
    int64 i = path * max_tokens;
    return {
      tokens + i, frames + i, repeats + i, confidence + i,
      alignment ? alignment + i : nullptr, alignment ? alignment_log_probs + i : nullptr,
    };
  }
};

// The trace-back of one path by one thread, to frame `first`; the last token is written first.
struct TraceBack {
  int slot;
  int64 first;
  int count = 0;  // tokens met
  int run = 0;  // frames that repeat the next token on the way back
  double run_probability = 0.0;

  // Trace back frames end - 1 .. begin, which are in the tile.
  void follow(
    const BackPointerTile& tile, int64 begin, int64 end, int beam_size, int blank_id, const Trace& trace
  ) {
    for (int64 t = end - 1; t >= begin; t--) {
      int i = (int)(t - begin) * beam_size + slot;
      int label = tile.labels[i];
      float log_prob = tile.log_probs[i];
      slot = tile.parents[i];
      if (trace.alignment) {
        trace.alignment[t - first] = label >= 0 ? label : ~label;
        trace.alignment_log_probs[t - first] = log_prob;
      }
      if (label == blank_id) {
        run = 0;
        run_probability = 0.0;
        continue;
      }
      run++;
      run_probability += exp((double)log_prob);
      if (label >= 0) continue;
      trace.tokens[count] = ~label;
      trace.frames[count] = (int)t;
      trace.repeats[count] = run;
      trace.confidence[count] = (float)fmin(1.0, run_probability / run);
      count++;
      run = 0;
      run_probability = 0.0;
    }
  }
};

template <class T>
inline void swap_values(T* values, int i, int j) {
  T kept = values[i];
  values[i] = values[j];
  values[j] = kept;
}

// Reverse the tokens of a path, which were written last first. Call with all threads.
inline void reverse(const Trace& trace, int count) {
  for (int i = thread(); i < count / 2; i += threads()) {
    int j = count - 1 - i;
    swap_values(trace.tokens, i, j);
    swap_values(trace.frames, i, j);
    swap_values(trace.repeats, i, j);
    swap_values(trace.confidence, i, j);
  }
}
