// Construction of the new beam from the best candidates: recombination, tree of tokens, prediction cache. Counterpart
// of beam.py.
#pragma once

#include "search/numerics.cuh"
#include "search/rank_key.cuh"
#include "search/transducer/schedule.cuh"
#ifdef LOOP  // drivers older than WHILE nodes would not load it
#include "cuda/graph_condition.cuh"
#endif

// The utterance of a block, and its output arrays.
struct MergeContext {
  const MergeArgs& args;
  int b;

  const SearchParams& params() const { return args.params; }

  int64 first() const { return (int64)b * args.params.beam_size; }

  Hypothesis* beam() const { return args.beams + first(); }

  // [K, M]
  const Candidate* extensions() const { return args.extensions + first() * args.params.max_extensions; }

  // The buffer holds the nodes that were added since the host fetched them last.
  Node& node(int number, const StreamCounters& now) const {
    return args.nodes[(int64)b * args.node_capacity + number - now.node_base];
  }
};

// The key of a candidate; order: descending score, then ascending parent, then ascending choice.
inline uint64 candidate_key(float score, const Candidate& candidate, const SearchParams& params) {
  const uint32 choices = (uint32)(params.vocab_size + 1) * params.num_durations + 1;
  return rank_key(score, (uint32)candidate.parent * choices + (uint32)(candidate.choice + 1));
}

// The workspace of a block, in shared memory in the order of the fields.
struct MergeWorkspace {
  Hypothesis* beam;  // [K]
  Hypothesis* next;  // [K] in the order of their scores, equal ones not merged yet
  uint64* keys;  // [K * M] of all extensions
  Candidate* chosen;  // [K] the best of them
  int* counts;  // [K] extensions of each hypothesis
  int* leaders;  // [K] the first of `next` that it is equal to
  int* free_entries;  // [K] of the prediction cache

  MergeWorkspace(uint8* shared, const SearchParams& params) {
    const int beam_size = params.beam_size;
    beam = take<Hypothesis>(shared, beam_size);
    next = take<Hypothesis>(shared, beam_size);
    keys = take<uint64>(shared, beam_size * params.max_extensions);
    chosen = take<Candidate>(shared, beam_size);
    counts = take<int>(shared, beam_size);
    leaders = take<int>(shared, beam_size);
    free_entries = take<int>(shared, beam_size);
  }
};

// Fetch the beam and the number of extensions of each hypothesis; false if the joint returned NaN or +inf for
// one of them. Call with all threads; ends with a barrier.
inline bool fetch_beam(MergeWorkspace& work, const MergeContext& context, int size) {
  copy_records(work.beam, context.beam(), size);
  bool bad = false;
  for (int k = thread(); k < size; k += threads()) {
    work.counts[k] = context.args.counts[context.first() + k];
    bad |= work.counts[k] == BAD_INPUT;
  }
  return !__syncthreads_or(bad);
}

// The entries of the prediction cache that no hypothesis of the beam uses, the lowest first, K at
// most. Call with all threads after a barrier; a barrier must follow.
inline void list_free_entries(MergeWorkspace& work, int size, int beam_size) {
  for (int entry = thread(); entry < 2 * beam_size; entry += threads()) {
    int used_below = 0;
    bool used = false;
    for (int k = 0; k < size; k++) {
      int own = work.beam[k].cache_entry;
      bool first = true;  // several hypotheses may share an entry
      for (int j = 0; j < k; j++) first &= work.beam[j].cache_entry != own;
      used_below += first && own < entry;
      used |= own == entry;
    }
    if (!used && entry - used_below < beam_size) work.free_entries[entry - used_below] = entry;
  }
}

// The hypothesis of a chosen extension.
inline Hypothesis extended(
  const MergeWorkspace& work, const Candidate& chosen, const MergeContext& context
) {
  Hypothesis next = work.beam[chosen.parent];
  extend(next, chosen.choice, context.args.durations, context.params());
  if (context.params().frame_by_frame) {  // hypotheses past this frame are closed until all have left it
    next.open = chosen.choice != KEEP && next.frame == work.beam[chosen.parent].frame;
  }
  next.score = chosen.score;
  next.lm_state = chosen.lm_state;
  next.boosting_state = chosen.boosting_state;
  return next;
}

// Whether a choice gets a node.
inline bool gets_node(int choice, const SearchParams& params) {
  return choice != KEEP && (params.alignments || is_token(choice, params));
}

// Give number i of `next` its node and, with a new token, an entry in the cache. nodes_before, tokens_before:
// nodes and new tokens of the hypotheses before it. One thread.
inline void settle(
  MergeWorkspace& work, int i, int nodes_before, int tokens_before, const StreamCounters& now,
  const MergeContext& context
) {
  const SearchParams& params = context.params();
  const Candidate& chosen = work.chosen[i];
  Hypothesis& next = work.next[i];
  const Hypothesis& parent = work.beam[chosen.parent];
  if (gets_node(chosen.choice, params)) {
    int label = chosen.choice / params.num_durations;
    next.node = now.node_count + nodes_before;
    int frames = frames_of(chosen.choice, context.args.durations, params);
    context.node(next.node, now) = {
      parent.node, label, parent.frame, frames, chosen.log_prob};
  }
  if (!is_token(chosen.choice, params)) return;
  int entry = work.free_entries[tokens_before];
  int64 first = (int64)context.b * context.args.cache_entries, own = context.first() + tokens_before;
  context.args.new_labels[own] = chosen.choice / params.num_durations;
  context.args.new_sources[own] = first + parent.cache_entry;
  context.args.new_targets[own] = first + entry;
  next.cache_entry = entry;
}

