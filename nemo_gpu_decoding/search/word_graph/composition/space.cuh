// What a block works with beside the room that cuda_wfst has: members, histories and groups of tokens,
// the arcs that groups visit, and the questions to the LMs.
//
//   members    tokens that may take arcs, in their own state or after an epsilon record
//   histories  members of one group with one LM history and one untold word; the best of them counts
//   groups     histories in one graph state and boosting state; arcs are looked at once for all
//   visits     arcs of groups that stay below the cutoff at the cost of the group's best history
//   errands    an arc and a history for which the LMs have to be asked
//   answers    what the LMs have said, kept until there is no room for more
//
// Example: three tokens in graph state 7 after "a b", "a c" (just read) and "a c" (with a blank since)
// are three members, two histories, one group. An arc of state 7 that tells a word is one visit, and
// becomes two errands.
#pragma once

#include "search/word_graph/ways.cuh"
#include "search/word_graph/composition/lms.cuh"

#ifndef EAGER
#define EAGER 0  // 1: eager composition
#endif

struct Member {
  int64 key;  // of the group: graph state, boosting state
  int64 lm;  // before `word`
  int word;  // told by an epsilon record on the way here, or 0; nobody has asked what it costs
  float cost;  // by the small LM
  int source;  // token
  int epsilon;  // record, or NONE
  int history;  // ~m: that of member m
  int next;  // another member of the history, or NONE; only if links are kept
};
static_assert(sizeof(Member) == 40, "Member differs from launch_shape.MEMBER_BYTES");

struct History {
  int best;  // member
  int second;  // best member with another last label, or NONE (topology normal)
  int newest;  // of its members; only if links are kept
  int group;  // ~h: that of history h
  int asked;  // its untold word was asked for in this frame
  int slot;
  int group_slot;  // NONE: another history's
};
static_assert(sizeof(History) == 28, "History differs from launch_shape.HISTORY_BYTES");

struct Group {
  int64 key;
  uint32 best;  // ordered key of the cost of its best history
  float cost;  // the same
  int begin;  // its histories in `order`
  int count;
  int placed;
  int asks;  // a history has an untold word
  int visits;  // it does visit arcs
  int unused;
};
static_assert(sizeof(Group) == 40, "Group differs from launch_shape.GROUP_BYTES");

struct Visit {
  int group;
  int arc;
};
static_assert(sizeof(Visit) == 8, "Visit differs from launch_shape.VISIT_BYTES");

struct Errand {
  int64 lm;  // history before `word`
  int word;  // to be asked for next, or 0
  int place;  // of the answer: its slot, ~slot if it is to be found out
  float correction;  // what was asked for adds so far, weighted
  int arc;
  int history;
  int unused;
};
static_assert(sizeof(Errand) == 32, "Errand differs from launch_shape.ERRAND_BYTES");

struct Answer {
  int64 lm;
  int64 lm_after;
  int word;
  float cost;
};
static_assert(sizeof(Answer) == 24, "Answer differs from launch_shape.ANSWER_BYTES");

// What the threads of a block count together, beside the Tally.
struct Ledger {
  int num_members;
  int num_histories;
  int num_groups;
  int num_visits;
  int num_errands;
  int num_answers;  // those of former frames included
  int num_asked;  // questions that nobody has an answer to yet
  int num_large;  // groups that all threads sort together
  Origin ahead;  // the way taken to look ahead; its source may be NONE
  // of this frame
  int look_ups;
  int answered;  // of these, by what the LMs have said before
  int arc_visits;
  int prolonged;
  uint32 cache_hits;  // LookupCounters of paged.cuh
  uint32 cache_misses;
  uint32 cache_sectors;
};

// What the search of an utterance took so far; launch_shape.WORK.
struct Work {
  int64 look_ups;
  int64 memo_hits;
  int64 arc_visits;
  int64 groups;
  int64 prolonged;
  int64 cache_hits;
  int64 cache_misses;
  int64 cache_sectors;

  void add(const Ledger& frame) {
    look_ups += frame.look_ups;
    memo_hits += frame.answered;
    arc_visits += frame.arc_visits;
    groups += frame.num_groups;
    prolonged += frame.prolonged;
    cache_hits += frame.cache_hits;
    cache_misses += frame.cache_misses;
    cache_sectors += frame.cache_sectors;
  }
};
static_assert(sizeof(Work) == 64, "Work differs from launch_shape.WORK");

// What an utterance wants of its own; launch_shape.UTTERANCE.
struct BigUtterance : Utterance {
  float correction_weight;  // of the difference of both LMs
  int padding;
};
static_assert(sizeof(BigUtterance) == sizeof(Utterance) + 8, "BigUtterance differs from its twin");

// A hash table whose slots hold number + 1 of the first of several items with one key (0: free).
struct Firsts {
  int* slots;  // [mask + 1], more than there are items
  int mask;

  // The number of the first item with the key of item `own`: `own` itself if there was none. same(i):
  // whether item i has that key. *slot: where it is.
  template <class Same>
  int find_or_enter(uint64 hash, int own, int* slot, Same same) const {
    for (int at = (int)(hash >> 24) & mask;; at = (at + 1) & mask) {
      *slot = at;
      int seen = __ldcg(&slots[at]);
      if (seen == 0) seen = atomicCAS(&slots[at], 0, own + 1);
      if (seen == 0) return own;
      if (same(seen - 1)) return seen - 1;
    }
  }
};

// What stays the same for a whole launch: shared by the block, as registers are scarce.
struct Rooms {
  Graph graph;
  Rescoring rescoring;
  int group_size;  // histories of a group that take arcs
  Member* members;  // [max_members]
  History* histories;  // [max_members]
  Group* groups;  // [max_members]
  uint64* order;  // [max_members], histories of groups: ordered key of the cost, number
  int* large;  // [max_members / SORTED_BY_WARP + 1], groups that all threads sort together
  int max_members;
  Firsts first_members;
  Firsts first_histories;
  Visit* visits;  // [max_visits]
  int max_visits;
  Errand* errands;  // [max_errands]
  int* asked;  // [max_errands]
  int max_errands;
  Answer* answers;  // [max_answers]
  int max_answers;  // at least max_errands
  int* answer_slots;  // [answer_mask + 1]
  int answer_mask;
};

struct Space : Workspace {
  Ledger* ledger;  // shared
  const Rooms* rooms;  // shared
  // Shared: a copy for functions that are not inlined, to leave registers to those who call them. Its
  // members that change in the course of a frame are not to be used.
  Space* common;
};

constexpr int GROUPS_FULL = 100;  // beside what a frame of cuda_wfst may end with; ways.py

// Make room in the list of ways for `more` of each thread. Call with all threads at any time.
inline void make_room_for_ways(int more, Workspace& work) {
  if (work.reserve(more)) return;
  __syncthreads();
  recombine(work.followers, true, work);
  work.reserve(more);
}
