// Around the steps of a search: its frames and first schedule, and moving rows of the networks' tensors about.
#include "search/transducer/schedule.cuh"

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

// The frames of utterance b that are still needed, and its new ones after them. Every thread moves the same bytes of
// all rows, so that no thread reads what another one writes.
template <class T>
inline void take_frames(const ScheduleArgs& args, int b) {
  const StreamParams& stream = args.streams[b];
  const int64 first = (int64)b * args.columns;
  for (int t = 0; t < stream.kept && stream.kept_from > 0; t++) {
    move_row<T>(args.frame_store, first + stream.kept_from + t, args.frame_store, first + t, args.frame_bytes);
  }
  for (int t = 0; t < stream.new_count; t++) {
    move_row<T>(args.new_frames, stream.new_row + t, args.frame_store, first + stream.kept + t, args.frame_bytes);
  }
}

// For every utterance b = blockIdx.x: take its frames, and choose the frame that each hypothesis reads first.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1) schedule(const ScheduleArgs args) {
  const int b = blockIdx.x;
  StreamCounters now = args.counters[b];
  __syncthreads();  // before the record is written
  if (args.sum != nullptr && !(fabs(*args.sum) < 1e308)) {
    now.size = 0;  // so that no hypothesis reads a frame
    schedule_next(args, b, nullptr, now);
    if (thread() == 0) args.counters[b].activity = REFUSED;
    return;
  }
  uint64 alignment = (uint64)args.new_frames | (uint64)args.frame_store | (uint64)args.frame_bytes;
  if (alignment % 16 == 0) take_frames<Words>(args, b);
  else if (alignment % 4 == 0) take_frames<uint32>(args, b);
  else take_frames<uint8>(args, b);
  schedule_next(args, b, args.beams + (int64)b * args.beam_size, now);
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
