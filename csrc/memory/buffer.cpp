#include "memory/buffer.h"

#include <bit>
#include <map>
#include <mutex>
#include <vector>

namespace karvan {
namespace {

constexpr size_t kKeep = size_t{1} << 30;  // the pool never holds more than this

// Sizes are rounded up to 1, 1.25, 1.5 or 1.75 times a power of two, so that batches of varying size share buffers.
size_t size_class(size_t bytes) {
  if (bytes <= 4096) return 4096;
  const size_t step = std::bit_floor(bytes - 1) / 4;
  return (bytes + step - 1) / step * step;
}

struct FreeBuffers {
  std::mutex mutex;
  std::map<size_t, std::vector<Pages>> by_size;
  size_t bytes = 0;
};

FreeBuffers& free_buffers() {  // never destroyed: tensors may outlive static objects
  static auto* const instance = new FreeBuffers;
  return *instance;
}

}  // namespace

Buffer::Buffer(size_t bytes) {
  if (bytes == 0) return;
  const size_t size = size_class(bytes);
  FreeBuffers& pool = free_buffers();
  {
    std::lock_guard guard(pool.mutex);
    auto found = pool.by_size.find(size);
    if (found != pool.by_size.end() && !found->second.empty()) {
      pages_ = std::move(found->second.back());
      found->second.pop_back();
      pool.bytes -= size;
      return;
    }
  }
  pages_ = Pages(size);
}

Buffer::~Buffer() {
  if (!pages_.data()) return;
  FreeBuffers& pool = free_buffers();
  std::lock_guard guard(pool.mutex);
  if (pool.bytes + pages_.size() > kKeep) return;
  pool.bytes += pages_.size();
  const size_t size = pages_.size();
  pool.by_size[size].push_back(std::move(pages_));
}

void lock_buffers() { free_buffers().mutex.lock(); }

void unlock_buffers() { free_buffers().mutex.unlock(); }

size_t pooled_bytes() {
  std::lock_guard guard(free_buffers().mutex);
  return free_buffers().bytes;
}

void release_pooled_bytes() {
  std::map<size_t, std::vector<Pages>> dropped;
  std::lock_guard guard(free_buffers().mutex);
  dropped.swap(free_buffers().by_size);
  free_buffers().bytes = 0;
}

}  // namespace karvan
