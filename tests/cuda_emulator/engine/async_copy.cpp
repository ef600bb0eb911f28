// cp.async: copies are noted when asked for and done when waited for.
#include <string.h>

#include "engine_internal.h"

namespace emulator {

void async_copy(void* to, const void* from, uint32_t bytes, const void* site) {
  if ((bytes != 4 && bytes != 8 && bytes != 16) || uint64_t(to) % bytes || uint64_t(from) % bytes)
    fail("asynchronous copy of %u bytes from %p to %p: 4, 8 or 16 aligned bytes are allowed (at @%p)",
         bytes, from, to, site);
  Fiber* fiber = state.running;
  // The GPU may write from now on; the checker looks at both ends of that span (no-op without it).
  note_access(to, bytes, Access::write, site);
  fiber->copies.push_back({to, from, bytes, fiber->copy_group});
}

void async_commit() { state.running->copy_group++; }

void async_wait(uint32_t groups_left, const void* site) {
  Fiber* fiber = state.running;
  perhaps_give_way();
  std::vector<AsyncCopy> later;
  for (const AsyncCopy& copy : fiber->copies) {
    if (copy.group + groups_left >= fiber->copy_group) {
      later.push_back(copy);
      continue;
    }
    note_access(copy.from, copy.bytes, Access::read, site);
    note_access(copy.to, copy.bytes, Access::write, site);
    memcpy(copy.to, copy.from, copy.bytes);
  }
  fiber->copies.swap(later);
}

}  // namespace emulator
