// log(1 + x) of many floats: within 2 units in the last place, exact in the limits, the same bits on every machine.
#pragma once
#include <cstddef>

namespace karvan {

void log1p(const float* values, size_t count, float* out);

}  // namespace karvan
