// The checksum of Parquet's pages: CRC-32 as in gzip, polynomial 0x04C11DB7 with reflected bits.
#pragma once
#include <cstdint>
#include <span>

namespace karvan::parquet {

uint32_t crc32(std::span<const uint8_t> bytes);

}  // namespace karvan::parquet
