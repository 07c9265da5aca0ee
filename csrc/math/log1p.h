// log(1 + x) of many floats: within 2 units in the last place, exact in the limits. A result depends on its value alone,
// but its last bit may differ between machines with and without fused multiply-adds.
#pragma once
#include <cstddef>
#include <limits>

namespace karvan {

struct Limits {
  float low = -std::numeric_limits<float>::infinity(), high = std::numeric_limits<float>::infinity();
};

// Values outside of the limits are moved to the nearest one first.
void log1p(const float* values, size_t count, float* out, Limits limits = {});

}  // namespace karvan
