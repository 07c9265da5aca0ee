// Memory straight from the system: zeroed, in 2 MiB pages where the system offers them, returned when dropped.
#pragma once
#include <cstddef>
#include <utility>

namespace karvan {

inline constexpr size_t kHugePage = size_t{2} << 20;

class Pages {
 public:
  Pages() = default;
  // `small_head`: the first 2 MiB stay in small pages, so that a small user costs what it touches.
  explicit Pages(size_t bytes, bool small_head = false);
  Pages(Pages&& other) noexcept { swap(other); }
  Pages& operator=(Pages&& other) noexcept {
    Pages(std::move(other)).swap(*this);
    return *this;
  }
  ~Pages();

  char* data() const { return data_; }
  size_t size() const { return size_; }
  // Enlarges it, with zeroes behind what it holds. The contents get another address, but on Linux are not copied.
  void grow(size_t bytes);
  void swap(Pages& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace karvan
