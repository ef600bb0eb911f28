// The chosen extensions become the new beam: recombination, tree of tokens, memory of predictions.
#pragma once

#include "search/rank_key.cuh"
#include "search/transducer/utterance.cuh"

// What the prediction network has to compute after a step.
struct Wishes {
  int64* labels;  // [B, K] the new token; 0 where nothing is wished for
  int64* sources;  // [B, K] entry of the text before it, or NOTHING
  int64* targets;  // [B, K] entry of the text with it, or NOTHING

  void clear(int64 i) const {
    labels[i] = 0;
    sources[i] = targets[i] = NOTHING;
  }

  // Those of one utterance, whose first is `first`. Call with all threads.
  void clear_all(int64 first, int beam_size) const {
    for (int k = thread(); k < beam_size; k += threads()) clear(first + k);
  }
};

// The nodes that were added since the host fetched them last.
struct NodeBuffer {
  Node* nodes;  // [B, room]
  int room;

  Node& at(int b, int node, const Progress& now) const {
    return nodes[(int64)b * room + node - now.node_base];
  }
};

// The utterance that a block works on, and where its results go; stays the same for the whole launch.
struct Place {
  int b;
  Batch batch;
  NodeBuffer buffer;
  Wishes wishes;
  const int* durations;  // [D] frames
  int entries;  // of the memory of predictions, per utterance
  int per_hypothesis;  // M
  Options options;

  int64 first() const { return (int64)b * options.beam_size; }

  Hypothesis* beam() const { return batch.beams + first(); }
};

// A chosen extension on its way into the beam.
struct Choice {
  float score;
  int parent;  // slot in the old beam
  int choice;
  int lm_state;
  int boosting_state;
  float log_prob;
};

// What a block works with, in shared memory in the order in which it stands here.
struct MergeWorkspace {
  Hypothesis* beam;  // [K]
  Hypothesis* next;  // [K] in the order of their scores, equal ones not merged yet
  uint64* keys;  // [K * M] of all extensions
  Choice* choices;  // [K] the best of them
  int* counts;  // [K] extensions of each hypothesis
  int* leaders;  // [K] the first of `next` that it is equal to
  int* free_entries;  // [K] of the memory of predictions

  MergeWorkspace(uint8* shared, int beam_size, int per_hypothesis) {
    beam = take<Hypothesis>(shared, beam_size);
    next = take<Hypothesis>(shared, beam_size);
    keys = take<uint64>(shared, beam_size * per_hypothesis);
    choices = take<Choice>(shared, beam_size);
    counts = take<int>(shared, beam_size);
    leaders = take<int>(shared, beam_size);
    free_entries = take<int>(shared, beam_size);
  }
};

// Fetch the beam and how many extensions each of its hypotheses has; false if the joint gave no logits for
// one of them. Call with all threads; ends with a barrier.
inline bool fetch_beam(MergeWorkspace& work, const Place& place, int size, const int* counts) {
  copy_records(work.beam, place.beam(), size);
  bool bad = false;
  for (int k = thread(); k < size; k += threads()) {
    work.counts[k] = counts[place.first() + k];
    bad |= work.counts[k] == BAD_INPUT;
  }
  return !__syncthreads_or(bad);
}

// The entries of the memory of predictions that no hypothesis of the beam uses, the lowest first, K at
// most. Call with all threads after a barrier; a barrier must follow.
inline void list_free_entries(MergeWorkspace& work, int size, int beam_size) {
  for (int entry = thread(); entry < 2 * beam_size; entry += threads()) {
    int used_below = 0;
    bool used = false;
    for (int k = 0; k < size; k++) {
      int memo = work.beam[k].memo;
      bool first = true;  // several hypotheses may share an entry
      for (int j = 0; j < k; j++) first &= work.beam[j].memo != memo;
      used_below += first && memo < entry;
      used |= memo == entry;
    }
    if (!used && entry - used_below < beam_size) work.free_entries[entry - used_below] = entry;
  }
}

// The hypothesis that a chosen extension makes of its parent.
inline Hypothesis extended(const MergeWorkspace& work, const Choice& choice, const Place& place) {
  Hypothesis next = work.beam[choice.parent];
  extend(next, choice.choice, place.durations, place.options);
  if (place.options.frame_by_frame) {  // who has left the frame waits until all have
    next.open = choice.choice != STAY && next.frame == work.beam[choice.parent].frame;
  }
  next.score = choice.score;
  next.lm_state = choice.lm_state;
  next.boosting_state = choice.boosting_state;
  return next;
}

