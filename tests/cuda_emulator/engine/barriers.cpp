// Where threads wait for each other: __syncthreads() for a block, meetings of lanes for a warp.
#include <string.h>

#include <algorithm>

#include "engine_internal.h"

namespace emulator {
namespace {

bool same_place(Place a, Place b) {
  return a.line == b.line && (a.file == b.file || !strcmp(a.file, b.file));
}

void release_barrier(Block& block) {
  add_work(block);
  state.work.barriers++;
  block.at_barrier = 0;
  block.epoch++;
  memcpy(block.outcome, block.votes, sizeof block.votes);  // the next barrier's votes may come at once
  block.votes[0] = 1, block.votes[1] = block.votes[2] = 0;
  for (Fiber& fiber : block.fibers)
    if (fiber.barrier.file) {
      fiber.barrier = Place();
      wake(&fiber);
    }
}

}  // namespace

void add_work(Block& block) {
  constexpr size_t kinds = sizeof(Counts) / sizeof(uint64_t);
  uint64_t most[kinds] = {};
  for (Fiber& fiber : block.fibers) {
    auto counts = (const uint64_t*)&fiber.counts;
    for (size_t i = 0; i < kinds; i++) {
      most[i] = std::max(most[i], counts[i]);
      ((uint64_t*)&state.work.all)[i] += counts[i];
    }
    fiber.counts = Counts{};
  }
  for (size_t i = 0; i < kinds; i++) ((uint64_t*)&state.work.slowest)[i] += most[i];
}

uint32_t barrier(Place place, Vote vote, bool predicate) {
  Fiber* fiber = state.running;
  Block& block = *fiber->block;
  if (block.at_barrier == 0)
    block.barrier = place;
  else if (!same_place(block.barrier, place))
    fail("divergent barriers: __syncthreads at %s:%d meets one at %s:%d", place.file, place.line,
         block.barrier.file, block.barrier.line);
  block.votes[uint32_t(Vote::all)] &= predicate;
  block.votes[uint32_t(Vote::any)] |= predicate;
  block.votes[uint32_t(Vote::count)] += predicate;
  block.at_barrier++;
  fiber->barrier = place;
  if (block.at_barrier == block.alive) release_barrier(block);
  to_scheduler();
  return block.outcome[uint32_t(vote)];
}

// A thread that exits no longer counts at barriers, as on the GPU since Volta.
void thread_exits(Fiber* fiber) {
  Block& block = *fiber->block;
  fiber->done = true;
  fiber->warp->live &= ~(1u << fiber->view.lane);
  for (const Meeting& meeting : fiber->warp->meetings)
    if (meeting.arrived && (meeting.mask >> fiber->view.lane & 1))
      fail("thread exits while others wait for it in a warp intrinsic (mask %08x)", meeting.mask);
  if (--block.alive == 0) add_work(block);
  else if (block.at_barrier == block.alive) release_barrier(block);
}

namespace {

const char* name(Intrinsic kind) {
  const char* names[] = {"__syncwarp", "a shuffle", "a ballot", "a match", "a reduction"};
  return names[uint32_t(kind)];
}

template <class Action>
void for_each_lane(uint32_t mask, Action action) {
  for (; mask; mask &= mask - 1) action(uint32_t(__builtin_ctz(mask)));
}

// What happened before any lane's __syncwarp() happened before every lane's next step. Other intrinsics
// promise no order of memory accesses, and get none from the checker.
void join_clocks(Warp& warp, uint32_t mask) {
  uint32_t joined[LANES] = {};
  for_each_lane(mask, [&](uint32_t lane) {
    for (uint32_t i = 0; i < LANES; i++)
      if (warp.clock[lane][i] > joined[i]) joined[i] = warp.clock[lane][i];
  });
  for_each_lane(mask, [&](uint32_t lane) {
    memcpy(warp.clock[lane], joined, sizeof joined);
    warp.clock[lane][lane]++;
  });
}

uint64_t reduced(const Meeting& meeting) {
  uint64_t total = meeting.value[__builtin_ctz(meeting.mask)];
  for_each_lane(meeting.mask & (meeting.mask - 1),
                [&](uint32_t lane) { total = meeting.fold(total, meeting.value[lane]); });
  return total;
}

uint64_t lanes_with(const Meeting& meeting, uint64_t value) {
  uint64_t lanes = 0;
  for_each_lane(meeting.mask,
                [&](uint32_t lane) { lanes |= uint64_t(meeting.value[lane] == value) << lane; });
  return lanes;
}

// Hands every lane its result. `lane_zero` is the fiber of the warp's first lane.
void conclude(Meeting& meeting, Warp& warp, Fiber* lane_zero) {
  uint64_t common = 0;
  if (meeting.kind == Intrinsic::sync) join_clocks(warp, meeting.mask);
  if (meeting.kind == Intrinsic::ballot) common = lanes_with(meeting, 1);
  if (meeting.kind == Intrinsic::reduce) common = reduced(meeting);
  for_each_lane(meeting.mask, [&](uint32_t lane) {
    uint64_t& result = lane_zero[lane].result;
    if (meeting.kind == Intrinsic::shuffle)
      result = meeting.value[meeting.source[lane] % LANES];
    else if (meeting.kind == Intrinsic::match)
      result = lanes_with(meeting, meeting.value[lane]);
    else
      result = common;
  });
  warp.waiting &= ~meeting.mask;
  meeting.arrived = 0;
}

void fail_conflict(const Fiber& fiber, uint32_t mask, Intrinsic kind, Place place) {
  for (const Meeting& other : fiber.warp->meetings)
    if (other.arrived && (other.mask & mask) && (other.mask != mask || other.kind != kind))
      fail(
          "%s:%d: lanes of one warp wait for each other in different intrinsics: %s with mask %08x, %s "
          "with mask %08x",
          place.file, place.line, name(kind), mask, name(other.kind), other.mask);
}

void check_mask(const Fiber& fiber, uint32_t mask, Intrinsic kind, Place place) {
  const Warp& warp = *fiber.warp;
  if (!(mask >> fiber.view.lane & 1))
    fail("%s:%d: %s by lane %u, which is not in its mask %08x", place.file, place.line, name(kind),
         fiber.view.lane, mask);
  if (mask & ~warp.live)
    fail("%s:%d: the mask %08x of %s names lanes that exited or don't exist (live: %08x)", place.file,
         place.line, mask, name(kind), warp.live);
  const Meeting& meeting = warp.meetings[__builtin_ctz(mask)];
  bool other_meeting = meeting.arrived && (meeting.mask != mask || meeting.kind != kind);
  if (other_meeting || (warp.waiting & mask) != meeting.arrived) fail_conflict(fiber, mask, kind, place);
}

}  // namespace

uint64_t meet(uint32_t mask, Intrinsic kind, uint64_t value, uint32_t source, Fold fold, Place place) {
  Fiber* fiber = state.running;
  check_mask(*fiber, mask, kind, place);
  if (kind == Intrinsic::shuffle && !(mask >> (source % LANES) & 1))
    fail("%s:%d: shuffle reads lane %u, which is not in its mask %08x", place.file, place.line, source,
         mask);
  Meeting& meeting = fiber->warp->meetings[__builtin_ctz(mask)];
  meeting.mask = mask;
  meeting.kind = kind;
  meeting.fold = fold;
  meeting.value[fiber->view.lane] = value;
  meeting.source[fiber->view.lane] = source;
  meeting.arrived |= 1u << fiber->view.lane;
  fiber->warp->waiting |= 1u << fiber->view.lane;
  if (meeting.arrived != mask) {
    to_scheduler();
    return fiber->result;
  }
  Fiber* lane_zero = fiber - fiber->view.lane;
  conclude(meeting, *fiber->warp, lane_zero);
  for_each_lane(mask & ~(1u << fiber->view.lane), [&](uint32_t lane) { wake(&lane_zero[lane]); });
  if (shown.options.order == 0) give_way();  // else the last to arrive would always go on first
  return fiber->result;
}

}  // namespace emulator
