// CRC-32 as in gzip: polynomial 0x04C11DB7 with reflected bits. Our checkpoints have it.
#pragma once
#include <cstdint>
#include <span>

namespace karvan {

// Of these bytes after others, whose checksum is `before`.
uint32_t crc32(std::span<const uint8_t> bytes, uint32_t before = 0);
// The same without the processor's instructions for it: for tests.
uint32_t crc32_by_tables(std::span<const uint8_t> bytes, uint32_t before = 0);

}  // namespace karvan
