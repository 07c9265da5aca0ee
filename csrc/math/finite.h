// Are there infinities or NaNs among the gradients of a dense net?
#pragma once
#include <cstddef>
#include <vector>

namespace karvan {

struct Floats {
  const float* data;
  size_t count;
};

bool all_finite(const std::vector<Floats>& arrays);  // the caller holds an Exclusive

}  // namespace karvan
