// Finds accesses that the kernel doesn't order, whether or not this schedule made them go wrong.
//
// Every word of memory remembers who last wrote it, who read it and who did an atomic on it, and when:
// the barriers that the block had passed (its epoch) and the step of the thread's own clock, which
// __syncwarp() advances. An access races with a remembered one if they conflict (one writes, and they
// aren't both atomic) and nothing orders them:
//   same thread: program order;
//   same block: a __syncthreads() between them, so another epoch;
//   same warp: a __syncwarp() has told this lane's vector clock of the other's step;
//   different blocks of a launch: nothing does.
// Readers and atomics: two of each are kept, of different warps if there are such. A race with any
// reader is a race with one of these two, except within a warp that syncs by partial masks.
#include <stdlib.h>

#include "engine_internal.h"

namespace emulator {
namespace {

struct Visit {
  uint32_t block = 0;  // + 1; 0: nobody yet
  uint32_t thread = 0;
  uint32_t epoch = 0, clock = 0;
  const void* site = nullptr;  // in the code, for messages
};

struct Cell {
  uint64_t key;
  bool split;  // accesses of less than a word came: its four bytes have cells of their own
  Visit write, reads[2], atomics[2];
};

// Open addressing, cleared for every launch.
Cell* cells = nullptr;
size_t capacity = 0, used = 0;

Cell* slot_of(Cell* table, size_t size, uint64_t key) {
  for (size_t i = key * 0x9E3779B97F4A7C15ull >> 20;; i++) {
    Cell* cell = &table[i & (size - 1)];
    if (cell->key == key || !cell->key) return cell;
  }
}

void grow() {
  size_t size = capacity * 2;
  auto table = (Cell*)calloc(size, sizeof(Cell));
  for (size_t i = 0; i < capacity; i++)
    if (cells[i].key) *slot_of(table, size, cells[i].key) = cells[i];
  free(cells);
  cells = table;
  capacity = size;
}

Cell& cell_of(uint64_t key) {
  if (2 * used >= capacity) grow();
  Cell* cell = slot_of(cells, capacity, key);
  if (!cell->key) cell->key = key, used++;
  return *cell;
}

struct Current {
  Fiber* fiber;
  Access kind;
  const void* site;
  const char* address;
  bool shared;

