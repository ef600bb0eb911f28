// The best extensions of one hypothesis, found by one block. Counterpart of scoring.py, bound-pruned as there:
//
//   1. the threads' own best labels show how good the M-th best label is at least
//   2. labels from there on are looked up in LM and boosting tree, all at once; the M-th best sum, or
//      the best sum less gamma, is the floor
//   3. of the other labels those are looked up that can reach the floor at all
//
// The M best are those of the CPU: they depend on the order of extensions alone, and not on when a floor
// rises.
#pragma once

#include "search/rank_key.cuh"
#include "search/transducer/scoring.cuh"

inline int choice_of(uint64 key) { return (int)index_of(key); }

// The best extensions of one hypothesis so far, in shared memory, filled by all threads.
//
// Order: descending score, then ascending choice; no two are equal.
struct TopList {
  uint64* keys;  // [capacity]
  uint64* best_keys;  // [capacity]
  FusionStates* states;  // [capacity]
  FusionStates* best_states;  // [capacity]
  ListCounters* counters;
  int capacity;  // at least wanted + threads of the block
  int wanted;  // number that is kept
  float gamma;  // extensions lower than the best one by more than this are dropped

  // Append an extension, from any thread. The caller has reserved an entry.
  void append(float score, int choice, int lm_state, int boosting_state) {
    if (!(score >= counters->floor && score > negative_infinity())) return;
    int i = atomicAdd(&counters->num_items, 1);
    keys[i] = rank_key(score, choice);
    states[i] = {lm_state, boosting_state};
  }

  // Empty the list. Call with all threads, at first or after `keep_best`; ends with a barrier.
  void clear() {
    if (thread() == 0) {
      counters->num_items = 0;
      counters->floor = negative_infinity();
    }
    __syncthreads();
  }

  // Reserve an entry for one more extension by each thread. `reserved`: an upper bound of the length, the same
  // in all threads. Call with all threads after a barrier; ends with one.
  void reserve(int& reserved) {
    if (reserved + threads() > capacity) {
      reserved = counters->num_items;
      __syncthreads();
    }
    if (reserved + threads() > capacity) reserved = keep_best();
    reserved += threads();
  }

  // Keep the best extensions, sort them and raise the floor; returns their number. Call with all threads after a
  // barrier; ends with one.
  int keep_best() {
    int count = counters->num_items, kept = min(count, wanted);
    for (int i = thread(); i < count; i += threads()) {
      int rank = 0;
      for (int j = 0; j < count; j++) rank += keys[j] > keys[i];
      if (rank < wanted) {
        best_keys[rank] = keys[i];
        best_states[rank] = states[i];
      }
    }
    __syncthreads();
    for (int i = thread(); i < kept; i += threads()) {
      keys[i] = best_keys[i];
      states[i] = best_states[i];
    }
    if (thread() == 0) {
      counters->num_items = kept;
      float floor = kept == 0 ? negative_infinity() : score_of(best_keys[0]) - gamma;
      counters->floor = kept < wanted ? floor : fmaxf(floor, score_of(best_keys[wanted - 1]));
    }
    __syncthreads();
    return kept;
  }
};

// The workspace of a block, in shared memory in the order of the fields.
struct Workspace {
  NormaliseScratch* scratch;
  TopList best;
  float* peaks;  // [threads] the best label of each thread
  int* labels;  // [sizes.labels]
  float* log_probs;  // [sizes.log_probs] of the hypothesis
  ListSizes sizes;

  Workspace(uint8* shared, const ExpandArgs& args) : sizes(args.sizes) {
    scratch = take<NormaliseScratch>(shared, 1);
    best.counters = take<ListCounters>(shared, 1);
    best.keys = take<uint64>(shared, sizes.items);
    best.best_keys = take<uint64>(shared, sizes.items);
    best.states = take<FusionStates>(shared, sizes.items);
    best.best_states = take<FusionStates>(shared, sizes.items);
    best.capacity = sizes.items;
    best.wanted = args.params.max_extensions;
    best.gamma = args.params.gamma;
    peaks = take<float>(shared, threads());
    labels = take<int>(shared, sizes.labels);
    log_probs = take<float>(shared, sizes.log_probs);
  }
};

// The hypothesis that a block expands, number k of utterance b.
struct Expansion {
  int b, k;
  StreamCounters counters;
  Hypothesis hypothesis;
  Row row;
  UtteranceFusion fusion;
  Candidate* extensions;  // [M] where they go

