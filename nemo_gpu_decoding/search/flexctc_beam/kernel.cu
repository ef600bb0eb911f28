// flexctc_beam on the GPU: the steps of frame.py [FlexCTC, section 3], one block per utterance.
//
// One launch reads a whole batch, or a chunk of each of its streams. A block loops over the frames of
// its utterance, with the beam in shared memory and the next frame on its way there:
//
//   1. blanks and repeats are offered: they need no LM
//   2. their K-th best score, and the best less the threshold, are the floor
//   3. where the LM state has few arcs, the labels that it expects are offered; the floor rises
//   4. the row is scanned for labels that can reach the floor at all
//   5. each of these is tested against the bound of every hypothesis
//   6. the pairs that are left are looked up, one per thread, and offered if they reach the floor
//   7. the K best of all become the new beam
//
// The K hypotheses are those of frame.py, to the bit: they depend on the order of candidates alone, and
// not on when a floor rises.
//
// Compiled once per type of log-prob (LOG_PROB) and for merge=prefix and the others apart (PREFIX).
// variants: LOG_PROB=float PREFIX=0
// variants: LOG_PROB=float PREFIX=1
// variants: LOG_PROB=Half PREFIX=0
// variants: LOG_PROB=BFloat16 PREFIX=1
#ifndef PREFIX
#define PREFIX 0
#endif

#include "search/flexctc_beam/prefix.cuh"
#include "search/flexctc_beam/select.cuh"
#include "search/rows.cuh"

constexpr int MAX_THREADS = 512;

// Empty the lists of labels and pairs for the next columns. Call with all threads.
inline void restart_lists(Counters& counters) {
  __syncthreads();
  if (thread() == 0) counters.num_labels = counters.num_pairs = 0;
  __syncthreads();
}

inline void restart_pairs(Counters& counters) {
  __syncthreads();
  if (thread() == 0) counters.num_pairs = 0;
  __syncthreads();
}

// Step 1: offer candidates without a new token. A barrier must follow.
inline void offer_blanks_and_repeats(const Row& row, int size, Workspace& work) {
  const int blank = work.params.blank_id;
  for (int k = thread(); k < size; k += threads()) {
    if (PREFIX) {
      offer_same_text(row, size, k, work);
      continue;
    }
    const Hypothesis& hypothesis = work.beam[k];
    int last = hypothesis.last_label;
    CandidateItem item{k, blank, hypothesis.lm_state, hypothesis.boosting_state};
    work.candidates.append(hypothesis.score + row[blank], item);
    if (last == NO_LABEL || last == blank) continue;
    item.label = last;
    work.candidates.append(hypothesis.score + row[last], item);
  }
}

// Step 4: list the labels begin .. end - 1 that are not below `least`. True if this thread meets a bad
// value. A barrier must follow.
inline bool list_labels(const Row& row, int begin, int end, float least, Workspace& work) {
  bool bad = false;
  for (int column = begin + thread(); column < end; column += threads()) {
    float value = row[column];
    bad |= !(value <= most_log_prob());
    if (value >= least && value > negative_infinity() && column != work.params.blank_id) {
      work.labels[atomicAdd(&work.counters->num_labels, 1)] = column;
    }
  }
  return bad;
}

// The score of a new token before LM and boosting, or -inf where none can follow.
inline float base_of(const Row& row, const Hypothesis& hypothesis, int column, float beam_beta) {
  return score_before(hypothesis, column) + row[column] + beam_beta;
}

// Step 5: list those of the pairs begin .. end - 1 that can reach the floor. A barrier must follow.
inline void list_pairs(
  const Row& row, int begin, int end, int size, float floor, Workspace& work
) {
  for (int pair = begin + thread(); pair < end; pair += threads()) {
    const Hypothesis& hypothesis = work.beam[pair % size];
    float base = base_of(row, hypothesis, work.labels[pair / size], work.params.beam_beta);
    float bound = base + hypothesis.lm_bound + hypothesis.boosting_bound;
    if (base == negative_infinity() || bound < floor) continue;
    work.pairs[atomicAdd(&work.counters->num_pairs, 1)] = pair;
  }
}

// Step 3: list those of the own arcs begin .. end - 1, FEW_ARCS for each hypothesis, that can reach the
// floor, as ~number. A barrier must follow.
inline void list_own_arcs(const Row& row, int begin, int end, float floor, Workspace& work) {
  const UtteranceFusion& fusion = work.fusion;
  for (int i = begin + thread(); i < end; i += threads()) {
    const Hypothesis& hypothesis = work.beam[i / FEW_ARCS];
    const State& state = fusion.lm.states[hypothesis.lm_state];
    int number = state.arc_begin + i % FEW_ARCS;
    if (!fusion.offers_arcs(state) || number >= state.arc_end) continue;
    const Arc arc = fusion.lm.arcs[number];
    float base = base_of(row, hypothesis, fusion.column_of(arc.label), work.params.beam_beta);
    float bound = base + fusion.lm_weight * arc.weight + hypothesis.boosting_bound;
    if (base == negative_infinity() || bound < floor) continue;
    work.pairs[atomicAdd(&work.counters->num_pairs, 1)] = ~i;
  }
}

