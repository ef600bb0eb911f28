// paged.cuh behind a kernel that packed.py can follow.
#include "lm/paged.cuh"

struct PagedLookupsArgs {
  const LmState* lm_states;
  const uint64* lm_labels;
  const uint64* lm_arcs;
  const uint64* lm_host_arcs;
  CachedArc* lm_cache;
  uint32 lm_cache_slots;
  int lm_label_bits;
  int lm_target_bits;
  const int64* asked_states;
  const int64* asked_labels;
  float* costs;
  int64* targets;
  uint64* counts;
  int count;
};
extern "C" __global__ void paged_lookups(const PagedLookupsArgs args) {
  auto [lm_states, lm_labels, lm_arcs, lm_host_arcs, lm_cache, lm_cache_slots, lm_label_bits, lm_target_bits, asked_states, asked_labels, costs, targets, counts, count] = args;
  const PagedLM lm = {
    {lm_states, lm_labels, lm_arcs ? lm_arcs : lm_host_arcs, lm_label_bits, lm_target_bits},
    lm_cache, lm_cache_slots};
  LookupCounters counters = {};
  for (int i = blockIdx.x * threads() + thread(); i < count; i += gridDim.x * threads()) {
    LMStep step = lookup(lm, asked_states[i], asked_labels[i], counters);
    costs[i] = step.cost;
    targets[i] = step.target;
  }
  warp_add(counters, counts + 3 * blockIdx.x);
}
