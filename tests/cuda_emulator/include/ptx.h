// What PTX instructions mean, for the C++ that ../ptx.py makes of NVRTC's output.
//
// Shared memory has addresses of its own, as on a GPU: 32 bits in ld.shared, and a window of the 64-bit
// generic addresses. So an access through the wrong state space is noticed, and so is one whose address
// is not a multiple of its size: a GPU stops at both, where C++ on a CPU goes on.
#pragma once
#include <fenv.h>
#include <math.h>
#include <string.h>

#include "engine.h"
#include "entry.h"

namespace ptx {

using emulator::Access;
using emulator::fail;
using emulator::Place;
using emulator::shown;

// ---------------------------------------------------------------------- registers, as bits of a type

template <class T, class R>
inline T as(R bits) {
  if constexpr (std::is_integral_v<T> && std::is_integral_v<R>) return T(bits);
  static_assert(sizeof(T) == sizeof(R) || (std::is_integral_v<T> && std::is_integral_v<R>));
  T value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Numbers narrower than the register are extended, by the sign if they have one.
template <class R, class T>
inline void put(R& destination, T value) {
  destination = as<R>(value);
}

// -------------------------------------------------------------------------------------- state spaces

enum class Space { global, shared, generic };

constexpr uint64_t SHARED_WINDOW = 0x0a00000000000000, PARAM_WINDOW = 0x0b00000000000000;
constexpr uint32_t SHARED_BEGIN = 1024;  // below is the driver's, since sm_90
constexpr uint32_t SHARED_DYNAMIC = SHARED_BEGIN + (PTX_STATIC_BYTES + 15) / 16 * 16;

// A block's static variables; its dynamic ones are `smem`.
thread_local __attribute__((aligned(128))) unsigned char static_memory[PTX_STATIC_BYTES + 1];

inline unsigned char* shared_at(uint64_t address, uint32_t bytes, const void* site) {
  if (address >= SHARED_DYNAMIC && address + bytes <= SHARED_DYNAMIC + shown.options.dynamic_bytes)
    return smem + (address - SHARED_DYNAMIC);
  if (address >= SHARED_BEGIN && address + bytes <= SHARED_BEGIN + PTX_STATIC_BYTES)
    return static_memory + (address - SHARED_BEGIN);
  fail("out-of-bounds access of %u bytes at %lld of %u + %llu bytes of shared memory, at @%p", bytes,
       (long long)address - SHARED_BEGIN, PTX_STATIC_BYTES,
       (unsigned long long)shown.options.dynamic_bytes, site);
  return nullptr;
}

inline unsigned char* global_at(uint64_t address, uint32_t bytes, const void* site) {
  if (address < 4096 || address >> 56)
    fail("access of %u bytes at %#llx, which is no address of global memory, at @%p", bytes,
         (unsigned long long)address, site);
  return (unsigned char*)address;
}

// Loads overlap: a thread goes on behind a load, or an atomic, until it reads a register that is still to be filled.
// It waits then, and for all that is on its way from that memory; from global memory, for shared memory's as well.
struct Load {
  bool shared = false;
  uint32_t after = 0;  // waits of the thread
};
inline bool last_was_shared;  // the last access

struct Waits {  // of one thread in one function
  uint32_t global = 1, shared = 1;

  Load load() const { return {last_was_shared, last_was_shared ? shared : global}; }

  void use(Load load) {
    if (load.after != (load.shared ? shared : global)) return;
    (load.shared ? shown.counts->shared_waits : shown.counts->global_waits)++;
    shared++;
    if (!load.shared) global++;
  }
};

// Where an address lies on the CPU. Accesses by which threads talk (volatile, relaxed, past the first
// cache) are atomic; others give way only while the race checker looks.
template <Space SPACE>
inline unsigned char* reach(uint64_t address, uint32_t bytes, Access kind, const void* site, bool reads, bool writes) {
  if (address % bytes) fail("misaligned access of %u bytes at %#llx, at @%p", bytes,
                            (unsigned long long)address, site);
  bool shared = SPACE == Space::shared;
  if (SPACE == Space::generic && address >> 56 == SHARED_WINDOW >> 56) address -= SHARED_WINDOW, shared = true;
  emulator::Counts& counts = *shown.counts;
  if (!shared) counts.bytes_read += reads * bytes, counts.bytes_written += writes * bytes;
  auto memory = shared ? shared_at(address, bytes, site) : global_at(address, bytes, site);
  if (shown.options.check || kind == Access::atomic) {
    emulator::perhaps_give_way();
    emulator::note_access(memory, bytes, kind, site);
  }
  last_was_shared = shared;  // for `Waits`; nobody gives way before
  return memory;
}

template <class T, int N>
struct Vector {
  T at[N];
};

template <Space SPACE, class T, int N, Access KIND>
__attribute__((noinline)) Vector<T, N> load(uint64_t address) {
  Vector<T, N> value;
  memcpy(&value, reach<SPACE>(address, sizeof value, KIND, __builtin_return_address(0), true, false),
         sizeof value);
  return value;
}

template <Space SPACE, class T, int N, Access KIND>
__attribute__((noinline)) void store(uint64_t address, Vector<T, N> value) {
  constexpr Access kind = KIND == Access::read ? Access::write : KIND;
  memcpy(reach<SPACE>(address, sizeof value, kind, __builtin_return_address(0), false, true), &value,
         sizeof value);
}

template <Space SPACE, class T, class Change>
T atomic(uint64_t address, Change change) {
  unsigned char* memory = reach<SPACE>(address, sizeof(T), Access::atomic, __builtin_return_address(0), true, true);
  T old, changed;
  memcpy(&old, memory, sizeof old);
  changed = change(old);
  memcpy(memory, &changed, sizeof changed);
  return old;
}

inline void copy_async(uint64_t to, uint64_t from, uint32_t bytes) {
  const void* site = __builtin_return_address(0);
  if (to % bytes || from % bytes) fail("misaligned asynchronous copy of %u bytes, at @%p", bytes, site);
  shown.counts->bytes_read += bytes;  // whoever waits for it waits at a barrier
  emulator::async_copy(shared_at(to, bytes, site), global_at(from, bytes, site), bytes, site);
}
inline void wait_for_copies(uint32_t groups_left) {
  emulator::async_wait(groups_left, __builtin_return_address(0));
}

inline void count(bool in_fp64) {
  shown.counts->instructions++;
  shown.counts->doubles += in_fp64;
}

inline uint64_t generic_to_shared(uint64_t address) {
  if (address >> 56 != SHARED_WINDOW >> 56)
    fail("cvta.to.shared of %#llx, which is no address of shared memory", (unsigned long long)address);
  return address - SHARED_WINDOW;
}

// Parameters of a kernel or function, or its result.
template <int BYTES>
struct alignas(8) Parameter {
  unsigned char at[BYTES];
};

template <class T, int N, int BYTES>
Vector<T, N> load_parameter(const Parameter<BYTES>& parameter, uint64_t offset) {
  Vector<T, N> value;
  if (offset % sizeof value || offset + sizeof value > BYTES)
    fail("ld.param of %zu bytes at %lld of %d bytes of parameters", sizeof value, (long long)offset, BYTES);
  memcpy(&value, parameter.at + offset, sizeof value);
  return value;
}

template <class T, int N, int BYTES>
void store_parameter(Parameter<BYTES>& parameter, uint64_t offset, Vector<T, N> value) {
  if (offset % sizeof value || offset + sizeof value > BYTES)
    fail("st.param of %zu bytes at %lld of %d bytes of parameters", sizeof value, (long long)offset, BYTES);
  memcpy(parameter.at + offset, &value, sizeof value);
}

// ----------------------------------------------------------------------------------------- integers

template <class T>
T divided(T a, T b) {
  if (b == 0) return T(-1);  // whatever a GPU's bits may be, it doesn't stop
  return std::is_signed_v<T> && b == T(-1) ? T(0 - std::make_unsigned_t<T>(a)) : T(a / b);
}
template <class T>
T remainder_of(T a, T b) {
  if (b == 0) return a;
  return std::is_signed_v<T> && b == T(-1) ? T(0) : T(a % b);
}

template <class T>
T shifted_left(T a, uint32_t bits) {
  return bits < 8 * sizeof(T) ? T(a << bits) : T(0);
}
template <class T>
T shifted_right(T a, uint32_t bits) {
  if (bits < 8 * sizeof(T)) return T(a >> bits);
  return std::is_signed_v<T> && a < 0 ? T(-1) : T(0);
}

template <class T>
T field_inserted(T field, T into, uint32_t position, uint32_t bits) {
  T mask = T(shifted_left(T(1), bits & 255) - 1);
  mask = shifted_left(mask, position & 255);
  return T((into & ~mask) | (shifted_left(field, position & 255) & mask));
}

inline uint32_t reversed(uint32_t bits) {
  uint32_t result = 0;
  for (int i = 0; i < 32; i++) result |= (bits >> i & 1) << (31 - i);
  return result;
}

// ------------------------------------------------------------------------------------ floating point

// Of a number and a NaN, the number; +0 is more than -0.
template <class T>
T minimum(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (a != a || b != b) return a != a ? b : a;
    if (a == b) return signbit(a) ? a : b;
  }
  return b < a ? b : a;
}
template <class T>
T maximum(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (a != a || b != b) return a != a ? b : a;
    if (a == b) return signbit(a) ? b : a;
  }
  return a < b ? b : a;
}