  Expansion(const ExpandArgs& args)
      : b(blockIdx.x / args.params.beam_size),
        k(blockIdx.x % args.params.beam_size),
        counters(args.counters[b]),
        hypothesis(args.beams[blockIdx.x]),
        row(row_of(blockIdx.x, args)),
        fusion{
          {args.lm_states, args.lm_arcs, args.params.vocab_size},
          {args.boosting_states, args.boosting_arcs, args.params.vocab_size},
          args.streams[b].lm_weight, args.streams[b].boosting_weight,
          args.streams[b].inverse_lm_weight},
        extensions(args.extensions + (int64)blockIdx.x * args.params.max_extensions) {}

  // The logits of a hypothesis, not normalised yet.
  static Row row_of(int64 hypothesis, const ExpandArgs& args) {
    return Row(args.logits + hypothesis * args.columns, args.inverse_temperature, args.params);
  }
};

// Whether the hypothesis is expanded; its row is normalised then. Otherwise write its result: nothing if the
// utterance waits or the slot is empty, KEEP if it reads no frame. Call with all threads; ends with a barrier
// if true.
inline bool reads_row(Expansion& own, const ExpandArgs& args, Workspace& work) {
  int& count = args.counts[blockIdx.x];
  if (own.counters.activity != ACTIVE) return false;
  if (own.k >= own.counters.size) {
    if (thread() == 0) count = 0;
    return false;
  }
  if (args.frame_rows[blockIdx.x] == NO_ROW) {
    const Hypothesis& same = own.hypothesis;
    if (thread() == 0) {
      own.extensions[0] = {same.score, own.k, KEEP, same.lm_state, same.boosting_state, 0.0f};
      count = 1;
    }
    return false;
  }
  if (!normalise(own.row, work.scratch->own, work.scratch->sums)) {
    if (thread() == 0) count = BAD_INPUT;
    return false;
  }
  if (work.sizes.log_probs) own.row.store(work.log_probs);
  return true;
}

// The terms of the score by which the labels of a hypothesis are ranked; they depend on the mode.
struct Scoring {
  UtteranceFusion fusion;  // weights of 0: by the joint alone
  int lm_state, boosting_state;  // of the hypothesis
  float before;  // score of the hypothesis
  float blank;  // score of the blank
  float offset;  // see `token_offset`
  float bound;  // upper bound of the LM and boosting scores of a token
  float longest;  // log-probability of the most probable duration
  int num_durations;  // extensions per label
  bool timed;  // whether their log-probabilities are added
};

// Scores with LM and boosting.
inline Scoring fused_scoring(const Expansion& own, const SearchParams& params) {
  const UtteranceFusion& fusion = own.fusion;
  Scoring scoring;
  scoring.fusion = fusion;
  scoring.lm_state = own.hypothesis.lm_state;
  scoring.boosting_state = own.hypothesis.boosting_state;
  scoring.before = own.hypothesis.score;
  float blank = own.row[params.vocab_size];
  scoring.blank = fused_blank(blank, fusion, params.blank_mode);
  scoring.offset = token_offset(blank, params, fusion);
  scoring.bound = fusion.bound(own.hypothesis);
  scoring.longest = own.row.duration(own.row.longest_duration());
  scoring.num_durations = params.num_durations;
  scoring.timed = params.timed;
  return scoring;
}

// The thresholds of step 1. Call with all threads; ends with a barrier.
inline void find_threshold(const Row& row, int num_tokens, Workspace& work) {
  float peak = negative_infinity();
  for (int v = thread(); v < num_tokens; v += threads()) peak = fmaxf(peak, row[v]);
  work.peaks[thread()] = peak;
  if (thread() == 0) work.best.counters->threshold = negative_infinity();
  __syncthreads();
  int rank = 0;
  for (int i = 0; i < threads(); i++) {
    rank += work.peaks[i] > peak || (work.peaks[i] == peak && i < thread());
  }
  if (rank == work.best.wanted - 1) work.best.counters->threshold = peak;
  __syncthreads();
}

// Whether a label that was not looked up yet can reach the floor.
inline bool may_reach(float floor, float log_prob, const Scoring& scoring) {
  float base = log_prob + scoring.offset;
  return base > negative_infinity() &&
         !(scoring.before + ((base + scoring.bound) + scoring.longest) < floor);
}

