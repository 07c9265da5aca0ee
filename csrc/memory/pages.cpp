#include "memory/pages.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <new>

namespace karvan {
namespace {

// What the system is asked for: whole pages of 2 MiB for all who need more than one, so that the last one is huge too.
size_t mapped(size_t bytes) { return bytes < kHugePage ? bytes : (bytes + kHugePage - 1) / kHugePage * kHugePage; }

}  // namespace

Pages::Pages(size_t bytes, bool small_head) {
  if (bytes == 0) return;
  const size_t wanted = mapped(bytes), slack = bytes < kHugePage ? 0 : kHugePage;
  void* const map = mmap(nullptr, wanted + slack, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) throw std::bad_alloc();
  size_ = bytes;
  data_ = static_cast<char*>(map);
  if (slack == 0) return;
  const size_t before = (kHugePage - reinterpret_cast<uintptr_t>(map) % kHugePage) % kHugePage;
  if (before) munmap(data_, before);
  data_ += before;
  munmap(data_ + wanted, slack - before);
#ifdef MADV_HUGEPAGE
  const size_t head = small_head ? kHugePage : 0;
  // A system without huge pages refuses the advice; small pages serve as well, only slower.
  if (wanted > head) madvise(data_ + head, wanted - head, MADV_HUGEPAGE);
#endif
}

void Pages::grow(size_t bytes) {
  if (bytes <= size_) return;
  Pages larger(bytes);
  if (data_) {
#ifdef MREMAP_FIXED
    const size_t held = mapped(size_);
    if (mremap(data_, held, held, MREMAP_MAYMOVE | MREMAP_FIXED, larger.data_) == MAP_FAILED) throw std::bad_alloc();
    data_ = nullptr;
#else
    std::memcpy(larger.data_, data_, size_);
#endif
  }
  swap(larger);
}

Pages::~Pages() {
  if (data_) munmap(data_, mapped(size_));
}

}  // namespace karvan
