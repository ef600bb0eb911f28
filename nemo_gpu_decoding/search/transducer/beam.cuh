// Hypotheses of a transducer search, and their extension by a choice. Counterpart of beam.py.
#pragma once

#include "search/numerics.cuh"
#include "search/transducer/records.cuh"

constexpr int MAX_THREADS = 256;  // of a block

// Whether a choice emits a token.
inline bool is_token(int choice, const SearchParams& params) {
  return choice != KEEP && choice / params.num_durations < params.vocab_size;
}

// Frames that a choice other than KEEP advances; a blank always advances.
inline int frames_of(int choice, const int* durations, const SearchParams& params) {
  int duration = durations[choice % params.num_durations];
  return is_token(choice, params) ? duration : max(1, duration);
}

// Apply a choice to a hypothesis, except for its score and fields that depend on other hypotheses.
inline void extend(Hypothesis& hypothesis, int choice, const int* durations, const SearchParams& params) {
  if (choice == KEEP) return;
  int duration = frames_of(choice, durations, params);
  if (is_token(choice, params)) {
    int label = choice / params.num_durations;
    hypothesis.prefix_hash = hypothesis.text_hash;
    hypothesis.text_hash = extended_hash(hypothesis.text_hash, label);
    hypothesis.last_label = label;
    hypothesis.length++;
    hypothesis.symbols++;
  }
  if (duration > 0) hypothesis.symbols = 0;
  hypothesis.frame += duration;
}

// Whether two hypotheses are recombined: the same text at the same frame.
inline bool are_duplicates(const Hypothesis& a, const Hypothesis& b) {
  return a.text_hash == b.text_hash && a.frame == b.frame && a.length == b.length &&
         a.last_label == b.last_label;
}

// Copy records as words of 8 bytes, with all threads. A barrier must follow.
template <class T>
inline void copy_records(T* to, const T* from, int count) {
  static_assert(sizeof(T) % 8 == 0, "records of whole words");
  for (int i = thread(); i < count * (int)(sizeof(T) / 8); i += threads()) {
    ((uint64*)to)[i] = ((const uint64*)from)[i];
  }
}
