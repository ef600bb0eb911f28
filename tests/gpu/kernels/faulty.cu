// Faults that compute-sanitizer must report. The names hold "advance", so that its filter lets them pass.
extern "C" __global__ void advance_too_far(int* out) {  // `out` has one element per thread
  out[threadIdx.x + 1] = threadIdx.x;
}

extern "C" __global__ void advance_without_barrier(int* out) {
  __shared__ int numbers[1024];
  numbers[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = numbers[blockDim.x - 1 - threadIdx.x];
}
