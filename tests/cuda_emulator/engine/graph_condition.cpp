// Conditions of a CUDA graph's nodes: what a launch sets is kept for the host to read.
#include "engine_internal.h"

namespace emulator {

void set_condition(uint64_t handle, uint32_t value) {
  for (const Condition& condition : state.conditions) {
    if (condition.handle != handle) continue;
    if (condition.value != value)  // on a GPU any of them may win
      fail("cudaGraphSetConditional: condition %llu is set to %u and to %u in one launch",
           (unsigned long long)handle, condition.value, value);
    return;
  }
  state.conditions.push_back({handle, value});
}

}  // namespace emulator

// Copies up to `room` conditions of the last launch; returns how many there are.
extern "C" uint32_t emulator_conditions(emulator::Condition* conditions, uint32_t room) {
  const auto& all = emulator::state.conditions;
  for (size_t i = 0; i < all.size() && i < room; i++) conditions[i] = all[i];
  return uint32_t(all.size());
}
