// packed.cuh behind a kernel that packed.py can follow.
#include "lm/packed.cuh"

struct LookupsArgs {
  const LmState* states;
  const uint64* labels;
  const uint64* arcs;
  int label_bits;
  int target_bits;
  const int64* asked_states;
  const int64* asked_labels;
  float* costs;
  int64* targets;
  int count;
};
extern "C" __global__ void lookups(const LookupsArgs args) {
  auto [states, labels, arcs, label_bits, target_bits, asked_states, asked_labels, costs, targets, count] = args;
  const PackedLM lm = {states, labels, arcs, label_bits, target_bits};
  for (int i = blockIdx.x * threads() + thread(); i < count; i += gridDim.x * threads()) {
    LMStep step = lookup(lm, asked_states[i], asked_labels[i]);
    costs[i] = step.cost;
    targets[i] = step.target;
  }
}
