// Around the steps of a search: its first schedule, and moving rows of the networks' tensors about.
#include "search/transducer/schedule.cuh"

// Choose, for every utterance b = blockIdx.x, the frame that each hypothesis reads first.
extern "C" __global__ void __launch_bounds__(MAX_THREADS) schedule(const ScheduleArgs args) {
  const int b = blockIdx.x;
  const StreamCounters now = args.counters[b];
  __syncthreads();  // before the record is written
  schedule_next(args, b, args.beams + (int64)b * args.beam_size, now);
}

// Count the active utterances, for a host or a WHILE node that waits for the end.
extern "C" __global__ void __launch_bounds__(MAX_THREADS) count_active(const CountActiveArgs args) {
  int own = 0;
  for (int b = thread(); b < args.num_utterances; b += threads()) {
    own += has_step(args.counters[b].activity);
  }
  __shared__ int scratch[LANES];
  int total = block_reduce(own, Sum{}, scratch);
  if (thread() == 0) *args.active = total;
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

// A tensor of any type whose rows are moved: a matrix of `bytes` per row. Without rows, row r is
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
extern "C" __global__ void __launch_bounds__(MAX_THREADS) move_rows(const MoveRowsArgs args) {
  const int r = blockIdx.x;
  Part{args.from0, args.from_rows0, args.to0, args.to_rows0, args.bytes0}.move(r);
  Part{args.from1, args.from_rows1, args.to1, args.to_rows1, args.bytes1}.move(r);
  Part{args.from2, args.from_rows2, args.to2, args.to_rows2, args.bytes2}.move(r);
  Part{args.from3, args.from_rows3, args.to3, args.to_rows3, args.bytes3}.move(r);
}
