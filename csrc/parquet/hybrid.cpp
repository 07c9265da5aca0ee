#include "parquet/hybrid.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

namespace karvan::parquet {
namespace {

inline uint64_t load(const uint8_t* bytes) {
  uint64_t word;
  std::memcpy(&word, bytes, 8);
  return word;
}

template <class T>
void widen(const uint8_t* in, uint32_t* out) {
  T values[8];
  std::memcpy(values, in, sizeof values);
  for (int i = 0; i < 8; ++i) out[i] = values[i];
}

// Values that one word of eight bytes holds wherever it begins.
constexpr unsigned values_per_word(unsigned width) { return width <= 8 ? 8 : width <= 16 ? 4 : width <= 30 ? 2 : 1; }

// What `unpack_group` may look at; a group of eight values has `width` bytes.
constexpr size_t group_reach(unsigned width) {
  return (8 - values_per_word(width)) * width / 8 + 8;
}

template <unsigned width>
void unpack_group(const uint8_t* in, uint32_t* out) {
  if constexpr (width == 0) {
    for (int i = 0; i < 8; ++i) out[i] = 0;
  } else if constexpr (width == 8) {
    widen<uint8_t>(in, out);
  } else if constexpr (width == 16) {
    widen<uint16_t>(in, out);
  } else if constexpr (width == 32) {
    widen<uint32_t>(in, out);
  } else {
    constexpr unsigned step = values_per_word(width);
    constexpr uint32_t mask = (uint32_t{1} << width) - 1;
    for (unsigned i = 0; i < 8; i += step) {
      const uint64_t word = load(in + i * width / 8) >> i * width % 8;
      for (unsigned j = 0; j < step; ++j) out[i + j] = static_cast<uint32_t>(word >> j * width) & mask;
    }
  }
}

template <unsigned width>
void unpack_groups(const uint8_t* in, size_t size, size_t groups, uint32_t* out) {
  const size_t inside = size < group_reach(width) ? 0 : (size - group_reach(width)) / std::max(width, 1u) + 1;
  const size_t safe = std::min(groups, inside);
  for (size_t i = 0; i < safe; ++i, in += width, out += 8) unpack_group<width>(in, out);
  uint8_t last[40] = {};  // the end of the bytes, with room behind it
  for (size_t i = safe; i < groups; ++i, in += width, out += 8) {
    std::memcpy(last, in, width);
    unpack_group<width>(last, out);
  }
}

using Unpack = void (*)(const uint8_t*, size_t, size_t, uint32_t*);

template <unsigned... widths>
constexpr std::array<Unpack, sizeof...(widths)> make_unpacks(std::integer_sequence<unsigned, widths...>) {
  return {unpack_groups<widths>...};
}

constexpr auto kUnpacks = make_unpacks(std::make_integer_sequence<unsigned, 33>());

}  // namespace

bool Runs::next(Run& run) {
  uint64_t header = 0;
  for (int shift = 0;; shift += 7) {
    if (at_ == end_ || shift > 28) return false;
    const uint8_t byte = *at_++;
    header |= uint64_t{byte & 127u} << shift;
    if (byte < 128) break;
  }
  const auto size = static_cast<size_t>(end_ - at_);
  const size_t count = header >> 1;
  run.is_packed = header & 1;
  if (run.is_packed) {
    if (count == 0 || count > (left_ + 7) / 8 || count * width_ > size) return false;
    run.count = std::min(count * 8, left_);
    run.packed = {at_, count * width_};
    at_ += count * width_;
  } else {
    const size_t bytes = (width_ + 7) / 8;
    if (count == 0 || count > left_ || bytes > size) return false;
    run.count = count;
    run.value = 0;
    for (size_t i = 0; i < bytes; ++i) run.value |= uint32_t{*at_++} << 8 * i;
    if (width_ < 32 && run.value >> width_) return false;
  }
  left_ -= run.count;
  return true;
}

void unpack(std::span<const uint8_t> packed, unsigned width, size_t count, uint32_t* out) {
  kUnpacks[width](packed.data(), packed.size(), (count + 7) / 8, out);
}

}  // namespace karvan::parquet
