// Step 3 of a frame: each group looks at the arcs of its state once, at the cost of its best history; then
// all histories that stay below the cutoff take those that need no LM. Twin of take_arcs in groups.py.
//
// The cutoff does not sink while groups visit arcs, so that what they find depends on no order.
#pragma once

#include "search/word_graph/runs.cuh"
#include "search/word_graph/composition/groups.cuh"

// Whether an arc may lead to something.
inline bool survives(const Row& row, const Run& run, const Space& work) {
  const GraphArc& arc = work.graph.arcs[run.arc];
  const float acoustic_cost = cost_of(row[arc.label], work.search);
  const float group_cost = work.rooms->groups[run.group].cost;
  return least_total(group_cost, arc.cost, acoustic_cost, work.search) <= work.cutoff();
}

// List the visits of all groups. False if there is no room for them. Call with all threads after a
// barrier; ends with one.
__noinline__ bool visit_arcs(Row row, float least, const Space* common) {
  const Space& work = *common;
  Ledger& ledger = *work.ledger;
  const int num_groups = ledger.num_groups;
  int looks = 0;
  for (int first = 0; first < num_groups; first += threads()) {
    const int g = first + thread();
    const int total = work.states.start(g < num_groups ? items_of(work.rooms->groups[g], least, work) : 0);
    for (int item = 0; item < total; item += threads()) {
      Run run{};
      if (item + thread() < total) {
        const int owner = work.states.owner(item + thread()), number = first + owner;
        const int own = item + thread() - work.states.begins[owner];
        run = run_of(row, work.rooms->groups[number], number, own, work);
      }
      while (__any_sync(ALL_LANES, run.any())) {
        const bool found = run.any() && survives(row, run, work);
        const int at = warp_append(found, &ledger.num_visits);
        if (found && at < work.rooms->max_visits) {
          work.rooms->visits[at] = Visit{run.group, run.arc};
          atomicExch(&work.rooms->groups[run.group].visits, 1);
        }
        looks += run.any();
        if (run.any()) run.go_on(work.graph);
      }
    }
  }
  if (looks) atomicAdd(&ledger.arc_visits, looks);
  __syncthreads();
  return ledger.num_visits <= work.rooms->max_visits;
}

// An arc that histories of a group may take.
struct Step {
  GraphArc arc;
  float acoustic_cost;
  float bonus;
  int64 key;  // of the token to which it leads, but for its history
};

// An arc after a group with this key.
inline Step step_of(const Row& row, int number, int64 key_before, const Space& work) {
  const Search& search = work.search;
  const GraphArc arc = work.graph.arcs[number];
  const Boost boosting = boosted(arc.word, boost_of(key_before), work);
  const bool remembers = search.topology == COMPACT || search.topology == NORMAL;
  const int64 key = key_of(arc.target, boosting.state, remembers ? arc.label + 1 : 0);
  return {arc, cost_of(row[arc.label], search), boosting.bonus, key};
}

// Cost after an arc by the small LM.
inline float total_of(float cost, const Step& step, const Search& search) {
  return cost + search.lm_weight * step.arc.cost - step.bonus + step.acoustic_cost;
}

// How many histories of its group, from the cheapest on, are not above the cutoff after visit v.
// `asks`: only if some of them have to ask for it; else only if its arc tells no word.
__noinline__ int takers_of(Row row, int v, bool asks, float cutoff, const Space* common) {
  const Space& work = *common;
  if (v >= work.ledger->num_visits) return 0;
  const Visit visit = work.rooms->visits[v];
  const Group group = work.rooms->groups[visit.group];
  const bool tells = work.graph.arcs[visit.arc].word != 0;
  if (asks ? !tells && !group.asks : tells) return 0;
  const Step step = step_of(row, visit.arc, group.key, work);
  int low = 0, high = min(group.count, work.rooms->group_size);
  while (low < high) {
    const int middle = (low + high) >> 1;
    const float cost = float_of_key((uint32)(work.rooms->order[group.begin + middle] >> 32));
    if (total_of(cost, step, work.search) <= cutoff) low = middle + 1;
    else high = middle;
  }
  return low;
}

inline bool is_closed(const Step& step, const Member& member, const Workspace& work) {
  return work.search.topology == NORMAL && step.arc.label + 1 == last_label(member, work);
}

// The member of a history that takes an arc, or NONE: the best one to which it is open. For lattices all
// members do, and this is the first of them; see next_taker.
inline int first_taker(const Step& step, int h, const Space& work) {
  const History& history = work.rooms->histories[h];
  if (KEEPS_LINKS) return history.newest;
  return is_closed(step, work.rooms->members[history.best], work) ? history.second : history.best;
}

inline int next_taker(int m, const Space& work) {
  return KEEPS_LINKS && m != NONE ? work.rooms->members[m].next : NONE;
}

// The way of a member by an arc, the LMs' correction included. False if the arc is closed to it, or if the
// way was taken to look ahead: a lattice has it once.
inline bool way_of(
  const Step& step, int arc, int m, int64 lm, float correction, const Space& work, Way& way
) {
  if (m == NONE) return false;
  const Member member = work.rooms->members[m];
  if (KEEPS_LINKS) {
    const Origin& ahead = work.ledger->ahead;
    if (is_closed(step, member, work)) return false;
    if (member.source == ahead.source && arc == ahead.arc && member.epsilon == ahead.epsilon) return false;
  }
  const float total = total_of(member.cost, step, work.search) + correction;
  way = Way{{step.key, lm}, total, {arc, member.source, member.epsilon}, NO_PLACE};
  return true;
}

inline int history_at(const Visit& visit, int place, const Space& work) {
  return (int)(uint32)work.rooms->order[work.rooms->groups[visit.group].begin + place];
}

// Make room for the first way of each thread that offer_all offers; for lattices it does so itself. Call
// with all threads.
inline void make_room_for_first(Space& work) {
  if (!KEEPS_LINKS) make_room_for_ways(1, work);
}

// Offer the way of member m, and for lattices those of the members after it. Call with all threads.
inline void offer_all(const Step& step, int arc, int m, int64 lm, float correction, Space& work) {
  do {
    if (KEEPS_LINKS) make_room_for_ways(1, work);
    Way way{};
    const bool found = way_of(step, arc, m, lm, correction, work, way);
    offer(found, way, work);
    m = next_taker(m, work);
  } while (KEEPS_LINKS && __syncthreads_or(m != NONE));
}

// Arcs without a word, for all histories without an untold one. Call with all threads after a barrier;
// ends with one. The cutoff is what all ways that need no LM leave, then.
inline void take_free_arcs(const Row& row, Space& work) {
  const int num_visits = work.ledger->num_visits;
  for (int first = 0; first < num_visits; first += threads()) {
    const int takers = takers_of(row, first + thread(), false, work.cutoff(), work.common);
    const int total = work.states.start(takers);
    for (int item = 0; item < total; item += threads()) {
      make_room_for_first(work);
      Step step{};
      int64 lm = 0;
      int arc = NONE, m = NONE;
      if (item + thread() < total) {
        const int owner = work.states.owner(item + thread());
        const Visit visit = work.rooms->visits[first + owner];
        const int h = history_at(visit, item + thread() - work.states.begins[owner], work);
        const Member& best = work.rooms->members[work.rooms->histories[h].best];
        step = step_of(row, visit.arc, best.key, work);
        arc = visit.arc;
        lm = best.lm;
        if (best.word == 0) m = first_taker(step, h, work);
      }
      offer_all(step, arc, m, lm, 0.0f, work);
    }
  }
  __syncthreads();
}
