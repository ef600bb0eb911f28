// Step 4 of a frame: arcs that tell a word, or histories that do, ask the LMs where they stay below the
// cutoff by the small LM; then they are taken at their true cost. Twin of run_errands in groups.py.
#pragma once

#include "search/word_graph/composition/answers.cuh"
#include "search/word_graph/composition/visits.cuh"

// Ask for all listed errands, and offer the ways that they have found. Call with all threads after a
// barrier; ends with one.
inline void run_listed(const Row& row, Space& work) {
  Ledger& ledger = *work.ledger;
  const int count = ledger.num_errands;
  ask(work.rooms, work.ledger);  // for words that histories had not told
  for (int i = thread(); i < count; i += threads()) {
    work.rooms->errands[i].word = work.graph.arcs[work.rooms->errands[i].arc].word;
  }
  ask(work.rooms, work.ledger);
  for (int first = 0; first < count; first += threads()) {
    make_room_for_first(work);
    Errand errand{};
    Step step{};
    int m = NONE;
    if (first + thread() < count) {
      errand = work.rooms->errands[first + thread()];
      const int64 key = work.rooms->members[work.rooms->histories[errand.history].best].key;
      step = step_of(row, errand.arc, key, work);
      m = first_taker(step, errand.history, work);
    }
    offer_all(step, errand.arc, m, errand.lm, errand.correction, work);
  }
  if (thread() == 0) ledger.num_errands = 0;
  __syncthreads();
}

// List an errand of a history if it has to ask. Counts its questions: a history's word counts once.
inline bool errand_of(
  const Visit& visit, int place, Space& work, Errand& errand, int& look_ups
) {
  const int h = history_at(visit, place, work);
  const Member& best = work.rooms->members[work.rooms->histories[h].best];
  const bool arc_asks = work.graph.arcs[visit.arc].word != 0;
  if (best.word == 0 && !arc_asks) return false;
  look_ups += arc_asks;
  if (best.word != 0) look_ups += atomicExch(&work.rooms->histories[h].asked, 1) == 0;
  errand = Errand{best.lm, best.word, NO_PLACE, 0.0f, visit.arc, h, 0};
  return true;
}

// List errands, from item number `item` of the visits from `first` on, for as long as there is room. Moves
// both on; true if all are listed. Call with all threads; a barrier must follow.
inline bool list_errands(
  const Row& row, float cutoff, int& first, int& item, int& look_ups, Space& work
) {
  const Rooms& rooms = *work.rooms;
  const int num_visits = work.ledger->num_visits;
  int listed = 0;  // at most so many are, the same in all threads
  for (; first < num_visits; first += threads(), item = 0) {
    const int total =
      work.tokens.start(takers_of(row, first + thread(), true, cutoff, work.common));
    for (; item < total; item += threads()) {
      listed += threads();
      if (listed > rooms.max_errands) return false;
      Errand errand{};
      bool wants = false;
      if (item + thread() < total) {
        const int owner = work.tokens.owner(item + thread());
        const int place = item + thread() - work.tokens.begins[owner];
        wants = errand_of(rooms.visits[first + owner], place, work, errand, look_ups);
      }
      const int at = warp_append(wants, &work.ledger->num_errands);
      if (wants) rooms.errands[at] = errand;
    }
  }
  return true;
}

// All errands. Call with all threads after a barrier; ends with one.
inline void run_errands(const Row& row, Space& work) {
  const float cutoff = work.cutoff();  // what the answers say comes after
  int first = 0, item = 0, look_ups = 0;
  bool all = false;
  while (!all) {
    all = list_errands(row, cutoff, first, item, look_ups, work);
    __syncthreads();
    run_listed(row, work);
  }
  count_look_ups(look_ups, *work.ledger);
}
