// CRC-32C (Castagnoli): polynomial 0x1EDC6F41 with reflected bits. TFRecord and Snappy's frames have it.
#pragma once
#include <cstdint>
#include <span>

namespace karvan {

// Of these bytes after others, whose checksum is `before`.
uint32_t crc32c(std::span<const uint8_t> bytes, uint32_t before = 0);
// The same without the processor's instructions for it: for tests.
uint32_t crc32c_by_tables(std::span<const uint8_t> bytes, uint32_t before = 0);

// As both formats store it: a checksum of data that holds its own checksum would otherwise have a value that says little.
inline uint32_t masked_crc32c(std::span<const uint8_t> bytes) {
  const uint32_t crc = crc32c(bytes);
  return (crc >> 15 | crc << 17) + 0xA282EAD8u;
}

}  // namespace karvan
