// What the engine's sources share with each other and kernels don't see.
//
// Every CUDA thread is a fiber: a stack of its own, entered and left by switching stack pointers. All
// fibers of a launch run in one OS thread, so nothing here needs a lock, and a fiber runs until it
// meets a barrier, a warp intrinsic, an atomic or (with the checker on) any memory access.
#pragma once
#include <stdint.h>

#include <vector>

#include "engine.h"

namespace emulator {

// Lanes of a warp that wait for each other in an intrinsic; results appear when the last has arrived.
struct Meeting {
  uint32_t mask, arrived;
  Intrinsic kind;
  Fold fold;
  uint64_t value[LANES];
  uint32_t source[LANES];  // shuffles: the lane whose value a lane wants
};

struct Warp {
  uint32_t live = 0;          // lanes that exist and have not exited
  uint32_t waiting = 0;       // lanes in a meeting
  Meeting meetings[LANES];    // by the lowest lane of the mask: disjoint masks can meet at once
  uint32_t clock[LANES][LANES];  // clock[i][j]: the steps of lane j that happened before lane i's next
};

struct AsyncCopy {
  void* to;
  const void* from;
  uint32_t bytes, group;
};

struct Block;
struct Fiber {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  ThreadView view{};
  uint32_t number = 0;  // threadIdx, flattened
  Warp* warp = nullptr;
  Block* block = nullptr;
  Place barrier;  // where it waits in __syncthreads(); no file if it doesn't
  uint64_t result = 0;  // of the last warp intrinsic
  bool done = false;
  Counts counts{};  // since the last barrier
  std::vector<AsyncCopy> copies;  // asked for and not yet waited for
  uint32_t copy_group = 0;
};

struct Block {
  uint32_t number = 0;  // blockIdx, flattened
  uint32_t alive = 0;  // threads that have not exited
  uint32_t at_barrier = 0;
  uint32_t epoch = 0;  // barriers passed: the block's clock
  Place barrier;
  uint32_t votes[3] = {1, 0, 0};  // being collected, by Vote
  uint32_t outcome[3] = {1, 0, 0};  // of the last barrier
  std::vector<Fiber> fibers;
  std::vector<Fiber*> ready;  // those that can run, in no order
  std::vector<Warp> warps;
  std::vector<char> shared_image;  // shared memory while another block runs
};

struct State {
  Kernel kernel;
  Fiber* running = nullptr;  // null in the scheduler
  void* scheduler_stack_pointer = nullptr;
  uint64_t switches = 0;
  Work work{};  // of this launch
  std::vector<Condition> conditions;  // set by this launch, each handle once
  bool failed = false;
  char message[1024] = "";
};
extern __attribute__((visibility("hidden"))) State state;

// context_switch.cpp
extern "C" __attribute__((visibility("hidden"))) void emulator_switch(void** save_stack_pointer,
                                                                      void* to);
void* new_stack_frame(char* stack_top, void (*entry)());
void to_scheduler();  // leave the running fiber; returns when the scheduler resumes it

// scheduler.cpp
void wake(Fiber* fiber);

// barriers.cpp
void thread_exits(Fiber* fiber);
void add_work(Block& block);  // of its threads since the last barrier

// shared_memory.cpp
struct AddressRange {
  char *begin = nullptr, *end = nullptr;
  bool holds(const char* address, size_t bytes) const {
    return address >= begin && address + bytes <= end;
  }
};
AddressRange shared_memory();  // static and dynamic, of the block that is swapped in
bool is_module_data(const char* address, size_t bytes);  // __constant__ and __device__ variables
void find_module_memory();
size_t shared_image_bytes();
void poison(Block& block);
void swap_in(Block* block);
void forget_swapped_in();

// race_checker.cpp
void reset_checker();

}  // namespace emulator
