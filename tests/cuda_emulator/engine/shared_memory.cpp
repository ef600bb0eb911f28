// Shared memory is the thread-local segment of the kernel's module: static __shared__ variables and the
// dynamic array. There is one such segment (one OS thread), so a block's contents are copied out when
// another block runs: of the large dynamic array only what the launch asked for.
#include <link.h>
#include <string.h>

#include "engine_internal.h"

namespace emulator {
namespace {

AddressRange segment;
std::vector<AddressRange> module_data;
Block* swapped_in = nullptr;

char* dynamic_begin() { return (char*)state.kernel.shared; }
char* dynamic_end() { return dynamic_begin() + SHARED_BYTES_MAX; }

int note_segments(dl_phdr_info* info, size_t, void*) {
  auto address = (char*)&state;
  std::vector<AddressRange> loaded;
  bool ours = false;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const auto& header = info->dlpi_phdr[i];
    auto begin = (char*)(info->dlpi_addr + header.p_vaddr);
    if (header.p_type == PT_LOAD) loaded.push_back({begin, begin + header.p_memsz});
    if (header.p_type == PT_LOAD && loaded.back().holds(address, 1)) ours = true;
  }
  if (!ours) return 0;
  module_data = loaded;
  for (int i = 0; i < info->dlpi_phnum; i++)
    if (info->dlpi_phdr[i].p_type == PT_TLS) {
      auto begin = (char*)info->dlpi_tls_data;
      segment = {begin, begin + info->dlpi_phdr[i].p_memsz};
    }
  return 1;
}

enum class Direction { out, in };

void copy_image(Block& block, Direction direction) {
  struct {
    char* memory;
    size_t bytes;
  } parts[] = {
      {segment.begin, size_t(dynamic_begin() - segment.begin)},
      {dynamic_begin(), shown.options.dynamic_bytes},
      {dynamic_end(), size_t(segment.end - dynamic_end())},
  };
  char* image = block.shared_image.data();
  for (auto& part : parts) {
    if (direction == Direction::out)
      memcpy(image, part.memory, part.bytes);
    else
      memcpy(part.memory, image, part.bytes);
    image += part.bytes;
  }
}

}  // namespace

AddressRange shared_memory() { return segment; }

// Instructions that name the global memory find nothing else by an address: a GPU faults, or worse.
void need_global(const void* address, const char* what) {
  if (segment.holds((const char*)address, 1)) fail("%s of shared memory, which it cannot reach", what);
}

bool is_module_data(const char* address, size_t bytes) {
  for (const AddressRange& range : module_data)
    if (range.holds(address, bytes)) return true;
  return false;
}

void find_module_memory() {
  *(volatile unsigned char*)state.kernel.shared = 0;  // the loader allocates the segment at first use
  dl_iterate_phdr(note_segments, nullptr);
}

size_t shared_image_bytes() {
  return size_t(segment.end - segment.begin) - SHARED_BYTES_MAX + shown.options.dynamic_bytes;
}

// A new block finds garbage, and another kind with another seed: -1 and NaN, or large negative numbers.
void poison(Block& block) {
  block.shared_image.assign(shared_image_bytes(), shown.options.seed % 2 ? '\xCD' : '\xFF');
}

void swap_in(Block* block) {
  if (swapped_in == block) return;
  if (swapped_in) copy_image(*swapped_in, Direction::out);
  copy_image(*block, Direction::in);
  swapped_in = block;
}

void forget_swapped_in() { swapped_in = nullptr; }

}  // namespace emulator
