// What a transducer search keeps of an utterance on the device. Twins of beam.py and launch_shape.py.
#pragma once

#include "fusion/fusion.cuh"
#include "search/log_space.cuh"
#include "search/text_hash.cuh"

constexpr int NO_LABEL = -1;
constexpr int STAY = -1;  // the choice to leave a hypothesis as it is
constexpr int BAD_INPUT = -1;  // instead of a beam's size or a number of candidates
constexpr int NOTHING = -1;  // instead of a row that is to be moved

// One hypothesis of the beam. Scores are natural log.
struct Hypothesis {
  float score;
  int last_label;
  uint64 text_hash;
  uint64 prefix_hash;
  int length;
  int frame;  // the frame to read next
  int symbols;  // tokens since the last move to a later frame
  int open;  // 1: wants the joint at `frame`
  int node;
  int memo;  // entry of its text in the memory of predictions
  int lm_state;
  int boosting_state;
};
static_assert(sizeof(Hypothesis) == HYPOTHESIS_BYTES, "Hypothesis differs from beam.HYPOTHESIS");

// One step on the way to a hypothesis.
struct Node {
  int parent;
  int label;
  int frame;
  int duration;
  float log_prob;
};
static_assert(sizeof(Node) == 20, "Node differs from beam.NODE");

// What an utterance is decoded with; changes between runs only. Twin of launch_shape.UTTERANCE.
struct Utterance {
  float lm_weight;  // 0: no LM
  float boosting_weight;
  double inverse_lm_weight;  // 1 / lm_weight; 0 where that is not finite
  int64 first_row;  // row of frame 0 in the buffer of frames; below 0 if it has been dropped
  int end;  // frames known so far
  int ended;  // 1: there will be no more
};
static_assert(sizeof(Utterance) == 32, "Utterance differs from launch_shape.UTTERANCE");

enum Activity {
  IDLE = 0,  // every hypothesis waits for frames, is finished, or the input was bad
  GOING = 1,
  FULL = 2,  // the host has to fetch the nodes first
};

// How far an utterance has come. Twin of launch_shape.PROGRESS.
struct Progress {
  int size;  // live hypotheses; BAD_INPUT, or 0 where no label was possible
  int expansions;  // aes_pp: tokens emitted at most in the present frame
  int node_count;  // of the whole tree
  int node_base;  // number of the first node in the buffer; the host has those before
  int activity;
};
static_assert(sizeof(Progress) == 20, "Progress differs from launch_shape.PROGRESS");

// One extension of a hypothesis, written by `expand`, best first. Twin of launch_shape.EXTENSION.
struct Extension {
  float score;
  int choice;  // label * D + index of the duration, or STAY
  int lm_state;  // states after it
  int boosting_state;
  float log_prob;  // of the label, by the joint
};
static_assert(sizeof(Extension) == 20, "Extension differs from launch_shape.EXTENSION");

// Options that hold for all utterances.
struct Options {
  int beam_size;  // K
  int vocab_size;  // V; also the label of the blank
  int num_durations;  // D
  int timed;  // TDT
  int weighted_blank;
  int late;  // pruning_mode
  int alignments;
  int frame_by_frame;  // aes_pp: only hypotheses in the present frame are extended
};

// What is added to the scores of one utterance.
struct Fusion {
  Automaton lm;
  Automaton boosting;
  float lm_weight;  // 0: no LM
  float boosting_weight;
  double inverse_lm_weight;  // 0: unknown

  float alpha() const { return lm_weight + boosting_weight; }

  // What LM and boosting can add to the next token of a hypothesis at most.
  float bound(const Hypothesis& hypothesis) const {
    float most = 0.0f;
    if (lm_weight > 0) most = lm_weight * lm.states[hypothesis.lm_state].upper_bound;
    if (boosting_weight > 0) {
      most += boosting_weight * boosting.states[hypothesis.boosting_state].upper_bound;
    }
    return most;
  }
};

// What LM and boosting add to a token, weighted, and their states after it.
struct Fused {
  float score;  // -inf if it was found to be below the least that counts
  int lm_state;
  int boosting_state;
};

// Boosting trees are small and LMs are large: the cheap look-up comes first and may save the other.
inline Fused fused_token(
  const Fusion& fusion, int lm_state, int boosting_state, int label, float least
) {
  Reading weight{0.0f, lm_state}, bonus{0.0f, boosting_state};
  if (fusion.boosting_weight > 0) {
    bonus = lookup(fusion.boosting, boosting_state, label, negative_infinity());
    bonus.weight *= fusion.boosting_weight;
  }
  if (fusion.lm_weight > 0) {
    // a double's division would be a call into a subroutine, and the slack for rounding covers this
    double slack = 1e-6 * fabs((double)least) + 1e-5, scale = fusion.inverse_lm_weight;
    double least_weight = ((double)least - bonus.weight - slack) * scale;
    if (!(scale > 0)) least_weight = negative_infinity();
    weight = lookup(fusion.lm, lm_state, label, least_weight);
    weight.weight *= fusion.lm_weight;
  }
  return {weight.weight + bonus.weight, weight.state, bonus.state};
}

// Twin of search/transducer/blank_scoring.py.
inline float fused_blank(float blank_log_prob, float alpha, bool weighted) {
  return weighted ? blank_log_prob * (1.0f + alpha) : blank_log_prob;
}

__noinline__ float token_offset(float blank_log_prob, float alpha, bool weighted, float ceiling) {
  if (!(weighted && alpha > 0)) return 0.0f;
  float blank = fminf((float)exp((double)blank_log_prob), ceiling);
  return (float)log1p(-(double)blank) * alpha;
}

// Whether a choice emits a token.
inline bool is_token(int choice, const Options& options) {
  return choice != STAY && choice / options.num_durations < options.vocab_size;
}

// Frames that a choice other than STAY moves on: a blank always moves.
inline int frames_of(int choice, const int* durations, const Options& options) {
  int duration = durations[choice % options.num_durations];
  return is_token(choice, options) ? duration : max(1, duration);
}

// Apply a choice to a hypothesis: all but its score, its states and what depends on others.
inline void extend(Hypothesis& hypothesis, int choice, const int* durations, const Options& options) {
  if (choice == STAY) return;
  int duration = frames_of(choice, durations, options);
  if (is_token(choice, options)) {
    int label = choice / options.num_durations;
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
inline bool are_twins(const Hypothesis& a, const Hypothesis& b) {
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
