// The log-probs of an utterance, frame by frame: each row is fetched into shared memory while the one
// before it is searched. Rows too large for that are read where they lie, which is slower: every label
// waits for global memory.
#pragma once

#include "cuda/common.cuh"

// The log-probs of one frame, in shared or in global memory.
struct Row {
  const LogProb* values;  // [V + 1]

  float operator[](int column) const { return to_float(values[column]); }
};

class RowReader {
 public:
  // `length` rows of `columns` numbers from `first` on. buffers: shared, two of row_bytes each, at an
  // address that 16 divides; row_bytes 0: rows are not copied. All threads; ends with a barrier.
  RowReader(const LogProb* first, int columns, int64 length, uint8* buffers, int row_bytes)
      : row_(first), columns_(columns), left_(length), buffer_(buffers), row_bytes_(row_bytes) {
    if (row_bytes_ && left_ > 0) {
      fetch_.start(buffer_, row_, columns_);
      row_ = fetch_.finish();
      source_ = first;
    }
    __syncthreads();
  }

  bool any() const { return left_ > 0; }

  // The next row; fetching the one after it begins. Nobody may read the row before it any more.
  Row next() {
    left_--;
    const Row row{row_};
    if (row_bytes_ == 0) {
      row_ += columns_;
    } else if (left_ > 0) {
      source_ += columns_;
      parity_ ^= 1;
      fetch_.start(buffer_ + parity_ * row_bytes_, source_, columns_);
    }
    return row;
  }

  // Until the next row is there; a barrier must follow.
  void wait() {
    if (row_bytes_ && left_ > 0) row_ = fetch_.finish();
  }

 private:
  RowFetch<LogProb> fetch_;
  const LogProb* row_;  // the next row to be read
  const LogProb* source_ = nullptr;  // in global memory, the last row that was fetched
  int columns_;
  int64 left_;  // rows not read yet
  uint8* buffer_;
  int row_bytes_;
  int parity_ = 0;
};