// Whether a choice gets a node.
inline bool gets_node(int choice, const Options& options) {
  return choice != STAY && (options.alignments || is_token(choice, options));
}

// Give number i of `next` its node and, with a new token, an entry in the memory; `nodes_before` and
// `tokens_before` count those that come first. One thread.
inline void settle(
  MergeWorkspace& work, int i, int64 slot, int nodes_before, int tokens_before, const Progress& now,
  const Place& place
) {
  const Options& options = place.options;
  const Choice& choice = work.choices[i];
  Hypothesis& next = work.next[i];
  const Hypothesis& parent = work.beam[choice.parent];
  if (gets_node(choice.choice, options)) {
    int label = choice.choice / options.num_durations;
    next.node = now.node_count + nodes_before;
    int frames = frames_of(choice.choice, place.durations, options);
    place.buffer.at(place.b, next.node, now) = {
      parent.node, label, parent.frame, frames, choice.log_prob};
  }
  if (!is_token(choice.choice, options)) {
    place.wishes.clear(slot);
    return;
  }
  int entry = work.free_entries[tokens_before];
  int64 first = (int64)place.b * place.entries;
  place.wishes.labels[slot] = choice.choice / options.num_durations;
  place.wishes.sources[slot] = first + parent.memo;
  place.wishes.targets[slot] = first + entry;
  next.memo = entry;
}

// Turn work.choices[0 .. count), best first and none twice, into the utterance's beam: recombine what
// is equal, write the beam, its nodes and wishes; `now` is brought up to date, alike in all threads. Call
// with all threads after a barrier; ends with one.
inline void merge_choices(MergeWorkspace& work, int count, Progress& now, const Place& place) {
  const int beam_size = place.options.beam_size;
  for (int i = thread(); i < count; i += threads()) {
    work.next[i] = extended(work, work.choices[i], place);
  }
  list_free_entries(work, now.size, beam_size);
  __syncthreads();
  for (int i = thread(); i < count; i += threads()) {
    int leader = 0;
    while (!are_twins(work.next[leader], work.next[i])) leader++;  // ends at i
    work.leaders[i] = leader;
  }
  __syncthreads();
  int size = 0, nodes = 0, tokens = 0;
  for (int i = 0; i < count; i++) {  // every thread counts; each settles its own
    if (work.leaders[i] != i) continue;
    int choice = work.choices[i].choice;
    if (i % threads() == thread()) {
      float score = work.choices[i].score;
#pragma unroll 1  // seldom more than one is found, and log_add is long
      for (int j = i + 1; j < count; j++) {
        if (work.leaders[j] == i) score = log_add(score, work.choices[j].score);
      }
      work.next[i].score = score;
      settle(work, i, place.first() + size, nodes, tokens, now, place);
      place.beam()[size] = work.next[i];
    }
    size++;
    nodes += gets_node(choice, place.options);
    tokens += is_token(choice, place.options);
  }
  for (int k = size + thread(); k < beam_size; k += threads()) {
    place.wishes.clear(place.first() + k);
  }
  now.size = size;
  now.node_count += nodes;
  __syncthreads();
}

// Rank the extensions of all hypotheses, sorted lists of at most M each, and put the K best of all into
// work.choices; returns how many, alike in all threads. Order: score down, parent up, choice up. Call with
// all threads after a barrier; ends with one.
inline int choose(
  MergeWorkspace& work, const Extension* extensions, int size, const Place& place
) {
  const Options& options = place.options;
  const int per_hypothesis = place.per_hypothesis;
  const int total = size * per_hypothesis;
  const uint32 choices = (uint32)(options.vocab_size + 1) * options.num_durations + 1;
  for (int i = thread(); i < total; i += threads()) {
    int k = i / per_hypothesis;
    if (i % per_hypothesis >= work.counts[k]) continue;
    uint32 place = (uint32)k * choices + (uint32)(extensions[i].choice + 1);
    work.keys[i] = rank_key(extensions[i].score, place);
  }
  int count = 0;
  for (int k = 0; k < size; k++) count += work.counts[k];
  __syncthreads();
  for (int i = thread(); i < total; i += threads()) {
    int own = i / per_hypothesis, rank = i % per_hypothesis;
    if (rank >= work.counts[own]) continue;
    uint64 key = work.keys[i];
    for (int k = 0; k < size && rank < options.beam_size; k++) {
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
    if (rank >= options.beam_size) continue;
    const Extension& from = extensions[i];
    work.choices[rank] = {
      from.score, own, from.choice, from.lm_state, from.boosting_state, from.log_prob};
  }
  __syncthreads();
  return min(count, options.beam_size);
}
