// What the CUDA headers ask of the engine.
#pragma once
#include <stdint.h>

#include "language.h"

// Code of the emulator inside the kernel's translation unit: not instrumented itself, and with the
// checker on never inlined, so that its return address is the line of the kernel that called it.
#ifdef __SANITIZE_THREAD__
#define EMULATED __attribute__((no_sanitize("thread"), noinline))
#else
#define EMULATED inline
#endif

namespace emulator {

constexpr uint32_t LANES = 32;
constexpr size_t STACK_BYTES = 128 * 1024;  // of a fiber; PTX of a large kernel has 60 kB of registers
constexpr size_t SHARED_BYTES_MAX = 227 * 1024;  // what a block may ask for on sm_90

// A line of the kernel, for messages and to tell barriers apart.
struct Place {
  const char* file = nullptr;
  int line = 0;
  static constexpr Place here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

enum class Intrinsic : uint32_t { sync, shuffle, ballot, match, reduce };
enum class Access : uint32_t { read, write, atomic };
enum class Vote : uint32_t { all, any, count };
typedef uint64_t (*Fold)(uint64_t, uint64_t);

// Who runs, for threadIdx and its kin.
struct ThreadView {
  uint3 thread_index, block_index;
  uint32_t lane;
};

// How to launch; the same layout as `_Options` in emulator.py.
struct Options {
  dim3 grid, block;
  uint64_t dynamic_bytes;
  uint64_t seed;
  uint32_t order;  // of threads: 0 random, 1 ascending, 2 descending
  uint32_t resident;  // blocks that are under way at once
  uint32_t yield_percent;  // how often a thread gives way at an atomic, or a memory access (checker on)
  uint32_t check;  // the kernel is instrumented: look for races and stray accesses
  uint32_t memory_ranges;  // the tensors among the arguments
  const uint64_t* memory_starts;
  const uint64_t* memory_bytes;
};

// The condition of a CUDA graph's node, as a kernel has set it; the same layout as `_Condition` in
// emulator.py.
struct Condition {
  uint64_t handle;
  uint32_t value;
};

struct Kernel {
  void (*call)(void* arguments);  // runs one thread
  void* arguments;
  unsigned char* shared;  // the kernel's dynamic shared memory, SHARED_BYTES_MAX bytes
};

// What threads have done; counted where PTX is run. Loads and atomics wait for memory, stores do not.
struct Counts {
  uint64_t instructions;  // those that read parameters not among them
  uint64_t doubles;  // of which in fp64
  uint64_t shared_waits, global_waits;  // for what loads and atomics bring, where it is used
  uint64_t bytes_read, bytes_written;  // of global memory; an atomic does both
};

// A launch: its barriers, and the counts of all threads; or those of the thread with the most of each from
// barrier to barrier, added up over the barriers of a block and over blocks. The same layout as `_Work` in emulator.py.
struct Work {
  uint64_t barriers;
  Counts slowest, all;
};

// What kernel code looks at itself, without a call.
struct Shown {
  const ThreadView* thread = nullptr;  // who runs; null on the host's side
  Counts* counts = nullptr;  // of that thread since the last barrier
  Options options;
  uint64_t random = 0;
};
extern __attribute__((visibility("hidden"))) Shown shown;

int run(const Options& options, const Kernel& kernel);  // 0, or 1 and there is a message

// For code that runs on a fiber.
[[gnu::cold]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));  // no return
void give_way();
uint32_t barrier(Place place, Vote vote, bool predicate);
uint64_t meet(uint32_t mask, Intrinsic kind, uint64_t value, uint32_t source, Fold fold, Place place);
void note_access(const void* address, size_t bytes, Access kind, const void* site);
void need_global(const void* address, const char* what);
void async_copy(void* to, const void* from, uint32_t bytes, const void* site);
void async_commit();
void async_wait(uint32_t groups_left, const void* site);
void set_condition(uint64_t handle, uint32_t value);

inline __attribute__((no_sanitize("thread"))) uint32_t random_below(uint32_t bound) {  // xorshift
  uint64_t& x = shown.random;
  x ^= x << 13, x ^= x >> 7, x ^= x << 17;
  return uint32_t(((x >> 32) * bound) >> 32);
}

inline __attribute__((no_sanitize("thread"))) void perhaps_give_way() {
  if (shown.options.yield_percent && random_below(100) < shown.options.yield_percent) give_way();
}

}  // namespace emulator
