// Step 2 of a frame: tokens become members of histories, and histories of groups. Twin of join_groups and
// _sort in groups.py.
//
// An item of work is a token in its own state, or with one epsilon record.
#pragma once

#include "search/word_graph/composition/sort.cuh"
#include "search/word_graph/composition/space.cuh"

// What token i becomes in its own state (e: NONE) or by its epsilon record e. False if nothing can come
// of it.
inline bool join(int i, int e, float least, const Space& work, Member& member) {
  const Search& search = work.search;
  const Token token = work.current[i];
  int target = state_of(token.key), boost = boost_of(token.key), word = 0;
  float cost = token.cost, least_arc;
  if (e == NONE) {
    least_arc = work.graph.states[target].least_cost;
  } else {
    const Epsilon record = work.graph.epsilons[e];
    cost += search.lm_weight * record.cost;
    target = record.target;
    least_arc = record.least_cost;
    word = record.word;
    if (word != 0 && search.boosts) {
      const Boost boosting = boosted(word, boost, work);
      cost -= boosting.bonus;
      boost = boosting.state;
    }
  }
  member = Member{key_of(target, boost, 0), token.key.lm, word, cost, i, e, NONE, NONE};
  return EAGER || least_total(cost, least_arc, least, search) <= work.cutoff();
}

// List all members. False if there is no room for them. Call with all threads after a barrier; ends with
// one.
inline bool list_members(int count, float least, const Space& work) {
  const Graph& graph = work.graph;
  Ledger& ledger = *work.ledger;
  for (int first = 0; first < count; first += threads()) {
    int items = 0;
    if (first + thread() < count) {
      const GraphState state = graph.states[state_of(work.current[first + thread()].key)];
      items = 1 + state.epsilon_end - state.epsilon_begin;
    }
    const int total = work.tokens.start(items);
    for (int item = 0; item < total; item += threads()) {
      const int own = item + thread();
      Member member{};
      bool wants = false;
      if (own < total) {
        const int owner = work.tokens.owner(own), i = first + owner;
        const int begin = graph.states[state_of(work.current[i].key)].epsilon_begin;
        const int e = own - work.tokens.begins[owner] - 1;
        wants = join(i, e < 0 ? NONE : begin + e, least, work, member);
      }
      const int at = warp_append(wants, &ledger.num_members);
      if (wants && at < work.rooms->max_members) work.rooms->members[at] = member;
    }
  }
  __syncthreads();
  return ledger.num_members <= work.rooms->max_members;
}

inline int last_label(const Member& member, const Workspace& work) {
  return label_of(work.current[member.source].key);
}

// An order of the members of a history: cost, key of the source, epsilon record.
inline bool is_before(const Member& a, const Member& b, const Workspace& work) {
  if (a.cost != b.cost) return a.cost < b.cost;
  const Key key = work.current[a.source].key, other = work.current[b.source].key;
  return key != other ? key < other : a.epsilon < b.epsilon;
}

// Put member m where *best is if that is NONE or worse. Any thread, at the same time as others.
inline void compete(int m, int* best, const Space& work) {
  int old = __ldcg(best);
  while (old == NONE || is_before(work.rooms->members[m], work.rooms->members[old], work)) {
    const int seen = atomicCAS(best, old, m);
    if (seen == old) return;
    old = seen;
  }
}

// Find the histories of all members, and the best member of each. Call with all threads after a barrier;
// for the second best a barrier must follow.
inline void make_histories(const Space& work) {
  Ledger& ledger = *work.ledger;
  Member* members = work.rooms->members;
  const int count = ledger.num_members;
  for (int m = thread(); m < count; m += threads()) {
    const int64 key = members[m].key, lm = members[m].lm;
    const int word = members[m].word;
    int slot;
    const int first = work.rooms->first_members.find_or_enter(
      hash_of(HistoryKey{key, lm}) + ((uint64)word << 32), m, &slot,
      [&](int other) {
        return members[other].key == key && members[other].lm == lm && members[other].word == word;
      }
    );
    if (first == m) {
      const int h = atomicAdd(&ledger.num_histories, 1);
      work.rooms->histories[h] = History{m, NONE, NONE, NONE, 0, slot, NONE};
      members[m].history = h;
    } else {
      members[m].history = ~first;
    }
  }
  __syncthreads();
  for (int m = thread(); m < count; m += threads()) {
    int h = members[m].history;
    if (h < 0) {
      h = members[~h].history;
      members[m].history = h;
      compete(m, &work.rooms->histories[h].best, work);
    }
    if (KEEPS_LINKS) members[m].next = atomicExch(&work.rooms->histories[h].newest, m);
  }
  __syncthreads();
  if (work.search.topology != NORMAL || KEEPS_LINKS) return;
  for (int m = thread(); m < count; m += threads()) {
    History& history = work.rooms->histories[members[m].history];
    const bool closed = last_label(members[m], work) == last_label(members[history.best], work);
    if (!closed) compete(m, &history.second, work);
  }
}

