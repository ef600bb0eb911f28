// alsd_pp on the GPU: a step of alsd.py is two launches [ALSD++/AES++].
//
//   expand  one block per hypothesis: log-softmax of its logits, blank scoring, LM and boosting; its K
//           best extensions
//   merge   one block per utterance: the K best of all become the new beam; the frame that each hypothesis reads next
//
// Between two steps torch runs the prediction network and the joint. schedule.cu begins a run.
//
// Compiled once per type of logits; with LOOP for the body of a WHILE node, whose condition `merge` can set.
// variants: LOGIT=float
// variants: LOGIT=Half
// variants: LOGIT=BFloat16
// variants: LOGIT=float LOOP=1
// variants: LOGIT=Half LOOP=1
// variants: LOGIT=BFloat16 LOOP=1
// Four blocks per multiprocessor: 128 utterances with K = 4 are one wave of an H100. From sm_100 on, with NVRTC 12, and
// on sm_90 with NVRTC before 13.5, that spills registers.
#define NVRTC (__CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__)
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ >= 1000 || NVRTC < 1300 || (__CUDA_ARCH__ == 900 && NVRTC < 1305))
#define EXPAND_BLOCKS 3
#else
#define EXPAND_BLOCKS 4
#endif
#include "search/transducer/expand.cuh"
#include "search/transducer/merge.cuh"

// List the K most probable labels of the joint in work.labels; returns their number.
inline int best_labels(const Row& row, const SearchParams& params, Workspace& work) {
  Scoring scoring{};
  scoring.blank = row[params.vocab_size];
  scoring.num_durations = 1;
  int count = find_best(row, params, scoring, work);
  for (int i = thread(); i < count; i += threads()) work.labels[i] = choice_of(work.best.keys[i]);
  return count;
}

// Rank the extensions by the joint's K best labels by their scores with LM and boosting; returns their number.
inline int rank_early(const Expansion& own, const SearchParams& params, Workspace& work) {
  const Row& row = own.row;
  const Hypothesis& hypothesis = own.hypothesis;
  const int num_labels = best_labels(row, params, work);
  const float offset = token_offset(row[params.vocab_size], params, own.fusion);
  TopList& best = work.best;
  best.clear();
  int reserved = 0;
  for (int first = 0; first < num_labels; first += threads()) {
    int i = first + thread(), label = i < num_labels ? work.labels[i] : 0;
    Fused fused{};
    if (i < num_labels) fused = fused_label(row, label, offset, hypothesis, own.fusion, params);
    for (int d = 0; d < params.num_durations; d++) {
      best.reserve(reserved);
      if (i < num_labels) {
        float score = hypothesis.score + (fused.score + row.duration(d));
        best.append(score, label * params.num_durations + d, fused.lm_state, fused.boosting_state);
      }
      __syncthreads();
    }
  }
  return best.keep_best();
}

inline int list_extensions(Expansion& own, const ExpandArgs& args, Workspace& work) {
  const SearchParams& params = args.params;
  if (own.hypothesis.symbols >= params.max_symbols) {
    if (thread() != 0) return 0;
    // with early pruning a forced blank keeps its plain score, as in NeMo
    int blank_mode = params.late ? params.blank_mode : NO_SCORE;
    float blank = fused_blank(own.row[params.vocab_size], own.fusion, blank_mode);
    own.extensions[0] = forced_blank(own, blank, params);
    return own.extensions[0].score > negative_infinity();
  }
  if (!params.late) return write_extensions(own, rank_early(own, params, work), work);
  return write_extensions(own, find_best(own.row, params, fused_scoring(own, params), work), work);
}

// Rank the extensions of all hypotheses, sorted lists of at most M each, and put the K best of all into
// work.chosen; returns their number, the same in all threads. Order as in candidate_key. Call with
// all threads after a barrier; ends with one.
inline int choose(MergeWorkspace& work, int size, const MergeContext& context) {
  const SearchParams& params = context.params();
  const Candidate* extensions = context.extensions();
  const int per_hypothesis = params.max_extensions;
  const int total = size * per_hypothesis;
  for (int i = thread(); i < total; i += threads()) {
    if (i % per_hypothesis >= work.counts[i / per_hypothesis]) continue;
    work.keys[i] = candidate_key(extensions[i].score, extensions[i], params);
  }
  int count = 0;
  for (int k = 0; k < size; k++) count += work.counts[k];
  __syncthreads();
  for (int i = thread(); i < total; i += threads()) {
    int own = i / per_hypothesis, rank = i % per_hypothesis;
    if (rank >= work.counts[own]) continue;
    uint64 key = work.keys[i];
    for (int k = 0; k < size && rank < params.beam_size; k++) {
      if (k == own) continue;
      int low = 0, high = work.counts[k];  // how many of a sorted list are better
      const uint64* keys = work.keys + k * per_hypothesis;
      while (low < high) {
        int middle = (low + high) >> 1;
        if (keys[middle] > key) low = middle + 1;
        else high = middle;
      }
      rank += low;
    }
    if (rank >= params.beam_size) continue;
    work.chosen[rank] = extensions[i];
  }
  __syncthreads();
  return min(count, params.beam_size);
}

inline void make_beam(MergeWorkspace& work, StreamCounters& now, const MergeContext& context) {
  merge_chosen(work, choose(work, now.size, context), now, context);
}
