// Arrays of the core as numpy arrays: the memory moves, nothing is copied.
#pragma once
#include <nanobind/ndarray.h>

#include <initializer_list>
#include <utility>

#include "memory/buffer.h"

namespace karvan::bindings {

template <class To, class From>
auto to_numpy(Array<From>&& array, std::initializer_list<size_t> shape) {
  static_assert(sizeof(To) == sizeof(From));
  auto* owned = new Array<From>(std::move(array));
  nanobind::capsule owner(owned, [](void* p) noexcept { delete static_cast<Array<From>*>(p); });
  static From nothing{};
  void* data = owned->size() ? static_cast<void*>(owned->data()) : &nothing;
  return nanobind::ndarray<nanobind::numpy, To>(static_cast<To*>(data), shape, owner);
}

}  // namespace karvan::bindings
