// alsd_pp on the GPU: a step of alsd_pp/cpu.py is two launches [ALSD++/AES++].
//
//   expand  one block per hypothesis: log-softmax of its logits, blank scoring, LM and boosting; its K
//           best extensions
//   merge   one block per utterance: the K best of all become the new beam; who reads which frame next
//
// Between two steps torch runs the prediction network and the joint. `plan` begins a run.
//
// Compiled once per type of logits.
// variants: LOGIT=float
// variants: LOGIT=Half
// variants: LOGIT=BFloat16
#ifndef LOGIT
#define LOGIT float
#endif
#ifndef HYPOTHESIS_BYTES
#define HYPOTHESIS_BYTES 56
#endif

#include "cuda/common.cuh"

typedef LOGIT Logit;

#include "search/transducer/expand.cuh"
#include "search/transducer/merge.cuh"

constexpr int MAX_THREADS = 256;
constexpr float CEILING = 1.0f - 1e-2f;  // blank_scoring.ALSD_CEILING

// The K labels that the joint likes best: their numbers in work.labels; returns how many.
inline int best_labels(const Row& row, const Options& options, Workspace& work) {
  Scoring scoring{};
  scoring.blank = row[options.vocab_size];
  scoring.num_durations = 1;
  int count = find_best(row, options, scoring, work);
  for (int i = thread(); i < count; i += threads()) work.labels[i] = choice_of(work.best.keys[i]);
  return count;
}

// The K best labels by the joint, then scored with LM and boosting; returns how many extensions are kept.
inline int expand_early(
  const Row& row, const Hypothesis& hypothesis, const Fusion& fusion, const Options& options,
  Workspace& work
) {
  const int num_labels = best_labels(row, options, work);
  const float blank = row[options.vocab_size];
  const float offset = token_offset(blank, fusion.alpha(), options.weighted_blank, CEILING);
  TopList& best = work.best;
  best.clear();
  int reserved = 0;
  for (int first = 0; first < num_labels; first += threads()) {
    int i = first + thread(), label = i < num_labels ? work.labels[i] : 0;
    Fused fused{0.0f, hypothesis.lm_state, hypothesis.boosting_state};
    float base = fused_blank(blank, fusion.alpha(), options.weighted_blank);
    if (i < num_labels && label < options.vocab_size) {
      fused = fused_token(fusion, fused.lm_state, fused.boosting_state, label, negative_infinity());
      base = (row[label] + offset) + fused.score;
    }
    for (int d = 0; d < options.num_durations; d++) {
      best.make_room(reserved);
      if (i < num_labels) {
        float score = hypothesis.score + (base + row.duration(d));
        best.append(score, label * options.num_durations + d, fused.lm_state, fused.boosting_state);
      }
      __syncthreads();
    }
  }
  return best.keep_best();
}

// A hypothesis that has emitted max_symbols tokens in its frame takes a blank. One thread.
inline Extension forced_blank(
  const Row& row, const Hypothesis& hypothesis, const Fusion& fusion, const Options& options
) {
  // where labels are narrowed down early, a forced blank keeps its plain score, as in NeMo
  bool weighted = options.weighted_blank && options.late;
  float log_prob = row[options.vocab_size];
  float blank = fused_blank(log_prob, fusion.alpha(), weighted);
  int d = row.longest_duration();
  float score = hypothesis.score + (blank + row.duration(d));
  int choice = options.vocab_size * options.num_durations + d;
  return {score, choice, hypothesis.lm_state, hypothesis.boosting_state, log_prob};
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1) expand(
  const Logit* logits,  // [B * K, columns]
  const Utterance* utterances,  // [B]
  const Hypothesis* beams,  // [B, K]
  const Progress* progress,  // [B]
  const int64* frame_rows,  // [B, K]
  const State* lm_states, const Arc* lm_arcs, const State* boosting_states, const Arc* boosting_arcs,
  Extension* extensions,  // [B, K, M], here M = K
  int* counts,  // [B, K]
  double inverse_temperature, int columns, int beam_size, int vocab_size, int num_durations, int timed,
  int weighted_blank, int late, int max_symbols, int per_hypothesis, int max_items, int max_labels
) {
  extern __shared__ __align__(16) unsigned char smem[];
  const Options options{
    beam_size, vocab_size, num_durations, timed, weighted_blank, late, 0, 0};
  const ExpandInputs in{
    logits, utterances, beams, progress, frame_rows, {lm_states, lm_arcs, vocab_size},
    {boosting_states, boosting_arcs, vocab_size}, inverse_temperature, columns, extensions, counts,
    per_hypothesis};
  Workspace work(smem, {max_items, max_labels});
  Subject subject(in, options);
  if (!reads_row(subject, in, work.scratch)) return;
  const Hypothesis& hypothesis = subject.hypothesis;
  const Row& row = subject.row;
  if (hypothesis.symbols >= max_symbols) {
    if (thread() == 0) {
      const Extension blank = forced_blank(row, hypothesis, subject.fusion, options);
      subject.only(blank, blank.score > negative_infinity());
    }
    return;
  }
  work.best.wanted = per_hypothesis;
  work.best.gamma = __int_as_float(0x7f800000);  // infinity: none is too far below the best
  int count = 0;
  if (late) {
    const Scoring scoring = fused_scoring(row, hypothesis, subject.fusion, options, CEILING);
    count = find_best(row, options, scoring, work);
  } else {
    count = expand_early(row, hypothesis, subject.fusion, options, work);
  }
  for (int i = thread(); i < count; i += threads()) {
    uint64 key = work.best.keys[i];
    const States& states = work.best.states[i];
    int choice = choice_of(key);
    subject.own[i] = {score_of(key), choice, states.lm, states.boosting, row[choice / num_durations]};
  }
  if (thread() == 0) *subject.count = count;
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1) merge(
  const Extension* extensions,  // [B, K, M]
  const int* counts,  // [B, K]
  const int* durations,  // [D] frames
  const Utterance* utterances,  // [B]
  Hypothesis* beams,  // [B, K]
  Progress* progress,  // [B]
  Node* nodes,  // [B, room]
  int64* frame_rows, int64* text_rows,  // [B, K]
  int64* labels, int64* sources, int64* targets,  // [B, K]
  int room, int entries, int beam_size, int vocab_size, int num_durations, int alignments,
  int per_hypothesis
) {
  extern __shared__ __align__(16) unsigned char smem[];
  const Place place{
    (int)blockIdx.x,
    {utterances, beams, progress, frame_rows, text_rows},
    {nodes, room},
    {labels, sources, targets},
    durations,
    entries,
    per_hypothesis,
    {beam_size, vocab_size, num_durations, 0, 0, 0, alignments, 0}};
  Progress now = progress[place.b];
  if (now.activity != GOING) {
    place.wishes.clear_all(place.first(), beam_size);
    return;
  }
  MergeWorkspace work(smem, beam_size, per_hypothesis);
  if (fetch_beam(work, place, now.size, counts)) {
    int count = choose(work, extensions + place.first() * per_hypothesis, now.size, place);
    merge_choices(work, count, now, place);
  } else {
    now.size = BAD_INPUT;
    place.wishes.clear_all(place.first(), beam_size);
  }
  plan(place.batch, place.b, place.beam(), now, place.options, entries, room);
}
