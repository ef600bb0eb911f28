// How Python gets in: two exported functions per kernel and the
// list of kernels, in lines that build.py appends to the kernel's file.
#pragma once
#include <type_traits>
#include <utility>

#include "engine.h"

// The one allowed name of dynamic shared memory; `extern __shared__ unsigned char smem[];` finds it.
thread_local __attribute__((aligned(128))) unsigned char smem[emulator::SHARED_BYTES_MAX];

namespace emulator {

template <class... Parameters>
struct Call {
  void (*kernel)(Parameters...);
  void** arguments;  // addresses of the values, in order

  template <size_t... I>
  __attribute__((no_sanitize("thread"))) void with(std::index_sequence<I...>) {
    kernel(*(std::remove_cv_t<Parameters>*)arguments[I]...);
  }
  static __attribute__((no_sanitize("thread"))) void once(void* self) {
    ((Call*)self)->with(std::index_sequence_for<Parameters...>());
  }
};

template <class... Parameters>
int launch(void (*kernel)(Parameters...), const Options* options, void** arguments) {
  Call<Parameters...> call{kernel, arguments};
  return run(*options, {Call<Parameters...>::once, &call, smem});
}

template <class... Parameters>
void parameter_sizes(void (*)(Parameters...), uint32_t* sizes) {
  uint32_t all[] = {uint32_t(sizeof(Parameters))..., 0};  // 0 ends the list
  for (uint32_t size : all) *sizes++ = size;
}

}  // namespace emulator

#define EMULATOR_ENTRY(kernel)                                                                  \
  extern "C" int emulator_launch_##kernel(const emulator::Options* options, void** arguments) { \
    return emulator::launch(kernel, options, arguments);                                        \
  }                                                                                             \
  extern "C" void emulator_parameters_##kernel(uint32_t* sizes) {                               \
    emulator::parameter_sizes(kernel, sizes);                                                   \
  }

#define EMULATOR_KERNELS(names) \
  extern "C" const char* emulator_kernels() { return names; }
