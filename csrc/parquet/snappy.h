// Snappy's block format: https://github.com/google/snappy/blob/main/format_description.txt
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

namespace karvan::parquet {

constexpr size_t kSnappySlack = 64;  // bytes behind the output that may be written, because copies are wide

// No block holds more than this times its own size: a copy gives at most 64 bytes and takes three for that.
constexpr size_t kSnappyMostTimes = 32;

// Writes exactly `size` bytes to `out`, which has room for kSnappySlack more. False if the block is damaged or of
// another size.
bool snappy_uncompress(std::span<const uint8_t> block, uint8_t* out, size_t size);

}  // namespace karvan::parquet