// Turn work.chosen[0 .. count), best first and all different, into the utterance's beam: recombine duplicates,
// write the beam, its nodes and new texts. `now` is updated, the same in all threads. Call with all threads
// after a barrier; a barrier must follow.
inline void merge_chosen(
  MergeWorkspace& work, int count, StreamCounters& now, const MergeContext& context
) {
  const int beam_size = context.params().beam_size;
  for (int i = thread(); i < count; i += threads()) {
    work.next[i] = extended(work, work.chosen[i], context);
  }
  list_free_entries(work, now.size, beam_size);
  __syncthreads();
  for (int i = thread(); i < count; i += threads()) {
    int leader = 0;
    while (!are_duplicates(work.next[leader], work.next[i])) leader++;  // ends at i
    work.leaders[i] = leader;
  }
  __syncthreads();
  int size = 0, nodes = 0, tokens = 0;
  for (int i = 0; i < count; i++) {  // every thread counts; each settles its own
    if (work.leaders[i] != i) continue;
    int choice = work.chosen[i].choice;
    if (i % threads() == thread()) {
      float score = work.chosen[i].score;
#pragma unroll 1  // seldom more than one is found, and log_add is long
      for (int j = i + 1; j < count; j++) {
        if (work.leaders[j] == i) score = log_add(score, work.chosen[j].score);
      }
      work.next[i].score = score;
      settle(work, i, nodes, tokens, now, context);
      context.beam()[size] = work.next[i];
    }
    size++;
    nodes += gets_node(choice, context.params());
    tokens += is_token(choice, context.params());
  }
  now.size = size;
  now.new_texts = tokens;
  now.node_count += nodes;
}

// Defined by each strategy: build the new beam from the old one, in `work`, and its extensions. `now` is
// updated, the same in all threads. Called with all threads after a barrier; a barrier follows.
inline void make_beam(MergeWorkspace& work, StreamCounters& now, const MergeContext& context);

// Take rows in the batch of the prediction network: the first one, or NO_ROW if fewer are left. One thread.
inline int take_rows(int* taken, int rows, int count) {
  int first = 0;
  for (int seen; (seen = atomicCAS(taken, first, first + count)) != first; first = seen) {
    if (seen + count > rows) return NO_ROW;
  }
  return first;
}

// Give an utterance's new texts rows in the batch of the prediction network; false if it has not that many left.
// Call with all threads, which meet at a barrier before they read what others have written.
inline bool list_texts(const MergeContext& context, int new_texts) {
  const MergeArgs& args = context.args;
  __shared__ int first_row;
  if (thread() == 0) first_row = new_texts > 0 ? take_rows(args.taken_rows, args.prediction_rows, new_texts) : 0;
  __syncthreads();
  if (first_row == NO_ROW) return false;
  for (int i = thread(); i < new_texts; i += threads()) {
    args.labels[first_row + i] = args.new_labels[context.first() + i];
    args.sources[first_row + i] = args.new_sources[context.first() + i];
    args.targets[first_row + i] = args.new_targets[context.first() + i];
  }
  return true;
}

// Prepare the next step of an utterance, or let it wait if its new texts find no rows in the batch. Returns its
// activity, the same in all threads. Call with all threads.
inline int go_on(const MergeContext& context, StreamCounters now) {
  const MergeArgs& args = context.args;
  if (list_texts(context, now.new_texts)) {
    const ScheduleArgs next{
      args.streams, args.beams, args.counters, args.frame_rows, args.text_rows,
      args.params.beam_size, args.node_capacity, args.cache_entries, nullptr, nullptr, nullptr, 0, 0};
    return schedule_next(next, context.b, context.beam(), now);
  }
  for (int k = thread(); k < args.params.beam_size; k += threads()) {
    args.frame_rows[context.first() + k] = args.text_rows[context.first() + k] = NO_ROW;
  }
  now.activity = WAITING;
  if (thread() == 0) args.counters[context.b] = now;
  return WAITING;
}

// The step of an active utterance; returns its activity afterwards, the same in all threads.
inline int step(uint8* shared, StreamCounters now, const MergeContext& context) {
  const MergeArgs& args = context.args;
  MergeWorkspace work(shared, args.params);
  if (fetch_beam(work, context, now.size)) {
    make_beam(work, now, context);
  } else {
    now.size = BAD_INPUT;
    now.new_texts = 0;
  }
  return go_on(context, now);
}

// The last block that calls this sets the WHILE node's condition: does any utterance continue? One thread.
inline void set_condition(const MergeArgs& args, bool active) {
#ifdef LOOP
  uint64* finished = (uint64*)args.finished;
  uint64 others = atomicAdd(finished, 1ull + ((uint64)active << 32));
  if ((uint32)others + 1 < gridDim.x) return;
  cudaGraphSetConditional(args.handle, active || others >> 32 != 0);
  atomicExch(finished, 0ull);
#endif
}

// The new beam of utterance b = blockIdx.x, and the frame that each hypothesis reads next.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1) merge(const MergeArgs args) {
  extern __shared__ __align__(16) unsigned char smem[];
  const MergeContext context{args, (int)blockIdx.x};
  const StreamCounters now = args.counters[context.b];
  int activity = now.activity;
  if (activity == ACTIVE) activity = step(smem, now, context);
  else if (activity == WAITING) activity = go_on(context, now);
  if (thread() == 0 && args.sets_condition) set_condition(args, has_step(activity));
}
