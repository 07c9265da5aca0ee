// Rows of one table: fixed-size records in chunks that never move. Row 0 is the zero row: it represents every key that
// has no row, is never written, and makes lookups free of branches.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "memory/pages.h"

namespace karvan {

// How to get from a row's number to its address; cheap to copy into kernels.
struct RowsView {
  char* const* chunks;
  uint32_t shift, mask, stride;
  char* at(uint32_t row) const { return chunks[row >> shift] + static_cast<size_t>(row & mask) * stride; }
};

class RowArena {
 public:
  explicit RowArena(uint32_t stride);

  RowsView view() const { return {directory(), shift_, (1u << shift_) - 1, stride_}; }
  uint32_t stride() const { return stride_; }
  uint32_t taken() const { return next_.load(std::memory_order_relaxed); }  // rows handed out, row 0 included
  size_t bytes() const;

  // Hands out `count` consecutive fresh rows, zeroed; returns the first. Threads may call it at the same time.
  uint32_t take(uint32_t count);

  // Makes the system clear the next 2 MiB page before it is needed, when what has been taken is `phase` of a page (0 to
  // 1) before it. That takes a while, and many arenas that fill at the same pace shall not ask for it at the same time.
  void touch_ahead(double phase);

 private:
  void make_chunks(uint32_t count);
  char** directory() const { return reinterpret_cast<char**>(directory_.data()); }

  uint32_t stride_, shift_;
  std::atomic<uint32_t> next_{0};
  std::atomic<uint32_t> ready_{0};  // chunks that exist
  std::mutex growing_;
  std::vector<Pages> chunks_;
  size_t touched_ = 0;              // bytes up to which touch_ahead has come
  Pages directory_;  // one pointer for each chunk that could ever exist; pages of it appear as they are touched
};

}  // namespace karvan