// Look up the listed labels and append the extensions that reach the floor. Call with all threads after a
// barrier; ends with one.
inline void offer_labels(const Row& row, const Scoring& scoring, int& reserved, Workspace& work) {
  TopList& best = work.best;
  const int num_labels = best.counters->num_labels;
  for (int first = 0; first < num_labels; first += threads()) {
    int i = first + thread(), label = i < num_labels ? work.labels[i] : 0;
    Fused fused{0.0f, 0, 0};
    float base = 0.0f;
    if (i < num_labels) {
      base = row[label] + scoring.offset;
      float least = (best.counters->floor - scoring.before) - scoring.longest - base;
      fused = fused_token(scoring.fusion, scoring.lm_state, scoring.boosting_state, label, least);
    }
    for (int d = 0; d < scoring.num_durations; d++) {
      best.reserve(reserved);
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
  ListCounters& counters = *work.best.counters;
  const float threshold = counters.threshold;
  for (int begin = 0; begin < num_tokens; begin += work.sizes.labels) {
    if (thread() == 0) counters.num_labels = 0;
    __syncthreads();
    int end = min(begin + work.sizes.labels, num_tokens);
    for (int v = begin + thread(); v < end; v += threads()) {
      float log_prob = row[v];
      if ((log_prob >= threshold) != above || !may_reach(counters.floor, log_prob, scoring)) continue;
      work.labels[atomicAdd(&counters.num_labels, 1)] = v;
    }
    __syncthreads();
    offer_labels(row, scoring, reserved, work);
    __syncthreads();
  }
}

// Find the best extensions by blank and tokens 0 .. V - 1, best first; returns their number. The list's `wanted`
// and `gamma` limit it. Call with all threads; ends with a barrier.
inline int find_best(const Row& row, const SearchParams& params, const Scoring& scoring, Workspace& work) {
  TopList& best = work.best;
  const int blank = params.vocab_size * scoring.num_durations;
  best.clear();
  int reserved = 0;
  for (int first = 0; first < scoring.num_durations; first += threads()) {
    best.reserve(reserved);
    int d = first + thread();
    if (d < scoring.num_durations) {
      float score = scoring.before + (scoring.blank + (scoring.timed ? row.duration(d) : 0.0f));
      best.append(score, blank + d, scoring.lm_state, scoring.boosting_state);
    }
    __syncthreads();
  }
  find_threshold(row, params.vocab_size, work);
  for (int above = 1; above >= 0; above--) {
    scan_tokens(row, params.vocab_size, above, scoring, reserved, work);
    reserved = best.keep_best();
  }
  return reserved;
}

// Number of the sorted extensions that are better than the best minus gamma, the same in all threads. Call
// with all threads after a barrier.
inline int count_within_gamma(const TopList& best, int count) {
  int within = 0;
  for (int first = 0; first < count; first += threads()) {
    int i = first + thread();
    bool in = i < count && score_of(best.keys[i]) > score_of(best.keys[0]) - best.gamma;
    within += __syncthreads_count(in);
  }
  return within;
}

// Write the sorted extensions of the list. Call with all threads after a barrier; returns `count`.
inline int write_extensions(const Expansion& own, int count, const Workspace& work) {
  for (int i = thread(); i < count; i += threads()) {
    uint64 key = work.best.keys[i];
    const FusionStates& states = work.best.states[i];
    int choice = choice_of(key);
    float log_prob = own.row[choice / own.row.num_durations];
    own.extensions[i] = {score_of(key), own.k, choice, states.lm, states.boosting, log_prob};
  }
  return count;
}

// The forced blank of a hypothesis, with the most probable duration.
inline Candidate forced_blank(const Expansion& own, float blank_score, const SearchParams& params) {
  int d = own.row.longest_duration();
  float score = own.hypothesis.score + (blank_score + own.row.duration(d));
  int choice = params.vocab_size * params.num_durations + d;
  const Hypothesis& parent = own.hypothesis;
  return {score, own.k, choice, parent.lm_state, parent.boosting_state, own.row[params.vocab_size]};
}

// Defined by each strategy: write the best extensions of a hypothesis, best first; thread 0 returns their
// number. Called with all threads after a barrier.
inline int list_extensions(Expansion& own, const ExpandArgs& args, Workspace& work);

// Empty a row of the prediction network's batch before `merge` fills it.
inline void clear_prediction_row(const ExpandArgs& args, int row) {
  if (row == 0) *args.taken_rows = 0;
  if (row >= args.prediction_rows) return;
  args.labels[row] = 0;
  args.sources[row] = args.targets[row] = NO_ROW;
}

// The extensions of hypothesis number blockIdx.x of B * K.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, EXPAND_BLOCKS) expand(const ExpandArgs args) {
  extern __shared__ __align__(16) unsigned char smem[];
  if (thread() == 0) clear_prediction_row(args, blockIdx.x);
  Workspace work(smem, args);
  Expansion own(args);
  if (!reads_row(own, args, work)) return;
  int count = list_extensions(own, args, work);
  if (thread() == 0) args.counts[blockIdx.x] = count;
}
