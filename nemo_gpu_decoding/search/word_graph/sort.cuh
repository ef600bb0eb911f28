// Sorting many short lists at once: a warp for each, or all threads for a long one.
#pragma once

#include "cuda/common.cuh"

constexpr int SORTED_BY_WARP = 64;  // items; a longer list is sorted by the block

struct WarpTeam {
  static int own() { return lane(); }
  static int size() { return LANES; }
  static void synchronize() { __syncwarp(); }
};

struct BlockTeam {
  static int own() { return thread(); }
  static int size() { return threads(); }
  static void synchronize() { __syncthreads(); }
};

// Sort items[0 .. count), global or shared, in place: the network of block_sort in common.cuh. All
// threads of the team call it after a barrier of the team; ends with one.
template <class Team, class T, class Before>
inline void team_sort(T* items, int count, Before before) {
  for (int size = 2; size / 2 < count; size *= 2) {
    for (int stride = size / 2; stride > 0; stride /= 2) {
      const bool mirror = stride == size / 2;
      for (int pair = Team::own();; pair += Team::size()) {
        const int offset = pair & (stride - 1), first = 2 * (pair - offset);
        if (first >= count) break;
        const int high = mirror ? first + size - 1 - offset : first + offset + stride;
        sorting::order_pair(items, first + offset, high, count, before);
      }
      Team::synchronize();
    }
  }
}
