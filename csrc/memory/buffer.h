// Scratch and output memory that is used every step: buffers go back to a pool instead of to the system, so that a
// step does not pay for page faults again.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>

#include "memory/pages.h"

namespace karvan {

class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes);  // contents undefined
  Buffer(Buffer&& other) noexcept : pages_(std::move(other.pages_)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    pages_.swap(other.pages_);
    return *this;
  }
  ~Buffer();

  char* data() const { return pages_.data(); }
  size_t size() const { return pages_.size(); }

 private:
  Pages pages_;
};

// A typed view of a Buffer for trivial elements.
template <class T>
class Array {
 public:
  Array() = default;
  explicit Array(size_t count) : buffer_(count * sizeof(T)), count_(count) {}
  T* data() const { return reinterpret_cast<T*>(buffer_.data()); }
  size_t size() const { return count_; }
  T& operator[](size_t i) const { return data()[i]; }
  explicit operator bool() const { return count_ != 0; }

 private:
  Buffer buffer_;
  size_t count_ = 0;
};

// Around a fork (see threads/pool.cpp): nobody may be inside the pool of buffers.
void lock_buffers();
void unlock_buffers();

// For tests.
size_t pooled_bytes();        // held by the pool and free to be used again
void release_pooled_bytes();  // gives them back to the system

}  // namespace karvan
