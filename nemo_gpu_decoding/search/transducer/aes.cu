// aes_pp on the GPU: a step of aes.py is two launches [ALSD++/AES++].
//
//   expand  one block per hypothesis: log-softmax of its logits; in the first step of a frame, what its
//           prefixes contribute; its best extensions, or its forced blank
//   merge   one block per utterance: these and the hypotheses that have left the frame compete (pool.cuh);
//           the K best become the new beam; the frame that each hypothesis reads next
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
// Blocks of `expand` per multiprocessor. With four, 128 utterances with K = 4 are two waves of an A10; with two,
// four waves. On other GPUs more than two spill registers with fp32. With NVRTC 12 this has not been tried.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890) && __CUDACC_VER_MAJOR__ >= 13
#define EXPAND_BLOCKS 4
#else
#define EXPAND_BLOCKS 2
#endif
#include "search/transducer/expand.cuh"
#include "search/transducer/pool.cuh"

// The score of hypothesis `from` after emitting the last token of the longer text `to` in this frame.
inline float emitted_here(
  const Row& row, const Hypothesis& from, const Hypothesis& to, const UtteranceFusion& fusion,
  const SearchParams& params
) {
  float offset = token_offset(row[params.vocab_size], params, fusion);
  Fused token = fused_label(row, to.last_label, offset, from, fusion, params);
  return from.score + (token.score + row.duration(params.zero_duration));
}

// The score of a hypothesis with the probability that its open prefixes, one token shorter, emit its last token
// in this frame; the same in all threads. Call with all threads.
inline float with_prefixes(const Expansion& expansion, const ExpandArgs& args, NormaliseScratch& scratch) {
  const SearchParams& params = args.params;
  const int64 first = (int64)expansion.b * params.beam_size;
  const Hypothesis* beam = args.beams + first;
  const Hypothesis& own = beam[expansion.k];
  float gain = negative_infinity();
  const bool searches = own.length > 0 && params.zero_duration >= 0;
  for (int j = 0; j < expansion.counters.size && searches; j++) {
    if (!beam[j].open || beam[j].text_hash != own.prefix_hash) continue;
    Row row = Expansion::row_of(first + j, args);
    if (!normalise(row, scratch.prefix, scratch.sums)) continue;  // its own block reports it
    gain = log_add(gain, emitted_here(row, beam[j], own, expansion.fusion, params));
  }
  return log_add(own.score, gain);
}

// The best extensions by the joint alone, in that order, scored with LM and boosting afterwards. Call with all
// threads; returns their number.
inline int expand_early(const Expansion& own, const SearchParams& params, Workspace& work) {
  const Row& row = own.row;
  const Hypothesis& hypothesis = own.hypothesis;
  Scoring scoring{};
  scoring.before = hypothesis.score;
  scoring.blank = row[params.vocab_size];
  scoring.longest = row.duration(row.longest_duration());
  scoring.num_durations = params.num_durations;
  scoring.timed = params.timed;
  int count = count_within_gamma(work.best, find_best(row, params, scoring, work));
  const float offset = token_offset(scoring.blank, params, own.fusion);
  for (int i = thread(); i < count; i += threads()) {
    int choice = choice_of(work.best.keys[i]), label = choice / params.num_durations;
    Fused fused = fused_label(row, label, offset, hypothesis, own.fusion, params);
    float score = hypothesis.score + (fused.score + row.duration(choice % params.num_durations));
    own.extensions[i] = {score, own.k, choice, fused.lm_state, fused.boosting_state, row[label]};
  }
  return count;
}

inline int list_extensions(Expansion& own, const ExpandArgs& args, Workspace& work) {
  const SearchParams& params = args.params;
  if (own.counters.expansions == params.max_symbols) {  // by the blank's plain score, as in NeMo
    if (thread() == 0) own.extensions[0] = forced_blank(own, own.row[params.vocab_size], params);
    return 1;
  }
  if (own.counters.expansions == 0) own.hypothesis.score = with_prefixes(own, args, *work.scratch);
  if (!params.late) return expand_early(own, params, work);
  int count = find_best(own.row, params, fused_scoring(own, params), work);
  return write_extensions(own, count_within_gamma(work.best, count), work);
}
