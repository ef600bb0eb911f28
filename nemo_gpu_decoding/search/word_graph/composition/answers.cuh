// Asking the LMs: each question once, however many errands have it in this frame, and none that was
// answered in the frames before, as far as there is room. Twin of ask in composition.py.
#pragma once

#include "search/word_graph/composition/space.cuh"

inline uint64 hash_of_question(int word, int64 lm) { return hash_of(HistoryKey{word, lm}); }

// Where errand i finds its answer: the slot, or ~slot if the errand has to find it out.
inline int find_or_claim(int i, const Rooms& rooms) {
  const int word = rooms.errands[i].word;
  const int64 lm = rooms.errands[i].lm;
  for (int at = (int)(hash_of_question(word, lm) >> 24) & rooms.answer_mask;;
       at = (at + 1) & rooms.answer_mask) {
    int seen = __ldcg(&rooms.answer_slots[at]);
    if (seen == 0) seen = atomicCAS(&rooms.answer_slots[at], 0, ~i);
    if (seen == 0) return ~at;
    if (seen > 0) {
      const Answer& answer = rooms.answers[seen - 1];
      if (answer.lm == lm && answer.word == word) return at;
    } else {
      const Errand& other = rooms.errands[~seen];
      if (other.lm == lm && other.word == word) return at;
    }
  }
}

// Make room for `count` answers more, if need be by forgetting all. Call with all threads after a
// barrier; ends with one.
inline void make_room_for_answers(int count, const Rooms& rooms, Ledger& ledger) {
  const bool full = ledger.num_answers + count > rooms.max_answers;
  __syncthreads();
  if (full) {
    for (int at = thread(); at <= rooms.answer_mask; at += threads()) rooms.answer_slots[at] = 0;
    if (thread() == 0) ledger.num_answers = 0;
  }
  if (thread() == 0) ledger.num_asked = 0;
  __syncthreads();
}

// Find out what one errand asks. One thread. Not inlined, to leave registers to those who call it.
__noinline__ void find_out(Errand* errand, const Rooms* rooms, Ledger* ledger) {
  LookupCounters counters{};
  const LMStep step = cost_of_label(errand->word, errand->lm, rooms->graph, rooms->rescoring, counters);
  const int at = ~errand->place, a = atomicAdd(&ledger->num_answers, 1);
  rooms->answers[a] = Answer{errand->lm, step.target, errand->word, step.cost};
  rooms->answer_slots[at] = a + 1;
  errand->place = at;
  if (counters.hits) atomicAdd(&ledger->cache_hits, counters.hits);
  if (counters.misses) atomicAdd(&ledger->cache_misses, counters.misses);
  if (counters.sectors) atomicAdd(&ledger->cache_sectors, counters.sectors);
}

inline void count_look_ups(int look_ups, Ledger& ledger) {
  if (look_ups == 0) return;
  atomicAdd(&ledger.look_ups, look_ups);
  atomicAdd(&ledger.answered, look_ups);  // less those that have to be asked
}

// Ask for the words of all listed errands: adds to their corrections, and moves their histories on. Call
// with all threads, after a barrier if errands have been listed. A thread may then change errands
// thread(), thread() + threads() and so on; for the others a barrier must follow.
__noinline__ void ask(const Rooms* shared_rooms, Ledger* shared_ledger) {
  const Rooms& rooms = *shared_rooms;
  Ledger& ledger = *shared_ledger;
  const int count = ledger.num_errands;
  make_room_for_answers(count, rooms, ledger);
  for (int first = 0; first < count; first += threads()) {
    const int i = first + thread();
    bool claimed = false;
    if (i < count && rooms.errands[i].word != 0) {
      const int place = find_or_claim(i, rooms);
      rooms.errands[i].place = place;
      claimed = place < 0;
    }
    const int at = warp_append(claimed, &ledger.num_asked);
    if (claimed) rooms.asked[at] = i;
  }
  __syncthreads();
  for (int n = thread(); n < ledger.num_asked; n += threads()) {
    find_out(&rooms.errands[rooms.asked[n]], &rooms, &ledger);
  }
  __syncthreads();
  for (int i = thread(); i < count; i += threads()) {
    Errand& errand = rooms.errands[i];
    if (errand.word == 0) continue;
    const Answer answer = rooms.answers[rooms.answer_slots[errand.place] - 1];
    errand.correction += weighted(answer.cost, rooms.rescoring);
    errand.lm = answer.lm_after;
  }
  if (thread() == 0) ledger.answered -= ledger.num_asked;
}
