// Atomics and loads with a cache hint. Threads share one OS thread, so a plain update is atomic; giving
// way to others before it is what makes their order random.
#pragma once
#include "engine.h"

#ifdef __SANITIZE_THREAD__
#define EMULATOR_NOTE(address, kind) \
  emulator::note_access(address, sizeof *(address), emulator::Access::kind, __builtin_return_address(0))
#else
#define EMULATOR_NOTE(address, kind) ((void)0)
#endif

#define EMULATOR_ATOMIC(name, expression)  \
  template <class T, class U>              \
  EMULATED T name(T* address, U operand) { \
    emulator::perhaps_give_way();          \
    EMULATOR_NOTE(address, atomic);        \
    T old = *address, value = T(operand);  \
    *address = expression;                 \
    return old;                            \
  }                                        \
  EMULATOR_SAME_SCOPE(name)
// A narrower or wider scope changes nothing here.
#define EMULATOR_SAME_SCOPE(name)                   \
  template <class T, class U>                       \
  EMULATED T name##_block(T* address, U operand) {  \
    return name(address, operand);                  \
  }                                                 \
  template <class T, class U>                       \
  EMULATED T name##_system(T* address, U operand) { \
    return name(address, operand);                  \
  }
EMULATOR_ATOMIC(atomicAdd, T(old + value))
EMULATOR_ATOMIC(atomicSub, T(old - value))
EMULATOR_ATOMIC(atomicMin, (value < old ? value : old))
EMULATOR_ATOMIC(atomicMax, (value > old ? value : old))
EMULATOR_ATOMIC(atomicExch, value)
EMULATOR_ATOMIC(atomicAnd, (old & value))
EMULATOR_ATOMIC(atomicOr, (old | value))
EMULATOR_ATOMIC(atomicXor, (old ^ value))
EMULATOR_ATOMIC(atomicInc, (old >= value ? T(0) : T(old + 1)))
EMULATOR_ATOMIC(atomicDec, (old == 0 || old > value ? value : T(old - 1)))

template <class T, class U, class V>
EMULATED T atomicCAS(T* address, U expected, V value) {
  emulator::perhaps_give_way();
  EMULATOR_NOTE(address, atomic);
  T old = *address;
  if (old == T(expected)) *address = T(value);
  return old;
}

// Loads and stores that go to L2 or memory count as relaxed atomics: kernels use them to talk.
template <class T>
EMULATED T __ldcg(const T* address) {
  emulator::need_global(address, "__ldcg");
  emulator::perhaps_give_way();
  EMULATOR_NOTE(address, atomic);
  return *address;
}
template <class T>
EMULATED T __ldcv(const T* address) {
  emulator::need_global(address, "__ldcv");
  emulator::perhaps_give_way();
  EMULATOR_NOTE(address, atomic);
  return *address;
}
template <class T>
EMULATED void __stcg(T* address, T value) {
  emulator::need_global(address, "__stcg");
  EMULATOR_NOTE(address, atomic);
  *address = value;
}

// Loads through the read-only or streaming cache are plain reads.
template <class T>
EMULATED T __ldg(const T* address) {
  emulator::need_global(address, "__ldg");
  EMULATOR_NOTE(address, read);
  return *address;
}
template <class T>
EMULATED T __ldcs(const T* address) {
  emulator::need_global(address, "__ldcs");
  EMULATOR_NOTE(address, read);
  return *address;
}
