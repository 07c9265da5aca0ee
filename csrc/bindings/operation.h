// How bindings run a batch operation.
#pragma once
#include <nanobind/nanobind.h>

#include "threads/pool.h"

namespace karvan::bindings {

// A batch operation: the interpreter continues meanwhile, and no other operation runs.
template <class F>
auto operation(F&& f) {
  nanobind::gil_scoped_release release;
  Exclusive exclusive;
  return f();
}

}  // namespace karvan::bindings
