// The best extensions of one hypothesis, found by one block. Bound-pruned as in alsd_pp/cpu.py:
//
//   1. the threads' own best labels show how good the M-th best label is at least
//   2. labels from there on are looked up in LM and boosting tree, all at once; the M-th best sum, or
//      the best sum less gamma, is the floor
//   3. of the other labels those are looked up that can reach the floor at all
//
// The M best are those of the CPU: they depend on the order of extensions alone, and not on when a floor
// rises.
#pragma once

#include "search/transducer/row.cuh"
#include "search/transducer/top_list.cuh"

// Sizes of what a block keeps in shared memory; chosen by launch_shape.py.
struct ListSizes {
  int items;  // entries of the list of extensions
  int labels;  // columns that are scanned together
};

// What a block works with, in shared memory in the order in which it stands here.
struct Workspace {
  double* scratch;  // [32]
  TopList best;
  float* peaks;  // [threads] the best label of each thread
  int* labels;  // [sizes.labels]
  ListSizes sizes;

  Workspace(uint8* shared, const ListSizes& sizes) : sizes(sizes) {
    scratch = take<double>(shared, LANES);
    best.tally = take<Tally>(shared, 1);
    best.keys = take<uint64>(shared, sizes.items);
    best.best_keys = take<uint64>(shared, sizes.items);
    best.states = take<States>(shared, sizes.items);
    best.best_states = take<States>(shared, sizes.items);
    best.capacity = sizes.items;
    peaks = take<float>(shared, threads());
    labels = take<int>(shared, sizes.labels);
  }
};

// What `expand` of both strategies is launched on. `logits` to `frame_rows` are arrays of all hypotheses.
struct ExpandInputs {
  const Logit* logits;  // [B * K, columns]
  const Utterance* utterances;  // [B]
  const Hypothesis* beams;  // [B, K]
  const Progress* progress;  // [B]
  const int64* frame_rows;  // [B, K]
  Automaton lm, boosting;
  double inverse_temperature;
  int columns;
  Extension* extensions;  // [B, K, M]
  int* counts;  // [B, K] how many of them; BAD_INPUT: NaN or +inf among the logits
  int per_hypothesis;  // M
};

// The hypothesis of a block, number k of utterance b, and where its extensions go.
struct Subject {
  int b, k;
  Progress now;
  Hypothesis hypothesis;
  Row row;
  Fusion fusion;
  Extension* own;  // [M]
  int* count;

  Subject(const ExpandInputs& in, const Options& options)
      : b(blockIdx.x / options.beam_size),
        k(blockIdx.x % options.beam_size),
        now(in.progress[b]),
        hypothesis(in.beams[blockIdx.x]),
        row(in.logits + (int64)blockIdx.x * in.columns, in.inverse_temperature, options),
        fusion{
          in.lm, in.boosting, in.utterances[b].lm_weight, in.utterances[b].boosting_weight,
          in.utterances[b].inverse_lm_weight},
        own(in.extensions + (int64)blockIdx.x * in.per_hypothesis),
        count(in.counts + blockIdx.x) {}

  // Give it one extension, or with `possible` false none. One thread.
  void only(const Extension& extension, bool possible = true) const {
    own[0] = extension;
    *count = possible;
  }
};

// Settle what needs no logits: the utterance rests, the slot is empty, the hypothesis stays as it is. Else
// normalise its row; true if it is to be expanded. Call with all threads; ends with a barrier if true.
inline bool reads_row(Subject& subject, const ExpandInputs& in, double* scratch) {
  if (subject.now.activity != GOING) return false;
  if (subject.k >= subject.now.size) {
    if (thread() == 0) *subject.count = 0;
    return false;
  }
  if (in.frame_rows[blockIdx.x] == NOTHING) {
    const Hypothesis& same = subject.hypothesis;
    if (thread() == 0) subject.only({same.score, STAY, same.lm_state, same.boosting_state, 0.0f});
    return false;
  }
  normalise(subject.row, scratch);
  if (subject.row.normaliser.bad && thread() == 0) *subject.count = BAD_INPUT;
  return !subject.row.normaliser.bad;
}

// What the labels of a hypothesis are scored with; `expand` ranks by different sums in different modes.
struct Scoring {
  Fusion fusion;  // weights of 0: by the joint alone
  int lm_state, boosting_state;  // of the hypothesis
  float before;  // score of the hypothesis
  float blank;  // score of the blank
  float offset;  // what every token gets on top of its log-probability
  float bound;  // what LM and boosting can add to a token at most
  float longest;  // log-probability of the most probable duration
  int num_durations;  // of which each makes an extension
  bool timed;  // whether their log-probabilities count
};

