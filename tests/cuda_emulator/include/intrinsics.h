// Device functions that are neither memory nor synchronisation.
#pragma once
#include <type_traits>

#include "warp_ops.h"

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; i++) reversed |= (x >> i & 1) << (31 - i);
  return reversed;
}

inline unsigned __float_as_uint(float x) { return unsigned(emulator::to_bits(x)); }
inline int __float_as_int(float x) { return int(emulator::to_bits(x)); }
inline float __uint_as_float(unsigned bits) { return emulator::from_bits<float>(bits); }
inline float __int_as_float(int bits) { return emulator::from_bits<float>(unsigned(bits)); }
inline long long __double_as_longlong(double x) { return (long long)emulator::to_bits(x); }
inline double __longlong_as_double(long long bits) {
  return emulator::from_bits<double>(uint64_t(bits));
}

inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __expf(float x) { return expf(x); }  // the GPU's own are less exact
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }

// As CUDA's: of a number and a NaN, the number.
template <class A, class B>
constexpr auto min(A a, B b) -> std::common_type_t<A, B> {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return __builtin_fmin(T(a), T(b));
  return T(b) < T(a) ? T(b) : T(a);
}
template <class A, class B>
constexpr auto max(A a, B b) -> std::common_type_t<A, B> {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return __builtin_fmax(T(a), T(b));
  return T(a) < T(b) ? T(b) : T(a);
}

inline void __trap() { emulator::fail("__trap()"); }
#undef assert
#define assert(condition) \
  ((condition) ? (void)0 : emulator::fail("assert(%s) at %s:%d", #condition, __FILE__, __LINE__))

// Any number is a handle here; the values end up in EmulatedRuntime.conditions.
typedef unsigned long long cudaGraphConditionalHandle;
EMULATED void cudaGraphSetConditional(cudaGraphConditionalHandle handle, unsigned value) {
  emulator::set_condition(handle, value);
}