// Find the groups of all histories. Call with all threads after a barrier; ends with one.
inline void make_groups(const Rooms& rooms, Ledger& ledger) {
  History* histories = rooms.histories;
  const Member* members = rooms.members;
  const int count = ledger.num_histories;
  for (int h = thread(); h < count; h += threads()) {
    const int64 key = members[histories[h].best].key;
    int slot;
    const int first = rooms.first_histories.find_or_enter(hash_of(key), h, &slot, [&](int other) {
      return members[histories[other].best].key == key;
    });
    if (first == h) {
      const int g = atomicAdd(&ledger.num_groups, 1);
      rooms.groups[g] = Group{key, ordered_key(largest_float()), 0.0f, 0, 0, 0, 0, 0, 0};
      histories[h].group = g;
      histories[h].group_slot = slot;
    } else {
      histories[h].group = ~first;
    }
  }
  __syncthreads();
  for (int h = thread(); h < count; h += threads()) {
    const int own = histories[h].group, g = own >= 0 ? own : histories[~own].group;
    const Member& best = members[histories[h].best];
    if (own < 0) histories[h].group = g;
    Group& group = rooms.groups[g];
    atomicAdd(&group.count, 1);
    atomicMin(&group.best, ordered_key(best.cost + 0.0f));  // -0 becomes +0
    if (best.word != 0) atomicExch(&group.asks, 1);
  }
  __syncthreads();
}

// List the histories of each group together. Call with all threads after a barrier; one must follow.
inline void order_histories(const Rooms& rooms, const Ledger& ledger, int* scratch) {
  const int num_groups = ledger.num_groups, count = ledger.num_histories;
  int begin = 0;
  for (int first = 0; first < num_groups; first += threads()) {
    const int g = first + thread();
    int more;
    const int size = g < num_groups ? rooms.groups[g].count : 0;
    const int before = block_exclusive_sum(size, scratch, &more);
    if (g < num_groups) {
      rooms.groups[g].begin = begin + before;
      rooms.groups[g].cost = float_of_key(rooms.groups[g].best);
    }
    begin += more;
  }
  __syncthreads();
  for (int h = thread(); h < count; h += threads()) {
    Group& group = rooms.groups[rooms.histories[h].group];
    const float cost = rooms.members[rooms.histories[h].best].cost;
    const int place = group.begin + atomicAdd(&group.placed, 1);
    rooms.order[place] = (uint64)ordered_key(cost + 0.0f) << 32 | (uint32)h;
  }
}

// Free the slots, for the next frame. Call with all threads.
inline void forget_histories(const Rooms& rooms, const Ledger& ledger) {
  for (int h = thread(); h < ledger.num_histories; h += threads()) {
    const History& history = rooms.histories[h];
    rooms.first_members.slots[history.slot] = 0;
    if (history.group_slot != NONE) rooms.first_histories.slots[history.group_slot] = 0;
  }
}

// Groups, histories and members of all tokens. False if there is no room for them. Call with all threads
// after a barrier; for the order of histories one must follow.
__noinline__ bool join_groups(int count, float least, const Space* common) {
  const Space& work = *common;
  if (!list_members(count, least, work)) return false;
  make_histories(work);
  make_groups(*work.rooms, *work.ledger);
  order_histories(*work.rooms, *work.ledger, (int*)work.scratch);
  forget_histories(*work.rooms, *work.ledger);
  return true;
}

// Sort the histories of groups that visit arcs, cheapest first. Call with all threads after a barrier;
// ends with one.
__noinline__ void sort_histories(const Rooms* rooms, Ledger* shared_ledger) {
  Ledger& ledger = *shared_ledger;
  const auto before = [&](uint64 a, uint64 b) {
    if (a >> 32 != b >> 32) return a < b;
    const Member& one = rooms->members[rooms->histories[(uint32)a].best];
    const Member& two = rooms->members[rooms->histories[(uint32)b].best];
    return one.lm != two.lm ? one.lm < two.lm : one.word < two.word;
  };
  int prolonged = 0;
  for (int g = warp(); g < ledger.num_groups; g += warps()) {
    const Group group = rooms->groups[g];
    if (!group.visits) continue;
    if (lane() == 0) prolonged += min(group.count, rooms->group_size);
    if (group.count <= SORTED_BY_WARP) {
      team_sort<WarpTeam>(rooms->order + group.begin, group.count, before);
    } else if (lane() == 0) {
      rooms->large[atomicAdd(&ledger.num_large, 1)] = g;
    }
  }
  if (prolonged) atomicAdd(&ledger.prolonged, prolonged);
  __syncthreads();
  for (int i = 0; i < ledger.num_large; i++) {
    const Group group = rooms->groups[rooms->large[i]];
    team_sort<BlockTeam>(rooms->order + group.begin, group.count, before);
  }
}
