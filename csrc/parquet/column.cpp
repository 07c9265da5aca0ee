#include "parquet/column.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <exception>
#include <optional>
#include <system_error>
#include <thread>
#include <vector>

#include "hash/crc32.h"
#include "memory/buffer.h"
#include "parquet/hybrid.h"
#include "parquet/page_header.h"
#include "parquet/snappy.h"
#include "parquet/validity.h"

static_assert(std::endian::native == std::endian::little, "Parquet's numbers are copied as they are.");

namespace karvan::parquet {
namespace {

using Bytes = std::span<const uint8_t>;

constexpr size_t kBlock = 1024;  // indices that are unpacked at a time: they stay in the nearest cache

// Memory for uncompressed pages, kept from one page and column to the next.
struct Scratch {
  Buffer dictionary, page;
};

uint8_t* room(Buffer& buffer, size_t bytes) {
  if (buffer.size() < bytes) buffer = Buffer(bytes);
  return reinterpret_cast<uint8_t*>(buffer.data());
}

// The bytes of a page as they were before compression.
std::optional<Bytes> uncompressed(Bytes page, size_t size, bool is_snappy, Buffer& buffer) {
  if (!is_snappy) return page.size() == size ? std::optional(page) : std::nullopt;
  if (size / kSnappyMostTimes > page.size()) return std::nullopt;  // do not ask for memory that damage promises
  uint8_t* const out = room(buffer, size + kSnappySlack);
  if (!snappy_uncompress(page, out, size)) return std::nullopt;
  return Bytes(out, size);
}

// Picks `count` values of the dictionary by their indices.
template <class T>
bool read_indices(Bytes bytes, size_t count, const T* dictionary, size_t entries, T* out) {
  if (count == 0) return bytes.size() <= 1;
  if (bytes.empty() || bytes[0] > 32) return false;
  const unsigned width = bytes[0];
  Runs runs(bytes.subspan(1), width, count);
  uint32_t indices[kBlock + kUnpackRoom];
  for (Run run; !runs.is_complete();) {
    if (!runs.next(run)) return false;
    if (!run.is_packed) {
      if (run.value >= entries) return false;
      std::fill_n(out, run.count, dictionary[run.value]);
      out += run.count;
      continue;
    }
    for (size_t done = 0; done < run.count; done += kBlock) {
      const size_t size = std::min(run.count - done, kBlock);
      unpack(run.packed.subspan(done / 8 * width), width, size, indices);
      uint32_t most = 0;
      for (size_t i = 0; i < size; ++i) most = std::max(most, indices[i]);
      if (most >= entries) return false;
      for (size_t i = 0; i < size; ++i) out[i] = dictionary[indices[i]];
      out += size;
    }
  }
  return true;
}

// Moves the values that lie side by side at the start to the rows that have one.
template <class T>
void spread(T* values, size_t present, const Validity& validity, size_t first, size_t rows) {
  // From the last on, none is overwritten before it is moved; once no nulls are left, all are where they belong.
  for (size_t row = rows; row > present;) {
    --row;
    const bool is_present = validity[first + row];
    present -= is_present;
    values[row] = is_present ? values[present] : T{0};
  }
}

template <class T>
class Decoder {
 public:
  Decoder(Bytes bytes, const ColumnChunk& column, Scratch& scratch)
      : left_(bytes), column_(column), scratch_(scratch), out_(static_cast<T*>(column.values)),
        validity_(column.validity) {}

  int64_t run() {
    while (validity_.rows() < column_.rows)
      if (!read_page()) return -1;
    return left_.empty() ? static_cast<int64_t>(validity_.nulls()) : -1;
  }

 private:
  bool read_page() {
    PageHeader header;
    if (!read_page_header(left_, header) || header.compressed_size > left_.size() - header.size) return false;
    const Bytes page = left_.subspan(header.size, header.compressed_size);
    left_ = left_.subspan(header.size + header.compressed_size);
    if (header.has_crc && crc32(page) != header.crc) return false;
    switch (header.type) {
      case PageType::dictionary:
        return read_dictionary(header, page);
      case PageType::data:
        return read_data(header, page);
      case PageType::data_v2:
        return read_data_v2(header, page);
      default:
        return false;
    }
  }