// Scores with LM and boosting; `ceiling`: see blank_scoring.py.
inline Scoring fused_scoring(
  const Row& row, const Hypothesis& hypothesis, const Fusion& fusion, const Options& options,
  float ceiling
) {
  Scoring scoring;
  scoring.fusion = fusion;
  scoring.lm_state = hypothesis.lm_state;
  scoring.boosting_state = hypothesis.boosting_state;
  scoring.before = hypothesis.score;
  float blank = row[options.vocab_size];
  scoring.blank = fused_blank(blank, fusion.alpha(), options.weighted_blank);
  scoring.offset = token_offset(blank, fusion.alpha(), options.weighted_blank, ceiling);
  scoring.bound = fusion.bound(hypothesis);
  scoring.longest = row.duration(row.longest_duration());
  scoring.num_durations = options.num_durations;
  scoring.timed = options.timed;
  return scoring;
}

// The thresholds of step 1. Call with all threads; ends with a barrier.
inline void find_threshold(const Row& row, int num_tokens, Workspace& work) {
  float peak = negative_infinity();
  for (int v = thread(); v < num_tokens; v += threads()) peak = fmaxf(peak, row[v]);
  work.peaks[thread()] = peak;
  if (thread() == 0) work.best.tally->threshold = negative_infinity();
  __syncthreads();
  int rank = 0;
  for (int i = 0; i < threads(); i++) {
    rank += work.peaks[i] > peak || (work.peaks[i] == peak && i < thread());
  }
  if (rank == work.best.wanted - 1) work.best.tally->threshold = peak;
  __syncthreads();
}

// Whether a label that was not looked up yet can reach the floor; with slack for rounding in float32.
inline bool may_reach(float floor, float log_prob, const Scoring& scoring) {
  float base = log_prob + scoring.offset;
  return base > negative_infinity() &&
         !(scoring.before + ((base + scoring.bound) + scoring.longest) < floor);
}

// Look up the labels that are listed and append what reaches the floor. Call with all threads after a
// barrier; ends with one.
inline void offer_labels(const Row& row, const Scoring& scoring, int& reserved, Workspace& work) {
  TopList& best = work.best;
  const int num_labels = best.tally->num_labels;
  for (int first = 0; first < num_labels; first += threads()) {
    int i = first + thread(), label = i < num_labels ? work.labels[i] : 0;
    Fused fused{0.0f, 0, 0};
    float base = 0.0f;
    if (i < num_labels) {
      base = row[label] + scoring.offset;
      float least = (best.tally->floor - scoring.before) - scoring.longest - base;
      fused = fused_token(scoring.fusion, scoring.lm_state, scoring.boosting_state, label, least);
    }
    for (int d = 0; d < scoring.num_durations; d++) {
      best.make_room(reserved);
      if (i < num_labels) {
        float duration = scoring.timed ? row.duration(d) : 0.0f;
        float score = scoring.before + ((base + fused.score) + duration);
        best.append(score, label * scoring.num_durations + d, fused.lm_state, fused.boosting_state);
      }
      __syncthreads();
    }
  }
}

// One pass over all tokens: list those above the threshold (or those below it that may reach the floor)
// and offer them. Call with all threads after a barrier; ends with one.
inline void scan_tokens(
  const Row& row, int num_tokens, bool above, const Scoring& scoring, int& reserved, Workspace& work
) {
  Tally& tally = *work.best.tally;
  const float threshold = tally.threshold;
  for (int begin = 0; begin < num_tokens; begin += work.sizes.labels) {
    if (thread() == 0) tally.num_labels = 0;
    __syncthreads();
    int end = min(begin + work.sizes.labels, num_tokens);
    for (int v = begin + thread(); v < end; v += threads()) {
      float log_prob = row[v];
      if ((log_prob >= threshold) != above || !may_reach(tally.floor, log_prob, scoring)) continue;
      work.labels[atomicAdd(&tally.num_labels, 1)] = v;
    }
    __syncthreads();
    offer_labels(row, scoring, reserved, work);
    __syncthreads();
  }
}

// Find the best extensions by blank and tokens 0 .. V - 1, best first; returns how many. `wanted` and
// `gamma` of the list say how many are kept. Call with all threads; ends with a barrier.
inline int find_best(const Row& row, const Options& options, const Scoring& scoring, Workspace& work) {
  TopList& best = work.best;
  const int blank = options.vocab_size * scoring.num_durations;
  best.clear();
  int reserved = 0;
  for (int first = 0; first < scoring.num_durations; first += threads()) {
    best.make_room(reserved);
    int d = first + thread();
    if (d < scoring.num_durations) {
      float score = scoring.before + (scoring.blank + (scoring.timed ? row.duration(d) : 0.0f));
      best.append(score, blank + d, scoring.lm_state, scoring.boosting_state);
    }
    __syncthreads();
  }
  find_threshold(row, options.vocab_size, work);
  for (int above = 1; above >= 0; above--) {
    scan_tokens(row, options.vocab_size, above, scoring, reserved, work);
    reserved = best.keep_best();
  }
  return reserved;
}

// How many of the sorted extensions are better than the best less gamma, alike in all threads. Call with
// all threads after a barrier.
inline int count_within_gamma(const TopList& best, int count) {
  int within = 0;
  for (int first = 0; first < count; first += threads()) {
    int i = first + thread();
    bool in = i < count && score_of(best.keys[i]) > score_of(best.keys[0]) - best.gamma;
    within += __syncthreads_count(in);
  }
  return within;
}