// Look up the label of one entry of the list of pairs, and offer it. One thread.
inline void offer_pair(const Row& row, int pair, int size, float floor, Workspace& work) {
  const UtteranceFusion& fusion = work.fusion;
  int k = pair < 0 ? ~pair / FEW_ARCS : pair % size;
  const Hypothesis& hypothesis = work.beam[k];
  const State& state = fusion.lm.states[hypothesis.lm_state];
  int column;
  if (pair < 0) {
    column = fusion.column_of(fusion.lm.arcs[state.arc_begin + ~pair % FEW_ARCS].label);
  } else {
    column = work.labels[pair / size];
    bool offered = fusion.offers_arcs(state) && find_arc(fusion.lm, state, fusion.label_of(column)) >= 0;
    if (offered) return;
  }
  if (PREFIX) {  // `offer_same_text` has counted this way to a text of the beam
    uint64 text_hash = extended_hash(hypothesis.text_hash, column);
    if (find_text(work.beam, size, text_hash, hypothesis.length + 1) >= 0) return;
  }
  float base = base_of(row, hypothesis, column, work.params.beam_beta);
  CandidateItem item{k, ~column, 0, 0};
  float score = fused(base, hypothesis, column, floor, fusion, item);
  if (score >= floor) work.candidates.append(score, item);
}

// Offer all pairs that are listed; returns their number. `reserved` is an upper bound of the number of
// candidates; it and the floor are the same in all threads. Call with all threads after a barrier; ends
// with one if there are pairs.
inline int offer_pairs(const Row& row, int size, float& floor, int& reserved, Workspace& work) {
  const int capacity = work.sizes.candidates, num_pairs = work.counters->num_pairs;
  for (int first = 0; first < num_pairs; first += threads()) {
    if (reserved + threads() > capacity) {
      reserved = work.counters->num_candidates;
      __syncthreads();
    }
    if (reserved + threads() > capacity) {
      work.candidates.keep_best();
      reserved = work.beam_size;
      floor = work.candidates.floor_of(work.params.threshold);
    }
    int i = first + thread();
    if (i < num_pairs) offer_pair(row, work.pairs[i], size, floor, work);
    reserved += min(threads(), num_pairs - first);
    __syncthreads();
  }
  return num_pairs;
}

// Step 3: offer the arcs of LM states with few arcs, and raise the floor. Call with all threads after a
// barrier; a barrier must follow.
inline void offer_own_arcs(const Row& row, int size, float& floor, int& reserved, Workspace& work) {
  const int total = size * FEW_ARCS, step = work.sizes.pairs;
  int offered = 0;
  for (int begin = 0; begin < total; begin += step) {
    if (begin > 0) restart_pairs(*work.counters);
    list_own_arcs(row, begin, min(begin + step, total), floor, work);
    __syncthreads();
    offered += offer_pairs(row, size, floor, reserved, work);
  }
  if (offered == 0) return;
  __syncthreads();
  if (thread() == 0) work.counters->num_pairs = 0;
  work.candidates.note_best();
  __syncthreads();
  floor = work.candidates.floor_of(work.params.threshold);
}

// Steps 5 and 6 for the labels that are listed. Call with all threads after a barrier; ends with one.
inline void offer_new_tokens(const Row& row, int size, float& floor, int& reserved, Workspace& work) {
  const int total = work.counters->num_labels * size, step = work.sizes.pairs;
  for (int begin = 0; begin < total; begin += step) {
    if (begin > 0) restart_pairs(*work.counters);
    list_pairs(row, begin, min(begin + step, total), size, floor, work);
    __syncthreads();
    offer_pairs(row, size, floor, reserved, work);
  }
}

// Steps 1 to 6: list the candidates for the K best of the frame; false if it holds NaN or a
// value above most_log_prob(). Call with all threads after a barrier; ends with one.
inline bool list_candidates(const Row& row, int size, Workspace& work) {
  const int columns = work.columns(), step = work.sizes.labels;
  offer_blanks_and_repeats(row, size, work);
  float best = float_of_key(work.counters->best_new_score);
  __syncthreads();
  int reserved = work.counters->num_candidates;
  work.candidates.note_best();
  __syncthreads();
  float floor = work.candidates.floor_of(work.params.threshold);
  if (work.fusion.lm_weight > 0) offer_own_arcs(row, size, floor, reserved, work);
  for (int begin = 0; begin < columns; begin += step) {
    if (begin > 0) restart_lists(*work.counters);
    int end = min(begin + step, columns);
    bool bad = list_labels(row, begin, end, least_log_prob(floor, best), work);
    if (__syncthreads_or(bad)) return false;
    offer_new_tokens(row, size, floor, reserved, work);
  }
  return true;
}

