// Around the steps of a search: its first plan, and moving rows of the networks' tensors about.
#ifndef HYPOTHESIS_BYTES
#define HYPOTHESIS_BYTES 56
#endif

#include "search/transducer/utterance.cuh"

constexpr int MAX_THREADS = 256;

// Decide, for every utterance b = blockIdx.x, who reads which frame first.
extern "C" __global__ void __launch_bounds__(MAX_THREADS) begin(
  const Utterance* utterances,  // [B]
  Hypothesis* beams,  // [B, K]
  Progress* progress,  // [B]
  int64* frame_rows, int64* text_rows,  // [B, K]
  int beam_size, int entries, int room
) {
  const int b = blockIdx.x;
  const Options options{beam_size, 0, 1, 0, 0, 0, 0, 0};
  const Batch batch{utterances, beams, progress, frame_rows, text_rows};
  const Progress now = progress[b];
  __syncthreads();  // before the record is written
  plan(batch, b, beams + (int64)b * beam_size, now, options, entries, room);
}

// Add up who is still going, for a host or a WHILE node that waits for the end.
extern "C" __global__ void __launch_bounds__(MAX_THREADS) count_going(
  const Progress* progress,  // [B]
  int* going,  // [1]
  int num_utterances
) {
  int own = 0;
  for (int b = thread(); b < num_utterances; b += threads()) own += progress[b].activity == GOING;
  __shared__ int scratch[LANES];
  int total = block_reduce(own, Sum{}, scratch);
  if (thread() == 0) *going = total;
}

struct __align__(16) Words {
  uint64 low, high;
};

// A row of one part, in pieces of type T.
template <class T>
inline void move_row(const uint8* from, int64 from_row, uint8* to, int64 to_row, int bytes) {
  const T* source = (const T*)(from + from_row * bytes);
  T* target = (T*)(to + to_row * bytes);
  for (int i = thread(); i < bytes / (int)sizeof(T); i += threads()) target[i] = source[i];
}

// What tensors of any type are moved by: a part is a matrix of `bytes` per row. Without rows, row r is
// number r itself; where a row is below 0, nothing is moved.
struct Part {
  const uint8* from;
  const int64* from_rows;
  uint8* to;
  const int64* to_rows;
  int bytes;

  void move(int r) const {
    if (from == nullptr) return;
    int64 source = from_rows ? from_rows[r] : r, target = to_rows ? to_rows[r] : r;
    if (source < 0 || target < 0) return;
    uint64 alignment = (uint64)from | (uint64)to | (uint64)bytes;
    if (alignment % 16 == 0) move_row<Words>(from, source, to, target, bytes);
    else if (alignment % 4 == 0) move_row<uint32>(from, source, to, target, bytes);
    else move_row<uint8>(from, source, to, target, bytes);
  }
};

// Move row r = blockIdx.x of up to four parts: states and predictions of hypotheses, and frames.
extern "C" __global__ void __launch_bounds__(MAX_THREADS) move_rows(
  const uint8* from0, const int64* from_rows0, uint8* to0, const int64* to_rows0,
  const uint8* from1, const int64* from_rows1, uint8* to1, const int64* to_rows1,
  const uint8* from2, const int64* from_rows2, uint8* to2, const int64* to_rows2,
  const uint8* from3, const int64* from_rows3, uint8* to3, const int64* to_rows3,
  int bytes0, int bytes1, int bytes2, int bytes3
) {
  const int r = blockIdx.x;
  Part{from0, from_rows0, to0, to_rows0, bytes0}.move(r);
  Part{from1, from_rows1, to1, to_rows1, bytes1}.move(r);
  Part{from2, from_rows2, to2, to_rows2, bytes2}.move(r);
  Part{from3, from_rows3, to3, to_rows3, bytes3}.move(r);
}
