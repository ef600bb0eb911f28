// n-gram LMs with arcs in host memory, read over the bus through a cache in device memory.
//
// The counterparts on the host are lm/packed.py for look-ups and lm/on_device.py for the arrays. Arcs never
// change, so the cache needs no invalidation:
//
//   slot     arc % cache_slots: neighbouring arcs never evict each other
//   content  two words of 64 bits; each has half of an arc's bits and the number of that arc
//   hit      both words have the number of the requested arc
//   miss     the arc is read over the bus and overwrites the slot
//
// A slot holds one arc instead of a line of neighbours, although a read fetches several. A look-up reads one
// arc of a state, and only every second neighbour is ever used. Measured on the searches of a batch, with a
// cache for 3 of 100 arcs: 77 % hits, and 74 % if neighbours are cached as well. Caching neighbours helps
// only if the cache holds a tenth of the arcs or more.
//
// All blocks of all kernels on a device share the cache without locks. Threads read and write whole words
// as relaxed atomics of 64 bits, so concurrent accesses are no data race. A thread writes the number of an
// arc only together with a half of that arc, and arcs are constant. So a word with the right number always
// has the right half. Two threads may write one slot at the same time; words of different arcs are then a
// miss. Zeros belong to no arc. So the result depends neither on the size of the cache nor on the order
// of writes; only the counters below do.
#pragma once

#include "lm/packed.cuh"

struct PagedLM {  // on_device.DeviceLM
  PackedLM packed;  // its arcs are in host memory if there is a cache
  Global<CachedArc> cache;  // [cache_slots], initially zero; null: arcs are read without a cache
  uint32 cache_slots;
};

// Counters of the look-ups of one thread; 0 without a cache.
struct LookupCounters {  // on_device.COUNTERS
  uint32 hits;  // arcs that were in the cache
  uint32 misses;  // arcs that were read over the bus
  uint32 sectors;  // of 32 bytes that these reads touched, the traffic on the bus
};

namespace paging {

constexpr int WORDS_PER_SECTOR = 4;

// Relaxed at device scope, so it bypasses the L1 cache, which other multiprocessors do not see. The two
// words may come from two writers.
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

// The bits of an arc, from the cache or, after a miss, from host memory; a miss fills the cache.
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
  counters.sectors += sectors_of(lm.packed.target_bits + LM_COST_BITS, arc);
  return bits;
}

}  // namespace paging

// Cost of `label`, 0 .. V - 1, after `state`, including back-offs, and the state after it. Any thread.
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
