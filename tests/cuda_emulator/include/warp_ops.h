// Warp intrinsics. All lanes of the mask must meet in the same intrinsic, else the launch fails.
#pragma once
#include <type_traits>

#include "engine.h"

namespace emulator {

template <class T>
EMULATED uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= 8, "warp intrinsics take values of up to 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  return bits;
}

template <class T>
EMULATED T from_bits(uint64_t bits) {
  T value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

template <class T>
EMULATED T shuffle(uint32_t mask, T value, uint32_t source, Place place) {
  return from_bits<T>(meet(mask, Intrinsic::shuffle, to_bits(value), source, nullptr, place));
}

EMULATED int lane() { return int(shown.thread->lane); }

}  // namespace emulator

// Only the caller is known to be converged: legal, and the harshest answer there is.
EMULATED unsigned __activemask() { return 1u << emulator::lane(); }

EMULATED void __syncwarp(unsigned mask = ~0u, emulator::Place place = emulator::Place::here()) {
  emulator::meet(mask, emulator::Intrinsic::sync, 0, 0, nullptr, place);
}

template <class T>
EMULATED T __shfl_sync(unsigned mask, T value, int source, int width = 32,
                       emulator::Place place = emulator::Place::here()) {
  int first = emulator::lane() & ~(width - 1);
  return emulator::shuffle(mask, value, first + (source & (width - 1)), place);
}

template <class T>
EMULATED T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                          emulator::Place place = emulator::Place::here()) {
  int lane = emulator::lane(), source = lane - int(delta), first = lane & ~(width - 1);
  return emulator::shuffle(mask, value, source < first ? lane : source, place);
}

template <class T>
EMULATED T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                            emulator::Place place = emulator::Place::here()) {
  int lane = emulator::lane(), source = lane + int(delta), last = lane | (width - 1);
  return emulator::shuffle(mask, value, source > last ? lane : source, place);
}

template <class T>
EMULATED T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32,
                           emulator::Place place = emulator::Place::here()) {
  int lane = emulator::lane(), source = lane ^ lanes, last = lane | (width - 1);
  return emulator::shuffle(mask, value, source > last ? lane : source, place);
}

EMULATED unsigned __ballot_sync(unsigned mask, int predicate,
                                emulator::Place place = emulator::Place::here()) {
  return unsigned(emulator::meet(mask, emulator::Intrinsic::ballot, predicate != 0, 0, nullptr, place));
}
EMULATED int __any_sync(unsigned mask, int predicate, emulator::Place place = emulator::Place::here()) {
  return __ballot_sync(mask, predicate, place) != 0;
}
EMULATED int __all_sync(unsigned mask, int predicate, emulator::Place place = emulator::Place::here()) {
  return __ballot_sync(mask, predicate, place) == mask;
}

template <class T>
EMULATED unsigned __match_any_sync(unsigned mask, T value,
                                   emulator::Place place = emulator::Place::here()) {
  return unsigned(
      emulator::meet(mask, emulator::Intrinsic::match, emulator::to_bits(value), 0, nullptr, place));
}
template <class T>
EMULATED unsigned __match_all_sync(unsigned mask, T value, int* all,
                                   emulator::Place place = emulator::Place::here()) {
  *all = __match_any_sync(mask, value, place) == mask;
  return *all ? mask : 0;
}

#define EMULATOR_REDUCE(name, T, expression)                                                 \
  EMULATED T name(unsigned mask, T value, emulator::Place place = emulator::Place::here()) { \
    emulator::Fold fold = [](uint64_t left, uint64_t right) -> uint64_t {                    \
      T a = emulator::from_bits<T>(left), b = emulator::from_bits<T>(right);                 \
      return emulator::to_bits<T>(expression);                                               \
    };                                                                                       \
    uint64_t bits = emulator::to_bits(value);                                                \
    return emulator::from_bits<T>(                                                           \
        emulator::meet(mask, emulator::Intrinsic::reduce, bits, 0, fold, place));            \
  }
EMULATOR_REDUCE(__reduce_add_sync, unsigned, a + b)
EMULATOR_REDUCE(__reduce_add_sync, int, int(unsigned(a) + unsigned(b)))
EMULATOR_REDUCE(__reduce_min_sync, unsigned, (b < a ? b : a))
EMULATOR_REDUCE(__reduce_min_sync, int, (b < a ? b : a))
EMULATOR_REDUCE(__reduce_max_sync, unsigned, (b > a ? b : a))
EMULATOR_REDUCE(__reduce_max_sync, int, (b > a ? b : a))
EMULATOR_REDUCE(__reduce_and_sync, unsigned, a& b)
EMULATOR_REDUCE(__reduce_or_sync, unsigned, a | b)
EMULATOR_REDUCE(__reduce_xor_sync, unsigned, a ^ b)
#undef EMULATOR_REDUCE
