#include "parquet/validity.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "parquet/hybrid.h"

namespace karvan::parquet {
namespace {

// The bytes that hold `count` bits, and of the last one those that do.
size_t count_ones(std::span<const uint8_t> bits, size_t count) {
  size_t ones = 0, at = 0;
  for (; (at + 8) * 8 <= count; at += 8) {
    uint64_t word;
    std::memcpy(&word, bits.data() + at, 8);
    ones += static_cast<size_t>(std::popcount(word));
  }
  for (; (at + 1) * 8 <= count; ++at) ones += static_cast<size_t>(std::popcount(bits[at]));
  if (count % 8) ones += static_cast<size_t>(std::popcount(static_cast<uint8_t>(bits[at] & ((1u << count % 8) - 1))));
  return ones;
}

}  // namespace

void Validity::begin() {
  std::memset(bits_, 255, rows_ / 8);
  if (rows_ % 8) bits_[rows_ / 8] = static_cast<uint8_t>((1u << rows_ % 8) - 1);
}

void Validity::append(bool present, size_t count) {
  if (count == 0) return;
  if (present && nulls_ == 0) {
    rows_ += count;
    return;
  }
  if (nulls_ == 0) begin();
  nulls_ += present ? 0 : count;
  const size_t end = rows_ + count;
  if (rows_ % 8) {
    const size_t taken = std::min(count, 8 - rows_ % 8);
    if (present) bits_[rows_ / 8] |= static_cast<uint8_t>(((1u << taken) - 1) << rows_ % 8);
    rows_ += taken;
  }
  if (rows_ < end) {
    std::memset(bits_ + rows_ / 8, present ? 255 : 0, (end + 7) / 8 - rows_ / 8);
    if (end % 8) bits_[end / 8] &= static_cast<uint8_t>((1u << end % 8) - 1);
    rows_ = end;
  }
}

void Validity::append(std::span<const uint8_t> packed, size_t count) {
  const size_t ones = count_ones(packed, count);
  if (ones == count || ones == 0) return append(ones != 0, count);
  if (nulls_ == 0) begin();
  nulls_ += count - ones;
  const unsigned shift = rows_ % 8;
  uint8_t* to = bits_ + rows_ / 8;
  for (size_t at = 0; at * 8 < count; ++at, ++to) {
    const size_t left = count - at * 8;
    const unsigned byte = packed[at] & (left < 8 ? (1u << left) - 1 : 255u);
    *to = static_cast<uint8_t>((shift ? *to : 0u) | byte << shift);
    if (shift && left > 8 - shift) to[1] = static_cast<uint8_t>(byte >> (8 - shift));
  }
  rows_ += count;
}

bool Validity::append_levels(std::span<const uint8_t> bytes, size_t rows) {
  Runs runs(bytes, 1, rows);
  for (Run run; !runs.is_complete();) {
    if (!runs.next(run)) return false;
    if (run.is_packed)
      append(run.packed, run.count);
    else
      append(run.value != 0, run.count);
  }
  return true;
}

}  // namespace karvan::parquet
