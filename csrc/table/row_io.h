// A row's vector to and from floats.
#pragma once
#include <cstring>

#include "kernels/convert.h"
#include "table/layout.h"

namespace karvan {

inline void read_vector(const char* row, const RowLayout& layout, float* out) {
  const auto* halves = reinterpret_cast<const uint16_t*>(row);
  switch (layout.type) {
    case VectorType::f32: std::memcpy(out, row, 4 * layout.dim); break;
    case VectorType::bf16:
      for (uint32_t i = 0; i < layout.dim; ++i) out[i] = bf16_to_float(halves[i]);
      break;
    case VectorType::f16:
      for (uint32_t i = 0; i < layout.dim; ++i) out[i] = f16_to_float(halves[i]);
      break;
  }
}

// Rounds to the nearest; updates round stochastically instead (kernels/apply.inc).
inline void write_vector(char* row, const RowLayout& layout, const float* vector) {
  auto* halves = reinterpret_cast<uint16_t*>(row);
  switch (layout.type) {
    case VectorType::f32: std::memcpy(row, vector, 4 * layout.dim); break;
    case VectorType::bf16:
      for (uint32_t i = 0; i < layout.dim; ++i) halves[i] = nearest_bf16(vector[i]);
      break;
    case VectorType::f16:
      for (uint32_t i = 0; i < layout.dim; ++i) halves[i] = nearest_f16(vector[i]);
      break;
  }
}

}  // namespace karvan
