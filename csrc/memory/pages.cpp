#include "memory/pages.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

namespace karvan {

Pages::Pages(size_t bytes, bool small_head) {
  if (bytes == 0) return;
  const bool huge = bytes >= kHugePage;
  map_size_ = bytes + (huge ? kHugePage : 0);
  map_ = mmap(nullptr, map_size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map_ == MAP_FAILED) {
    map_ = nullptr;
    throw std::bad_alloc();
  }
  size_ = bytes;
  data_ = static_cast<char*>(map_);
  if (huge) {
    const auto start = reinterpret_cast<uintptr_t>(map_);
    data_ += (kHugePage - start % kHugePage) % kHugePage;
#ifdef MADV_HUGEPAGE
    const size_t head = small_head ? kHugePage : 0;
    // A system without huge pages refuses the advice; small pages serve as well, only slower.
    if (bytes > head) madvise(data_ + head, bytes - head, MADV_HUGEPAGE);
#endif
  }
}

void Pages::shrink(size_t bytes) {
  bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  if (bytes >= size_) {
    Pages().swap(*this);
    return;
  }
  size_ = (size_ - bytes + kHugePage - 1) / kHugePage * kHugePage;
  const size_t kept = static_cast<size_t>(data_ - static_cast<char*>(map_)) + size_;
  munmap(static_cast<char*>(map_) + kept, map_size_ - kept);
  map_size_ = kept;
}

Pages::~Pages() {
  if (map_) munmap(map_, map_size_);
}

}  // namespace karvan