  bool read_dictionary(const PageHeader& header, Bytes page) {
    const bool is_plain = header.encoding == static_cast<int>(Encoding::plain) ||
                          header.encoding == static_cast<int>(Encoding::plain_dictionary);
    if (dictionary_ || validity_.rows() || !is_plain || header.uncompressed_size != header.values * sizeof(T))
      return false;
    const auto bytes = uncompressed(page, header.uncompressed_size, column_.is_snappy, scratch_.dictionary);
    if (!bytes) return false;
    const auto* values = bytes->data();
    if (!column_.is_snappy) {  // it may begin at any address
      uint8_t* const copy = room(scratch_.dictionary, std::max<size_t>(bytes->size(), 1));
      if (!bytes->empty()) std::memcpy(copy, bytes->data(), bytes->size());
      values = copy;
    }
    dictionary_ = reinterpret_cast<const T*>(values);
    entries_ = header.values;
    return true;
  }

  bool read_data(const PageHeader& header, Bytes page) {
    const auto bytes = uncompressed(page, header.uncompressed_size, column_.is_snappy, scratch_.page);
    if (!bytes) return false;
    Bytes levels, values = *bytes;
    if (column_.is_optional) {
      uint32_t size = 0;
      if (values.size() < sizeof size || header.level_encoding != static_cast<int>(Encoding::rle)) return false;
      std::memcpy(&size, values.data(), sizeof size);
      if (size > values.size() - sizeof size) return false;
      levels = values.subspan(sizeof size, size);
      values = values.subspan(sizeof size + size);
    }
    size_t nulls = 0;
    return read_levels(header, levels, nulls) && read_values(header, values, nulls);
  }

  bool read_data_v2(const PageHeader& header, Bytes page) {
    const size_t levels = header.definition_bytes;
    if (header.repetition_bytes || header.rows != header.values || levels > page.size() ||
        levels > header.uncompressed_size || (levels && !column_.is_optional))
      return false;
    size_t nulls = 0;
    if (!read_levels(header, page.first(levels), nulls) || nulls != header.nulls) return false;
    // A page of nulls may have nothing that could be compressed.
    const bool is_snappy = column_.is_snappy && header.compressed && levels < page.size();
    const auto bytes = uncompressed(page.subspan(levels), header.uncompressed_size - levels, is_snappy, scratch_.page);
    return bytes && read_values(header, *bytes, nulls);
  }

  bool read_levels(const PageHeader& header, Bytes levels, size_t& nulls) {
    if (header.values == 0 || header.values > column_.rows - validity_.rows()) return false;
    const size_t before = validity_.nulls();
    if (!column_.is_optional)
      validity_.append(true, header.values);
    else if (!validity_.append_levels(levels, header.values))
      return false;
    nulls = validity_.nulls() - before;
    return true;
  }

  bool read_values(const PageHeader& header, Bytes bytes, size_t nulls) {
    const size_t present = header.values - nulls, first = validity_.rows() - header.values;
    T* const out = out_ + first;
    if (header.encoding == static_cast<int>(Encoding::plain)) {
      if (bytes.size() != present * sizeof(T)) return false;
      if (present) std::memcpy(out, bytes.data(), bytes.size());
    } else if (header.encoding == static_cast<int>(Encoding::rle_dictionary) ||
               header.encoding == static_cast<int>(Encoding::plain_dictionary)) {
      if (!dictionary_ || !read_indices(bytes, present, dictionary_, entries_, out)) return false;
    } else {
      return false;
    }
    if (nulls) spread(out, present, validity_, first, header.values);
    return true;
  }

  Bytes left_;
  const ColumnChunk& column_;
  Scratch& scratch_;
  T* out_;
  Validity validity_;
  const T* dictionary_ = nullptr;
  size_t entries_ = 0;
};

int64_t decode(Bytes bytes, const ColumnChunk& column, Scratch& scratch) {
  if (column.begin > bytes.size() || column.size > bytes.size() - column.begin) return -1;
  const Bytes pages = bytes.subspan(column.begin, column.size);
  if (column.width == 4) return Decoder<uint32_t>(pages, column, scratch).run();
  if (column.width == 8) return Decoder<uint64_t>(pages, column, scratch).run();
  return -1;
}

}  // namespace

int64_t decode(Bytes bytes, const ColumnChunk& column) {
  Scratch scratch;
  return decode(bytes, column, scratch);
}

void decode(Bytes bytes, std::span<const ColumnChunk> columns, int threads, std::span<int64_t> nulls) {
  std::atomic<size_t> next{0};
  const auto work = [&]() noexcept {
    Scratch scratch;
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < columns.size();) {
      try {
        nulls[i] = decode(bytes, columns[i], scratch);
      } catch (const std::exception&) {  // no memory
        nulls[i] = -1;
      }
    }
  };
  std::vector<std::jthread> helpers;
  try {
    for (size_t i = 1; i < std::min(columns.size(), static_cast<size_t>(std::max(threads, 1))); ++i)
      helpers.emplace_back(work);
  } catch (const std::system_error&) {  // fewer will do
  }
  work();
}

}  // namespace karvan::parquet