  Visit visit() const {
    return {fiber->block->number + 1, fiber->number, fiber->block->epoch,
            fiber->warp->clock[fiber->view.lane][fiber->view.lane], site};
  }
};

bool happened_before(const Visit& past, const Current& now) {
  const Fiber* fiber = now.fiber;
  if (!past.block) return true;
  if (past.block != fiber->block->number + 1) return false;
  if (past.thread == fiber->number || past.epoch != fiber->block->epoch) return true;
  return past.thread / LANES == fiber->number / LANES &&
         fiber->warp->clock[fiber->view.lane][past.thread % LANES] >= past.clock;
}

const char* name(Access kind) {
  const char* names[] = {"read", "write", "atomic"};
  return names[uint32_t(kind)];
}

void require_order(const Visit& past, Access past_kind, const Current& now) {
  if (happened_before(past, now)) return;
  fail("race on %s memory at %p: %s at @%p and %s by block %u thread %u at @%p, and nothing orders them",
       now.shared ? "shared" : "global", now.address, name(now.kind), now.site, name(past_kind),
       past.block - 1, past.thread, past.site);
}

// Remembers `now` in one of two places, so that the two are of different warps if possible.
void remember(Visit (&visits)[2], const Current& now) {
  for (Visit& visit : visits)
    if (happened_before(visit, now)) {  // who races with it, races with this one too
      visit = now.visit();
      return;
    }
  if (visits[0].block == visits[1].block && visits[0].thread / LANES == visits[1].thread / LANES)
    visits[1] = now.visit();
}

// Returns whether anything had been written there before.
bool check_cell(Cell& cell, const Current& now) {
  bool written = cell.write.block || cell.atomics[0].block;
  require_order(cell.write, Access::write, now);
  if (now.kind != Access::atomic)
    for (const Visit& visit : cell.atomics) require_order(visit, Access::atomic, now);
  if (now.kind != Access::read)
    for (const Visit& visit : cell.reads) require_order(visit, Access::read, now);
  if (now.kind == Access::write) cell.write = now.visit();
  if (now.kind == Access::read) remember(cell.reads, now);
  if (now.kind == Access::atomic) remember(cell.atomics, now);
  return written;
}

constexpr uint64_t SHARED_KEY = 1ull << 63;
constexpr uint64_t BYTE_KEY = 1ull << 62;

uint64_t byte_key(uint64_t word, uint32_t byte) {
  return BYTE_KEY | (word & SHARED_KEY) | (word & ~SHARED_KEY) << 2 | byte;
}

void split(uint64_t word) {
  for (uint32_t byte = 0; byte < 4; byte++) {
    Cell cell = cell_of(word);  // a copy: the table may move when the next line adds to it
    cell.key = byte_key(word, byte);
    cell_of(cell.key) = cell;
  }
  cell_of(word).split = true;
}

bool check_bytes(uint64_t word, uint32_t from, uint32_t to, const Current& now) {
  bool whole = from == 0 && to == 4, written = false;
  if (!whole && !cell_of(word).split) split(word);
  if (!cell_of(word).split) return check_cell(cell_of(word), now);
  for (uint32_t byte = from; byte < to; byte++)
    written |= check_cell(cell_of(byte_key(word, byte)), now);
  return written;
}

bool is_tensor_memory(const char* address, size_t bytes) {
  const Options& options = shown.options;
  for (uint32_t i = 0; i < options.memory_ranges; i++) {
    auto begin = (const char*)options.memory_starts[i];
    if (address >= begin && address + bytes <= begin + options.memory_bytes[i]) return true;
  }
  return false;
}

void check_bounds(const Current& now, size_t bytes) {
  auto dynamic = (const char*)state.kernel.shared;
  if (now.shared) {
    bool in_dynamic = now.address >= dynamic && now.address < dynamic + SHARED_BYTES_MAX;
    if (in_dynamic && now.address + bytes > dynamic + shown.options.dynamic_bytes)
      fail("out-of-bounds %s of %zu bytes: byte %td of %llu of dynamic shared memory, at @%p",
           name(now.kind), bytes, now.address - dynamic, (unsigned long long)shown.options.dynamic_bytes,
           now.site);
  } else if (!is_tensor_memory(now.address, bytes) && !is_module_data(now.address, bytes)) {
    fail("out-of-bounds %s of %zu bytes at address %p, which is in none of the kernel's tensors, at @%p",
         name(now.kind), bytes, now.address, now.site);
  }
}

}  // namespace

void reset_checker() {
  free(cells);
  cells = nullptr;
  used = 0;
  if (shown.options.check) cells = (Cell*)calloc(capacity = 1 << 12, sizeof(Cell));
}

void note_access(const void* address, size_t bytes, Access kind, const void* site) {
  Fiber* fiber = state.running;
  if (!fiber || state.failed || !shown.options.check) return;
  auto begin = (const char*)address;
  if (begin >= fiber->stack && begin < fiber->stack + STACK_BYTES) return;  // the thread's own variables
  AddressRange shared = shared_memory();
  Current now{fiber, kind, site, begin, shared.holds(begin, bytes)};
  check_bounds(now, bytes);
  uint64_t first = uint64_t(begin), last = first + bytes;
  bool written = false;
  for (uint64_t word = first / 4; word * 4 < last; word++) {
    uint64_t key = word;
    if (now.shared)
      key = SHARED_KEY | uint64_t(fiber->block->number) << 18 | (word - uint64_t(shared.begin) / 4);
    uint32_t from = word * 4 < first ? uint32_t(first % 4) : 0;
    uint32_t to = (word + 1) * 4 > last ? uint32_t(last - word * 4) : 4;
    written |= check_bytes(key, from, to, now);
  }
  // A part may be unwritten: a struct's padding is copied with it.
  if (now.shared && kind != Access::write && !written)
    fail("%s of shared memory that nothing was written to, at @%p", name(kind), site);
}

}  // namespace emulator
