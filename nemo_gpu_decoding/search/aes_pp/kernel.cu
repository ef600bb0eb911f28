// aes_pp on the GPU: a step of aes_pp/cpu.py is two launches [ALSD++/AES++].
//
//   expand  one block per hypothesis: log-softmax of its logits; in the first step of a frame, what its
//           prefixes contribute; its few best extensions, or its forced blank
//   merge   one block per utterance: these and the hypotheses that have left the frame compete; the K
//           best become the new beam; who reads which frame next
//
// Between two steps torch runs the prediction network and the joint. `plan.cu` begins a run.
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

#include "search/aes_pp/pool.cuh"
#include "search/transducer/expand.cuh"

constexpr int MAX_THREADS = 256;
constexpr float CEILING = 1.0f - 1e-6f;  // blank_scoring.AES_CEILING

// What hypothesis `from` contributes to the longer text of hypothesis `to` by emitting its last token in
// this frame.
inline float emitted_here(
  const Row& row, const Hypothesis& from, const Hypothesis& to, int stay, const Fusion& fusion,
  const Options& options
) {
  float blank = row[options.vocab_size];
  float offset = token_offset(blank, fusion.alpha(), options.weighted_blank, CEILING);
  Fused fused = fused_token(
    fusion, from.lm_state, from.boosting_state, to.last_label, negative_infinity());
  float token = (row[to.last_label] + offset) + fused.score;
  return from.score + (token + row.duration(stay));
}

// The score of a hypothesis with what its prefixes, one token shorter and open too, contribute in this
// frame; alike in all threads. Call with all threads.
inline float with_prefixes(
  const Subject& subject, const ExpandInputs& in, int stay, const Options& options, double* scratch
) {
  const int64 first = (int64)subject.b * options.beam_size;
  const Hypothesis* beam = in.beams + first;
  const Hypothesis& own = beam[subject.k];
  float gain = negative_infinity();
  for (int j = 0; j < subject.now.size && own.length > 0 && stay >= 0; j++) {
    if (!beam[j].open || beam[j].text_hash != own.prefix_hash) continue;
    Row row(in.logits + (first + j) * in.columns, in.inverse_temperature, options);
    normalise(row, scratch);  // if it is bad, its own block says so
    if (row.normaliser.bad) continue;
    gain = log_add(gain, emitted_here(row, beam[j], own, stay, subject.fusion, options));
  }
  return log_add(own.score, gain);
}

// The best extensions by the joint alone, scored with LM and boosting afterwards, in the order of the
// former. Call with all threads; returns how many.
inline int expand_early(const Subject& subject, const Options& options, Workspace& work) {
  const Row& row = subject.row;
  const Hypothesis& hypothesis = subject.hypothesis;
  const Fusion& fusion = subject.fusion;
  Scoring scoring{};
  scoring.before = hypothesis.score;
  scoring.blank = row[options.vocab_size];
  scoring.longest = row.duration(row.longest_duration());
  scoring.num_durations = options.num_durations;
  scoring.timed = options.timed;
  int count = count_within_gamma(work.best, find_best(row, options, scoring, work));
  const float offset = token_offset(scoring.blank, fusion.alpha(), options.weighted_blank, CEILING);
  for (int i = thread(); i < count; i += threads()) {
    int choice = choice_of(work.best.keys[i]), label = choice / options.num_durations;
    Fused fused{0.0f, hypothesis.lm_state, hypothesis.boosting_state};
    float score = fused_blank(scoring.blank, fusion.alpha(), options.weighted_blank);
    if (label < options.vocab_size) {
      fused = fused_token(fusion, fused.lm_state, fused.boosting_state, label, negative_infinity());
      score = (row[label] + offset) + fused.score;
    }
    score = hypothesis.score + (score + row.duration(choice % options.num_durations));
    subject.own[i] = {score, choice, fused.lm_state, fused.boosting_state, row[label]};
  }
  return count;
}

// The best extensions by all scores, best first. Call with all threads; returns how many.
inline int expand_late(const Subject& subject, const Options& options, Workspace& work) {
  const Row& row = subject.row;
  const Scoring scoring = fused_scoring(row, subject.hypothesis, subject.fusion, options, CEILING);
  int count = count_within_gamma(work.best, find_best(row, options, scoring, work));
  for (int i = thread(); i < count; i += threads()) {
    uint64 key = work.best.keys[i];
    const States& states = work.best.states[i];
    int choice = choice_of(key);
    int label = choice / options.num_durations;
    subject.own[i] = {score_of(key), choice, states.lm, states.boosting, row[label]};
  }
  return count;
}

// What is left open after the last step of a frame takes a blank, by its plain score, as in NeMo.
inline Extension forced_blank(const Row& row, const Hypothesis& hypothesis, const Options& options) {
  int d = row.longest_duration();
  float blank = row[options.vocab_size];
  int choice = options.vocab_size * options.num_durations + d;
  float score = hypothesis.score + (blank + row.duration(d));
  return {score, choice, hypothesis.lm_state, hypothesis.boosting_state, blank};
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1) expand(
  const Logit* logits,  // [B * K, columns]
  const Utterance* utterances,  // [B]
  const Hypothesis* beams,  // [B, K]
  const Progress* progress,  // [B]
  const int64* frame_rows,  // [B, K]
  const State* lm_states, const Arc* lm_arcs, const State* boosting_states, const Arc* boosting_arcs,
  Extension* extensions,  // [B, K, M]
  int* counts,  // [B, K]
  double inverse_temperature, int columns, int beam_size, int vocab_size, int num_durations, int timed,
  int weighted_blank, int late, int num_steps, float gamma, int stay, int per_hypothesis, int max_items,
  int max_labels
) {
  extern __shared__ __align__(16) unsigned char smem[];
  const Options options{
    beam_size, vocab_size, num_durations, timed, weighted_blank, late, 0, 1};
  const ExpandInputs in{
    logits, utterances, beams, progress, frame_rows, {lm_states, lm_arcs, vocab_size},
    {boosting_states, boosting_arcs, vocab_size}, inverse_temperature, columns, extensions, counts,
    per_hypothesis};
  Workspace work(smem, {max_items, max_labels});
  Subject subject(in, options);
  if (!reads_row(subject, in, work.scratch)) return;
  if (subject.now.expansions == num_steps) {
    if (thread() == 0) subject.only(forced_blank(subject.row, subject.hypothesis, options));
    return;
  }
  if (subject.now.expansions == 0) {
    subject.hypothesis.score = with_prefixes(subject, in, stay, options, work.scratch);
  }
  work.best.wanted = per_hypothesis;
  work.best.gamma = gamma;
  int count = late ? expand_late(subject, options, work) : expand_early(subject, options, work);
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
  int room, int entries, int beam_size, int vocab_size, int num_durations, int alignments, int timed,
  int num_steps, int per_hypothesis
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
    {beam_size, vocab_size, num_durations, timed, 0, 0, alignments, 1}};
  Progress now = progress[place.b];
  if (now.activity != GOING) {
    place.wishes.clear_all(place.first(), beam_size);
    return;
  }
  MergeWorkspace work(smem, beam_size, per_hypothesis);
  if (fetch_beam(work, place, now.size, counts)) {
    const Extension* own = extensions + place.first() * per_hypothesis;
    if (now.expansions == num_steps) end_frame(work, own, now, place);
    else expand_in_frame(work, own, now, place);
  } else {
    now.size = BAD_INPUT;
    place.wishes.clear_all(place.first(), beam_size);
  }
  plan(place.batch, place.b, place.beam(), now, place.options, entries, room);
}
