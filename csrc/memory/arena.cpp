#include "memory/arena.h"

#include <algorithm>
#include <bit>
#include <stdexcept>

namespace karvan {
namespace {

constexpr size_t kChunkBytes = size_t{32} << 20;
constexpr size_t kWorthTouching = 4 * kHugePage;  // in smaller arenas, of which there may be many, a page is much memory

}  // namespace

RowArena::RowArena(uint32_t stride) : stride_(stride) {
  shift_ = std::bit_width(std::max<size_t>(1, kChunkBytes / stride)) - 1;
  directory_ = Pages((size_t{1} << (32 - shift_)) * sizeof(char*), true);
  take(1);
}

size_t RowArena::bytes() const { return static_cast<size_t>(taken()) * stride_; }

uint32_t RowArena::take(uint32_t count) {
  const uint32_t first = next_.fetch_add(count, std::memory_order_relaxed);
  if (first > UINT32_MAX - count) {
    next_.fetch_sub(count, std::memory_order_relaxed);
    throw std::length_error("a table holds at most 2^32 rows in one process");
  }
  make_chunks(((first + count - 1) >> shift_) + 1);
  return first;
}

void RowArena::make_chunks(uint32_t count) {
  if (ready_.load(std::memory_order_acquire) >= count) return;
  std::lock_guard guard(growing_);
  while (ready_.load(std::memory_order_relaxed) < count) {
    const uint32_t index = ready_.load(std::memory_order_relaxed);
    chunks_.emplace_back(static_cast<size_t>(stride_) << shift_, index == 0);
    directory()[index] = chunks_.back().data();
    ready_.store(index + 1, std::memory_order_release);
  }
}

void RowArena::touch_ahead(double phase) {
  const size_t chunk_bytes = static_cast<size_t>(stride_) << shift_;
  const size_t used = bytes(), ahead = used + static_cast<size_t>(phase * kHugePage);
  const size_t chunk = ahead / chunk_bytes, page = ahead % chunk_bytes / kHugePage * kHugePage;
  const size_t place = chunk * chunk_bytes + page;
  if (used < kWorthTouching || place < used || place <= touched_ || chunk >> (32 - shift_)) return;
  make_chunks(static_cast<uint32_t>(chunk) + 1);
  touched_ = place;
  static_cast<volatile char*>(directory()[chunk])[page] = 0;  // nobody has the row yet, and it is zero
}

}  // namespace karvan
