// Column chunks of Parquet that hold flat numbers, decoded to Arrow's layout.
//
// Only what common writers make of such columns is known here: pages of version 1 and 2, plain or with a dictionary,
// uncompressed or Snappy. Whatever else a chunk holds, however slightly it differs, it is "not mine": who calls has a
// reader that is slower and knows everything, errors included. So nothing is trusted, and nothing needs to be explained.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

namespace karvan::parquet {

struct ColumnChunk {
  size_t begin = 0, size = 0;  // where its pages are in the bytes
  size_t rows = 0;
  unsigned width = 0;     // bytes of a value, 4 or 8
  bool is_snappy = false;
  bool is_optional = false;    // whether there are definition levels
  void* values = nullptr;      // room for `rows` of them; 0 where a value is missing
  uint8_t* validity = nullptr;  // if optional, room for `rows` bits, which are written if there are nulls
};

// The number of nulls, or -1: not mine, and what has been written means nothing.
int64_t decode(std::span<const uint8_t> bytes, const ColumnChunk& column);

// All of them, on up to `threads` threads, the caller's among them.
void decode(std::span<const uint8_t> bytes, std::span<const ColumnChunk> columns, int threads,
            std::span<int64_t> nulls);

}  // namespace karvan::parquet
