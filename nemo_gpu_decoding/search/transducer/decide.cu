// The kernel that tells a WHILE node of a CUDA graph whether its body runs once more.
#ifndef HYPOTHESIS_BYTES
#define HYPOTHESIS_BYTES 56
#endif

#include "cuda/graph_condition.cuh"
#include "search/transducer/beam.cuh"

constexpr int MAX_THREADS = 256;

// It does while any utterance has a next step.
extern "C" __global__ void __launch_bounds__(MAX_THREADS) decide(
  cudaGraphConditionalHandle handle,
  const Progress* progress,  // [B]
  int num_utterances
) {
  bool going = false;
  for (int b = thread(); b < num_utterances; b += threads()) going |= progress[b].activity == GOING;
  going = __syncthreads_or(going);
  if (thread() == 0) cudaGraphSetConditional(handle, going);
}
