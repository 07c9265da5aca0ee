// A table's settings, which do not change after its first row, and the layout of a row.
#pragma once
#include <cstdint>
#include <string>

#include "table/init.h"

namespace karvan {

enum class VectorType : uint8_t { f32, bf16, f16 };

constexpr uint32_t element_bytes(VectorType type) { return type == VectorType::f32 ? 4 : 2; }

// [vector | pad to 4 bytes | optimizer state, fp32], the whole rounded up to 16 bytes.
struct RowLayout {
  VectorType type = VectorType::f32;
  uint32_t dim = 0;
  uint32_t state = 0;  // floats of optimizer state
  constexpr uint32_t vector_bytes() const { return (dim * element_bytes(type) + 3) / 4 * 4; }
  constexpr uint32_t stride() const { return (vector_bytes() + 4 * state + 15) / 16 * 16; }
  bool operator==(const RowLayout&) const = default;
};

struct Admission {
  // probability: the key decides, once for all; probability_each: key and step do, so a key is drawn again at each miss.
  enum class Kind : uint8_t { always, probability, probability_each, min_count, read_only };
  Kind kind = Kind::always;
  double probability = 1.0;
  uint32_t min_count = 1;
  uint64_t slots = 0;  // counters of the filter
};

struct Eviction {
  enum class Kind : uint8_t { never, lru, lfu, age, ttl, norm };
  Kind kind = Kind::never;
  uint64_t capacity = 0;  // lru, lfu: rows
  uint64_t steps = 0;     // age
  double seconds = 0;     // ttl
  float below = 0;        // norm
  uint64_t every = 1;     // age, ttl, norm: steps between two looks
};

struct TableConfig {
  std::string name;
  uint32_t dim = 0;
  VectorType type = VectorType::f32;
  Initialiser init{};
  uint64_t seed = 0;
  Admission admit;
  Eviction evict;
  uint32_t shards = 16;  // a power of two, at most 256
};

}  // namespace karvan
