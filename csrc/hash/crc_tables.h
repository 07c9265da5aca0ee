// The remainder of a CRC of 32 bits by tables, for any polynomial, given with its bits reflected.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace karvan {

// tables[k][b] is what a byte b does to the remainder when k more bytes follow it: eight are taken at a time.
using CrcTables = std::array<std::array<uint32_t, 256>, 8>;

constexpr CrcTables make_crc_tables(uint32_t polynomial) {
  CrcTables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t rest = byte;
    for (int bit = 0; bit < 8; ++bit) rest = rest >> 1 ^ (rest & 1 ? polynomial : 0);
    tables[0][byte] = rest;
  }
  for (size_t k = 1; k < 8; ++k)
    for (size_t byte = 0; byte < 256; ++byte)
      tables[k][byte] = tables[k - 1][byte] >> 8 ^ tables[0][tables[k - 1][byte] & 255];
  return tables;
}

template <uint32_t kPolynomial>
uint32_t crc_by_tables(const uint8_t* at, size_t left, uint32_t rest) {
  static constexpr CrcTables kTables = make_crc_tables(kPolynomial);
  for (; left >= 8; at += 8, left -= 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    word ^= rest;
    rest = 0;
    for (size_t i = 0; i < 8; ++i) rest ^= kTables[7 - i][word >> 8 * i & 255];
  }
  for (; left; ++at, --left) rest = rest >> 8 ^ kTables[0][(rest ^ *at) & 255];
  return rest;
}

}  // namespace karvan
