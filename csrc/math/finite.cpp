#include "math/finite.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>

#include "threads/pool.h"

namespace karvan {
namespace {

constexpr size_t kFloatsPerTask = 1 << 16;

bool finite(const float* data, size_t count) {
  constexpr uint32_t exponent = 0x7f800000;
  uint32_t bad = 0;
  for (size_t i = 0; i < count; ++i) bad |= (std::bit_cast<uint32_t>(data[i]) & exponent) == exponent;
  return bad == 0;
}

}  // namespace

bool all_finite(const std::vector<Floats>& arrays) {
  std::vector<Floats> parts;
  for (const Floats& all : arrays)
    for (size_t i = 0; i < all.count; i += kFloatsPerTask)
      parts.push_back({all.data + i, std::min(kFloatsPerTask, all.count - i)});
  std::atomic<bool> found{true};
  parallel(static_cast<uint32_t>(parts.size()), [&](uint32_t task) {
    if (!finite(parts[task].data, parts[task].count)) found.store(false, std::memory_order_relaxed);
  });
  return found.load();
}

}  // namespace karvan
