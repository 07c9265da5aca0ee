// Page headers of Parquet, which are structs in Thrift's compact encoding.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

namespace karvan::parquet {

enum class PageType : uint8_t { data = 0, index = 1, dictionary = 2, data_v2 = 3 };
enum class Encoding : uint8_t { plain = 0, plain_dictionary = 2, rle = 3, rle_dictionary = 8 };

struct PageHeader {
  size_t size = 0;  // of the header itself
  PageType type{};
  size_t compressed_size = 0, uncompressed_size = 0;  // of the page that follows
  bool has_crc = false;
  uint32_t crc = 0;
  size_t values = 0;
  int32_t encoding = -1;
  int32_t level_encoding = -1;  // version 1
  size_t nulls = 0, rows = 0, definition_bytes = 0, repetition_bytes = 0;  // version 2
  bool compressed = true;
};

// Fields that are unknown here are skipped. False if the bytes end early or are no header of a dictionary or data page.
bool read_page_header(std::span<const uint8_t> bytes, PageHeader& header);

}  // namespace karvan::parquet
