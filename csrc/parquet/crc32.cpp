#include "parquet/crc32.h"

#include <array>
#include <cstddef>
#include <cstring>

namespace karvan::parquet {
namespace {

// kTables[k][b] is what a byte b does to the remainder when k more bytes follow it: eight are taken at a time.
using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t rest = byte;
    for (int bit = 0; bit < 8; ++bit) rest = rest >> 1 ^ (rest & 1 ? 0xEDB88320u : 0);
    tables[0][byte] = rest;
  }
  for (size_t k = 1; k < 8; ++k)
    for (size_t byte = 0; byte < 256; ++byte)
      tables[k][byte] = tables[k - 1][byte] >> 8 ^ tables[0][tables[k - 1][byte] & 255];
  return tables;
}

constexpr Tables kTables = make_tables();

}  // namespace

uint32_t crc32(std::span<const uint8_t> bytes) {
  uint32_t rest = ~uint32_t{0};
  const uint8_t* at = bytes.data();
  size_t left = bytes.size();
  for (; left >= 8; at += 8, left -= 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    word ^= rest;
    rest = 0;
    for (size_t i = 0; i < 8; ++i) rest ^= kTables[7 - i][word >> 8 * i & 255];
  }
  for (; left; ++at, --left) rest = rest >> 8 ^ kTables[0][(rest ^ *at) & 255];
  return ~rest;
}

}  // namespace karvan::parquet
