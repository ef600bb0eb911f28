// Runs the blocks of a launch: some are under way at once, and each gets a random share of turns.
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <numeric>

#include "engine_internal.h"

namespace emulator {

State state;
Shown shown;

void fail(const char* format, ...) {
  if (!state.failed) {  // the first failure is the cause
    state.failed = true;
    int length = 0;
    if (Fiber* fiber = state.running)
      length = snprintf(state.message, sizeof state.message,
                        "block %u thread %u: ", fiber->block->number, fiber->number);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(state.message + length, sizeof state.message - length, format, arguments);
    va_end(arguments);
  }
  if (state.running) to_scheduler();  // which never resumes it
}

void wake(Fiber* fiber) { fiber->block->ready.push_back(fiber); }

void give_way() {
  wake(state.running);
  to_scheduler();
}

namespace {

bool random_order() { return shown.options.order == 0; }

// Stacks outlive the launch: touching fresh pages is what a launch would spend most of its time on.
std::vector<char*> stacks;

const size_t page = 4096;

bool need_stacks(size_t count) {
  while (stacks.size() < count) {
    void* memory = mmap(nullptr, STACK_BYTES + page, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE)) return false;  // a guard below each
    stacks.push_back((char*)memory + page);
  }
  return true;
}

void fiber_main() {
  state.kernel.call(state.kernel.arguments);
  thread_exits(state.running);
  to_scheduler();
}

void start_thread(Block& block, uint3 block_index, uint32_t number, char* stack) {
  const dim3& size = shown.options.block;
  Fiber& fiber = block.fibers[number];
  fiber = Fiber();
  fiber.number = number;
  uint3 index = {number % size.x, number / size.x % size.y, number / size.x / size.y};
  fiber.view = {index, block_index, number % LANES};
  fiber.warp = &block.warps[number / LANES];
  fiber.warp->live |= 1u << fiber.view.lane;
  fiber.block = &block;
  fiber.stack = stack;
  // Tops of stacks at different offsets, or all of them would compete for the same cache sets.
  fiber.stack_pointer = new_stack_frame(stack + STACK_BYTES - 64 - (number * 1088 & 8191), fiber_main);
  wake(&fiber);
}

void start_block(Block& block, uint32_t number, size_t first_stack) {
  const dim3& grid = shown.options.grid;
  uint32_t threads = uint32_t(shown.options.block.volume());
  uint3 block_index = {number % grid.x, number / grid.x % grid.y, number / grid.x / grid.y};
  block.number = number;
  block.alive = threads;
  block.at_barrier = block.epoch = 0;
  block.votes[0] = 1, block.votes[1] = block.votes[2] = 0;
  block.fibers.resize(threads);
  block.ready.clear();
  block.warps.resize((threads + LANES - 1) / LANES);
  for (Warp& warp : block.warps) {
    warp.live = warp.waiting = 0;
    for (Meeting& meeting : warp.meetings) meeting.arrived = 0;
    memset(warp.clock, 0, sizeof warp.clock);
    for (uint32_t lane = 0; lane < LANES; lane++) warp.clock[lane][lane] = 1;
  }
  poison(block);
  for (uint32_t t = threads; t-- > 0;) start_thread(block, block_index, t, stacks[first_stack + t]);
}

size_t choose(const std::vector<Fiber*>& ready) {
  if (random_order()) return random_below(uint32_t(ready.size()));
  bool ascending = shown.options.order == 1;
  auto earlier = [=](Fiber* a, Fiber* b) {
    return ascending ? a->number < b->number : a->number > b->number;
  };
  return size_t(std::min_element(ready.begin(), ready.end(), earlier) - ready.begin());
}

// Lets threads of the block run until none can or its share of turns is used up.
void run_block(Block& block) {
  swap_in(&block);
  uint32_t turns = 64 + random_below(4 * uint32_t(block.fibers.size()));
  while (turns-- && !block.ready.empty() && !state.failed) {
    size_t chosen = choose(block.ready);
    Fiber* fiber = block.ready[chosen];
    block.ready[chosen] = block.ready.back();
    block.ready.pop_back();
    state.running = fiber;
    shown.thread = &fiber->view;
    shown.counts = &fiber->counts;
    state.switches++;
    emulator_switch(&state.scheduler_stack_pointer, fiber->stack_pointer);
    state.running = nullptr;
    shown.thread = nullptr;
  }
}

void report_deadlock(const Block& block) {
  uint32_t in_intrinsic = 0, one = 0;
  for (const Fiber& fiber : block.fibers)
    if (!fiber.done && !fiber.barrier.file) in_intrinsic++, one = fiber.number;
  if (block.at_barrier)
    fail(
        "deadlock in block %u: %u of %u live threads wait in __syncthreads (%s:%d), %u in a warp "
        "intrinsic (one: thread %u)",
        block.number, block.at_barrier, block.alive, block.barrier.file, block.barrier.line,
        in_intrinsic, one);
  else
    fail("deadlock in block %u: all %u live threads wait in warp intrinsics (one: thread %u)",
         block.number, block.alive, one);
}

std::vector<uint32_t> block_order() {  // the last comes first
  std::vector<uint32_t> waiting(shown.options.grid.volume());
  std::iota(waiting.rbegin(), waiting.rend(), 0);
  if (random_order())
    for (size_t i = waiting.size(); i > 1; i--)
      std::swap(waiting[i - 1], waiting[random_below(uint32_t(i))]);
  return waiting;
}

void run_grid() {
  std::vector<uint32_t> waiting = block_order();
  size_t threads = shown.options.block.volume();
  size_t resident = std::min(waiting.size(), size_t(std::max(shown.options.resident, 1u)));
  if (!need_stacks(resident * threads)) return fail("no memory for %zu stacks", resident * threads);
  std::vector<Block> blocks(resident);
  std::vector<Block*> active;
  auto start_next = [&](Block& block) {
    start_block(block, waiting.back(), size_t(&block - blocks.data()) * threads);
    waiting.pop_back();
  };
  for (Block& block : blocks) {
    start_next(block);
    active.push_back(&block);
  }
  while (!active.empty() && !state.failed) {
    size_t turn = random_order() ? random_below(uint32_t(active.size())) : 0;
    Block& block = *active[turn];
    run_block(block);
    if (state.failed || !block.ready.empty()) continue;
    if (block.alive) return report_deadlock(block);
    forget_swapped_in();
    if (!waiting.empty()) {
      start_next(block);
    } else {
      active[turn] = active.back();
      active.pop_back();
    }
  }
}

}  // namespace

int run(const Options& options, const Kernel& kernel) {
  shown.options = options;
  state.kernel = kernel;
  state.running = nullptr;
  shown.thread = nullptr;
  state.failed = false;
  state.message[0] = 0;
  state.switches = 0;
  state.work = Work();
  state.conditions.clear();
  shown.random = (options.seed + 1) * 0x9E3779B97F4A7C15ull;
  for (int i = 0; i < 8; i++) random_below(2);  // small seeds have few bits set
  find_module_memory();
  reset_checker();
  forget_swapped_in();
  run_grid();
  forget_swapped_in();
  return state.failed;
}

}  // namespace emulator

// Called between launches: a process may hold some 65,000 maps, of which each stack takes two.
extern "C" void emulator_free_stacks() {
  using namespace emulator;
  for (char* stack : stacks) munmap(stack - page, STACK_BYTES + page);
  stacks.clear();
}

extern "C" const char* emulator_message() { return emulator::state.message; }
extern "C" uint64_t emulator_switches() { return emulator::state.switches; }
extern "C" void emulator_work(emulator::Work* work) { *work = emulator::state.work; }
