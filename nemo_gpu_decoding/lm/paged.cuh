// n-gram LMs whose arcs may lie in the host's memory, read over the bus through a cache in the device's.
//
// The counterparts on the host are lm/packed.py, for what a look-up gives, and lm/on_device.py, for where the
// arrays are. Arcs never change, so the cache has nothing to do but to remember, and it may forget:
//
//   slot     arc % cache_slots: neighbouring arcs never drive each other out
//   content  two words of 64 bits; each has half of an arc's bits and the number of that arc
//   hit      both words have the number of the arc that is asked for
//   miss     the arc is read over the bus and put into the slot, whatever was there
//
// One arc per slot, and not a line of neighbours, although a read fetches some: a look-up reads one arc
// of a state, and only every second neighbour is ever asked for. Measured on the searches of a batch, with
// a cache that holds 3 of 100 arcs: 77 % hits; 74 % if neighbours are put into the cache as well, which
// pays only where it holds a tenth of the arcs or more.
//
// All blocks of all kernels on a device share the cache without locks, and get right answers in any
// case. A word is written and read as a whole (aligned accesses of 64 bits never tear, and they are
// relaxed atomics here, so it is no race that several threads make them at once). Whoever writes a
// word with the number of an arc writes the half that belongs to this arc, and no other half ever
// existed. So a word with the right number is right, however it came there; two words of different
// arcs, from two threads that wrote the slot at once, are a miss. Zeros are the words of no arc. The
// answer thus depends neither on the cache's size nor on who wrote when, only the counts below do.
#pragma once

#include "lm/packed.cuh"

struct PagedLM {  // on_device.DeviceLM
  PackedLM packed;  // its arcs in the host's memory, if there is a cache
  CachedArc* cache;  // [cache_slots], zeros at first; or null: the arcs are read where they lie
  uint32 cache_slots;
};

// What the look-ups of one thread did. They are 0 without a cache.
struct LookupCounters {  // on_device.COUNTERS
  uint32 hits;  // arcs that were in the cache
  uint32 misses;  // arcs that were read over the bus
  uint32 sectors;  // of 32 bytes that these reads touched: what crosses the bus for them
};

namespace paging {

constexpr int WORDS_PER_SECTOR = 4;

// Relaxed on the scope of the device, so past the L1 cache, which other multiprocessors don't see. The
// two words may be of two writers.
inline CachedArc read_slot(const CachedArc* slot) {
  CachedArc found;
#if defined(__CUDA_EMULATOR__)
  found.low = *(const volatile uint64*)&slot->low;
  found.high = *(const volatile uint64*)&slot->high;
#else
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(found.low), "=l"(found.high)
               : "l"(slot));
#endif
  return found;
}

inline void write_slot(CachedArc* slot, CachedArc content) {
#if defined(__CUDA_EMULATOR__)
  *(volatile uint64*)&slot->low = content.low;
  *(volatile uint64*)&slot->high = content.high;
#else
  asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(slot), "l"(content.low),
               "l"(content.high)
               : "memory");
#endif
}

inline uint32 number_in(uint64 word) { return uint32(word >> 32); }

// How many sectors `read_bits` touches: it reads two neighbouring words.
inline uint32 sectors_of(int bits, int64 arc) {
  return (arc * bits >> 6) % WORDS_PER_SECTOR == WORDS_PER_SECTOR - 1 ? 2 : 1;
}

// The bits of an arc, out of the cache if they are there; else they are there afterwards.
inline uint64 cached_bits(const PagedLM& lm, int64 arc, LookupCounters& counters) {
  const uint32 number = uint32(arc) + 1;  // PackedLM counts arcs in 32 bits, so it never wraps to 0
  CachedArc* slot = lm.cache + uint32(arc) % lm.cache_slots;
  const CachedArc found = read_slot(slot);
  if (number_in(found.low) == number && number_in(found.high) == number) {
    counters.hits++;
    return found.high << 32 | uint32(found.low);
  }
  const uint64 bits = arc_bits(lm.packed, arc);
  const uint64 tag = uint64(number) << 32;
  write_slot(slot, {tag | uint32(bits), tag | bits >> 32});
  counters.misses++;
  counters.sectors += sectors_of(lm.packed.target_bits + lm.packed.cost_bits, arc);
  return bits;
}

}  // namespace paging

// Cost of `label`, 0 .. V - 1, after `state`, back-offs included, and the state after it. Any thread.
inline LMStep lookup(const PagedLM& lm, int64 state, int64 label, LookupCounters& counters) {
  if (lm.cache == nullptr) return lookup(lm.packed, state, label);
  return lookup_by(lm.packed, state, label,
                   [&](int64 arc) { return paging::cached_bits(lm, arc, counters); });
}

// Add the counters of a warp to totals [3], in the order of LookupCounters. All 32 lanes call it.
inline void warp_add(const LookupCounters& own, uint64* totals) {
  const uint64 hits = warp_reduce(uint64(own.hits), Sum());
  const uint64 misses = warp_reduce(uint64(own.misses), Sum());
  const uint64 sectors = warp_reduce(uint64(own.sectors), Sum());
  if (lane() != 0) return;
  atomicAdd(&totals[0], hits);
  atomicAdd(&totals[1], misses);
  atomicAdd(&totals[2], sectors);
}
