// The kernel that tells a WHILE node of a CUDA graph whether its body runs once more.
#include "cuda/graph_condition.cuh"
#include "search/transducer/beam.cuh"

// It does while any utterance has a next step.
extern "C" __global__ void __launch_bounds__(MAX_THREADS) loop_condition(const LoopConditionArgs args) {
  bool active = false;
  for (int b = thread(); b < args.num_utterances; b += threads()) {
    active |= args.counters[b].activity == ACTIVE;
  }
  active = __syncthreads_or(active);
  if (thread() == 0) cudaGraphSetConditional(args.handle, active);
}
