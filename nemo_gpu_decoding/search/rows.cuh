// The log-probs of an utterance, frame by frame. If shared memory has room for two rows, each row is fetched while the
// one before it is searched; if it has room for one, between two frames. Larger rows are read where they lie, which is
// slower: every label waits for global memory.
#pragma once

#include "cuda/common.cuh"

// The log-probs of one frame, in shared or in global memory.
struct Row {
  const LogProb* values;  // [V + 1]

  float operator[](int column) const { return to_float(values[column]); }
};

class RowReader {
 public:
  // `length` rows of `columns` numbers from `first` on. buffers: shared, `shared_rows` (0, 1 or 2) of
  // RowFetch::buffer_bytes each, at an address that 16 divides. All threads; ends with a barrier.
  RowReader(const LogProb* first, int columns, int64 length, uint8* buffers, int shared_rows)
      : row_(first), columns_(columns), left_(length), buffer_(buffers), shared_rows_(shared_rows) {
    if (shared_rows_ && left_ > 0) {
      fetch_.start(buffer_, row_, columns_);
      row_ = fetch_.finish();
      source_ = first;
    }
    __syncthreads();
  }

  bool any() const { return left_ > 0; }

  // The next row; with two rows in shared memory, fetching the one after it begins. No thread may still read the row
  // before it.
  Row next() {
    left_--;
    const Row row{row_};
    source_ += columns_;
    if (shared_rows_ == 0) {
      row_ += columns_;
    } else if (shared_rows_ == 2 && left_ > 0) {
      parity_ ^= 1;
      fetch_.start(buffer_ + parity_ * RowFetch<LogProb>::buffer_bytes(columns_), source_, columns_);
    }
    return row;
  }

  // Until the next row is there; a barrier must follow.
  void wait() {
    if (shared_rows_ == 0 || left_ == 0) return;
    if (shared_rows_ == 1) {
      __syncthreads();  // no thread reads the row any more
      fetch_.start(buffer_, source_, columns_);
    }
    row_ = fetch_.finish();
  }

 private:
  RowFetch<LogProb> fetch_;
  const LogProb* row_;  // the next row to be read
  const LogProb* source_ = nullptr;  // in global memory, the last row that was fetched
  int columns_;
  int64 left_;  // rows not read yet
  uint8* buffer_;
  int shared_rows_;
  int parity_ = 0;
};
