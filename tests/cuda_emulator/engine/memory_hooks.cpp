// g++ -fsanitize=thread puts a call before every memory access. We compile kernels with it, but link
// these functions and not ThreadSanitizer's: they let other threads run and ask the race checker.
#include "engine_internal.h"

namespace {

void visit(const void* address, size_t bytes, emulator::Access kind, const void* site) {
  if (!emulator::shown.thread) return;  // the host's side of the module
  emulator::perhaps_give_way();
  emulator::note_access(address, bytes, kind, site);
}

}  // namespace

// A volatile access is how threads talk without a barrier: it counts as atomic.
#define HOOK(name, bytes, kind)                                                 \
  extern "C" void __tsan_##name##bytes(void* address) {                         \
    visit(address, bytes, emulator::Access::kind, __builtin_return_address(0)); \
  }
#define HOOKS(bytes)                           \
  HOOK(read, bytes, read)                      \
  HOOK(write, bytes, write)                    \
  HOOK(unaligned_read, bytes, read)            \
  HOOK(unaligned_write, bytes, write)          \
  HOOK(volatile_read, bytes, atomic)           \
  HOOK(volatile_write, bytes, atomic)          \
  HOOK(unaligned_volatile_read, bytes, atomic) \
  HOOK(unaligned_volatile_write, bytes, atomic)
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

extern "C" {
void __tsan_read_range(void* address, size_t bytes) {
  visit(address, bytes, emulator::Access::read, __builtin_return_address(0));
}
void __tsan_write_range(void* address, size_t bytes) {
  visit(address, bytes, emulator::Access::write, __builtin_return_address(0));
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
}