// Copy records as words, with all threads.
inline void copy_beam(Hypothesis* to, const Hypothesis* from, int size) {
  for (int i = thread(); i < size * (int)(sizeof(Hypothesis) / 8); i += threads()) {
    ((uint64*)to)[i] = ((const uint64*)from)[i];
  }
}

// Bring the beam of an utterance into shared memory and prepare the counters. A barrier must follow.
inline void load_beam(
  const Hypothesis* stored, const Progress& progress, const Utterance& utterance, Workspace& work
) {
  int size = progress.frames == 0 ? 1 : progress.size;
  if (progress.frames > 0) copy_beam(work.beam, stored, size);
  if (thread() == 0) {
    *work.counters = Counters{};
    work.counters->beam_size = size;
    if (progress.frames == 0) {
      Hypothesis first = first_hypothesis(utterance);
      first.lm_bound = work.fusion.lm_bound(first.lm_state);
      first.boosting_bound = work.fusion.boosting_bound(first.boosting_state);
      work.beam[0] = first;
    }
  }
  __syncthreads();
  for (int k = thread(); k < size; k += threads()) {
    atomicMax(&work.counters->best_new_score, ordered_key(best_new_score(work.beam[k], work.params.beam_beta)));
  }
}

// Keep the scores of the beam small; returns what is subtracted from them. Call with all threads after a barrier.
inline float rebase(Workspace& work) {
  const int size = work.counters->beam_size;
  const float shift = rebased(work.beam[0].score);
  if (shift == 0) return 0;
  __syncthreads();
  for (int k = thread(); k < size; k += threads()) {
    work.beam[k].score -= shift;
    work.beam[k].blank_score -= shift;
    work.beam[k].token_score -= shift;
  }
  if (thread() == 0) work.counters->best_new_score = 0;
  __syncthreads();
  for (int k = thread(); k < size; k += threads()) {
    atomicMax(&work.counters->best_new_score, ordered_key(best_new_score(work.beam[k], work.params.beam_beta)));
  }
  __syncthreads();
  return shift;
}

// Why a chunk of `length` frames cannot be read, or FINE.
inline int checked(const Progress& progress, int64 length, int frames, int capacity) {
  if (progress.status != FINE) return progress.status;
  if (length < 0 || length > frames) return BAD_LENGTH;
  return progress.frames + length > capacity ? BACK_POINTERS_FULL : FINE;
}

// Read lengths[b] frames of every utterance b = blockIdx.x.
//
// `beams` and `progress` are the state before the chunk, `next_beams` and `next_progress` the state after it;
// both may be the same memory. An utterance that cannot continue keeps its status and the number of frames
// before the bad one; later launches do not change it.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1) advance(const AdvanceArgs args) {
  extern __shared__ __align__(16) unsigned char smem[];
  const int b = blockIdx.x, vocab_size = args.params.vocab_size, columns = vocab_size + 1;
  const Utterance utterance = args.utterances[b];
  const UtteranceFusion fusion{
    {args.lm_states, args.lm_arcs, vocab_size}, {args.boosting_states, args.boosting_arcs, vocab_size},
    utterance.lm_weight, utterance.boosting_weight, args.params.blank_id,
  };
  const BackPointers back_pointers{
    args.back_pointer_labels, args.back_pointer_parents, args.back_pointer_log_probs, args.capacity,
    args.beam_size,
  };
  Workspace work(smem, args.params, args.beam_size, args.sizes, fusion);
  Counters& counters = *work.counters;
  Progress now = args.progress[b];
  const int64 length = args.lengths[b];
  now.status = checked(now, length, args.frames, args.capacity);
  load_beam(args.beams + (int64)b * args.beam_size, now, utterance, work);
  const LogProb* first = args.log_probs + (int64)b * args.frames * columns;
  RowReader rows(first, columns, now.status == FINE ? length : 0, work.rows, args.shared_rows);
  while (now.status == FINE && rows.any()) {
    const Row row = rows.next();
    if (!list_candidates(row, counters.beam_size, work)) {
      now.status = BAD_INPUT;
    } else if (counters.num_candidates == 0) {
      now.status = NO_LABEL_POSSIBLE;
    } else {
      select(row, work, back_pointers, b, now.frames);
      now.frames++;
    }
    rows.wait();
    __syncthreads();
    if (now.status == FINE) now.offset += rebase(work);
  }
  copy_beam(args.next_beams + (int64)b * args.beam_size, work.beam, counters.beam_size);
  now.size = counters.beam_size;
  if (thread() == 0) args.next_progress[b] = now;
}