inline float fma_down(float a, float b, float c) {
  int before = fegetround();
  fesetround(FE_DOWNWARD);
  volatile float x = a, y = b, z = c;  // or the compiler computes before or after
  volatile float result = fmaf(x, y, z);
  fesetround(before);
  return result;
}

inline double upper_half(double value) { return as<double>(as<uint64_t>(value) & 0xffffffff00000000); }
inline double approximate_reciprocal(double value) { return upper_half(1 / upper_half(value)); }

inline float flushed(float value) { return fabsf(value) < 0x1p-126f ? copysignf(0, value) : value; }
inline float saturated(float value) { return value > 0 ? (value < 1 ? value : 1) : 0; }

inline int64_t truncated(float value) {
  if (value != value) return INT64_MIN;
  return value >= 0x1p63f ? INT64_MAX : value < -0x1p63f ? INT64_MIN : int64_t(value);
}

// ------------------------------------------------------------------------------ threads among others

enum class Lane { up, bfly, idx };

// `clamp`: the last lane that may be read in its low byte, and above it the bits of a lane's number that
// say to which segment of the warp it belongs. `in_range`: the source was within the segment.
inline uint32_t shuffle(Lane mode, uint32_t value, uint32_t b, uint32_t clamp, uint32_t members,
                        bool* in_range, Place place = Place::here()) {
  uint32_t lane = shown.thread->lane, segment = clamp >> 8 & 31;
  uint32_t first = lane & segment, last = first | (clamp & 31 & ~segment);
  int source = int(mode == Lane::up ? lane - (b & 31) : mode == Lane::bfly ? lane ^ (b & 31)
                                                                         : first | (b & 31 & ~segment));
  *in_range = mode == Lane::up ? source >= int(last) : source <= int(last);
  if (!*in_range) source = int(lane);
  return uint32_t(emulator::meet(members, emulator::Intrinsic::shuffle, value, uint32_t(source), nullptr, place));
}

inline uint32_t ballot(bool vote, uint32_t members, Place place = Place::here()) {
  return uint32_t(emulator::meet(members, emulator::Intrinsic::ballot, vote, 0, nullptr, place));
}

inline void barrier_of_warp(uint32_t members, Place place = Place::here()) {
  emulator::meet(members, emulator::Intrinsic::sync, 0, 0, nullptr, place);
}

inline uint32_t barrier(emulator::Vote vote, bool predicate, Place place = Place::here()) {
  return emulator::barrier(place, vote, predicate);
}

}  // namespace ptx

// The one function that kernels call and NVRTC does not compile.
inline void cudaGraphSetConditional(const ptx::Parameter<8>& handle, const ptx::Parameter<4>& value) {
  emulator::set_condition(ptx::load_parameter<uint64_t, 1>(handle, 0).at[0],
                          ptx::load_parameter<uint32_t, 1>(value, 0).at[0]);
}
