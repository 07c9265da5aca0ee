// Pages of Parquet, written the slow and obvious way. Little is inlined: that compiles faster than it would run.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "hash/crc32.h"

namespace karvan::test {

using Bytes = std::vector<uint8_t>;

// Memory of exactly this size, so that a sanitizer sees every step beyond it.
class Exact {
 public:
  [[gnu::noinline]] explicit Exact(const Bytes& bytes) : size_(bytes.size()), bytes_(new uint8_t[bytes.size()]) {
    if (size_) std::memcpy(bytes_.get(), bytes.data(), size_);
  }
  operator std::span<const uint8_t>() const { return {bytes_.get(), size_}; }

 private:
  size_t size_;
  std::unique_ptr<uint8_t[]> bytes_;
};

[[gnu::noinline]] inline void add(Bytes& bytes, const Bytes& more) { bytes.insert(bytes.end(), more.begin(), more.end()); }

[[gnu::noinline]] inline void add_varint(Bytes& bytes, uint64_t value) {
  for (; value > 127; value >>= 7) bytes.push_back(static_cast<uint8_t>(value | 128));
  bytes.push_back(static_cast<uint8_t>(value));
}

// The lower bytes of a number, the lowest first.
[[gnu::noinline]] inline Bytes bytes_of(uint64_t number, size_t count) {
  Bytes bytes(count);
  if (count) std::memcpy(bytes.data(), &number, count);
  return bytes;
}

// A Thrift struct of integers, booleans (type 1 for true) and further structs, by field.
struct Struct {
  Bytes bytes;
  int last = 0;

  [[gnu::noinline]] Struct& head(int field, int type) {
    bytes.push_back(static_cast<uint8_t>((field - last) << 4 | type));
    last = field;
    return *this;
  }
  [[gnu::noinline]] Struct& integer(int field, int64_t value) {
    head(field, 5);
    add_varint(bytes, static_cast<uint64_t>(value) << 1 ^ (value < 0 ? ~uint64_t{0} : 0));
    return *this;
  }
  [[gnu::noinline]] Struct& nested(int field, const Struct& inner) {
    head(field, 12);
    add(bytes, inner.ended());
    return *this;
  }
  [[gnu::noinline]] Bytes ended() const {
    Bytes made = bytes;
    made.push_back(0);
    return made;
  }
};

// Literals only, some long and some short; copies are for tests to write by hand.
inline Bytes snappy(const Bytes& plain) {
  Bytes block;
  add_varint(block, plain.size());
  for (size_t at = 0, size = 0; at < plain.size(); at += size) {
    size = std::min<size_t>(plain.size() - at, at % 3 ? 37 : 300);
    if (size <= 60)
      block.push_back(static_cast<uint8_t>((size - 1) << 2));
    else
      add(block, bytes_of(61 << 2 | (size - 1) << 8, 3));
    block.insert(block.end(), plain.begin() + static_cast<ptrdiff_t>(at),
                 plain.begin() + static_cast<ptrdiff_t>(at + size));
  }
  return block;
}

// Equal neighbours, eight and more, as a run from where a group of eight begins; the rest packed.
inline Bytes hybrid(const std::vector<uint32_t>& values, unsigned width) {
  Bytes bytes;
  for (size_t at = 0; at < values.size();) {
    size_t same = at;
    while (same < values.size() && values[same] == values[at]) ++same;
    if (same - at >= 8) {
      add_varint(bytes, (same - at) << 1);
      add(bytes, bytes_of(values[at], (width + 7) / 8));
      at = same;
      continue;
    }
    size_t end = at;  // up to the next run, in whole groups
    while (end < values.size()) {
      bool is_run = end + 8 <= values.size();
      for (size_t i = end; is_run && i < end + 8; ++i) is_run = values[i] == values[end];
      if (is_run) break;
      end += 8;
    }
    const size_t groups = (end - at) / 8;
    add_varint(bytes, groups << 1 | 1);
    Bytes packed(groups * width);
    for (size_t i = at; i < std::min(end, values.size()); ++i)
      for (unsigned bit = 0; bit < width; ++bit) {
        const size_t place = (i - at) * width + bit;
        if (values[i] >> bit & 1) packed[place / 8] |= static_cast<uint8_t>(1u << place % 8);
      }
    add(bytes, packed);
    at = std::min(end, values.size());
  }
  return bytes;
}

using Numbers = std::vector<uint64_t>;
using Values = std::vector<std::optional<uint64_t>>;

// Of each number the lower `width` bytes.
inline Bytes plain(const Numbers& values, size_t width) {
  Bytes bytes(values.size() * width);
  for (size_t i = 0; i < values.size(); ++i) std::memcpy(bytes.data() + i * width, &values[i], width);
  return bytes;
}

struct PageOptions {
  bool compress = false, v2 = false, crc = false;
  size_t width = 8;
};

// A page of any kind with its header: `inner` is the header of its kind, `levels` stay uncompressed in version 2.
inline Bytes page(int type, int field, const Struct& inner, const Bytes& levels, const Bytes& values,
                  PageOptions options) {
  Bytes whole = options.v2 ? values : levels;
  if (!options.v2) add(whole, values);
  Bytes body = options.v2 ? levels : Bytes();
  add(body, options.compress ? snappy(whole) : whole);
  Struct header;
  header.integer(1, type).integer(2, levels.size() + values.size()).integer(3, body.size());
  if (options.crc) header.integer(4, static_cast<int32_t>(karvan::crc32(body)));
  Bytes bytes = header.nested(field, inner).ended();
  add(bytes, body);
  return bytes;
}

// Values of an optional column; `dictionary`, where it is not empty, has all of their values.
inline Bytes data_page(const Values& rows, const Numbers& dictionary, PageOptions options) {
  std::vector<uint32_t> levels, indices;
  Numbers present;
  for (const auto& value : rows) {
    levels.push_back(value.has_value());
    if (!value) continue;
    present.push_back(*value);
    const auto found = std::find(dictionary.begin(), dictionary.end(), *value);
    indices.push_back(static_cast<uint32_t>(found - dictionary.begin()));
  }
  Bytes values = plain(present, options.width);
  if (!dictionary.empty()) {
    unsigned width = 0;
    while (dictionary.size() > size_t{1} << width) ++width;
    values.assign(1, static_cast<uint8_t>(width));
    add(values, hybrid(indices, width));
  }
  const int encoding = dictionary.empty() ? 0 : 8;
  const Bytes definitions = hybrid(levels, 1);
  Struct inner;
  inner.integer(1, rows.size());
  if (options.v2) {
    inner.integer(2, rows.size() - present.size()).integer(3, rows.size()).integer(4, encoding);
    inner.integer(5, definitions.size()).integer(6, 0);
    if (!options.compress) inner.head(7, 2);
    return page(3, 8, inner, definitions, values, options);
  }
  inner.integer(2, encoding).integer(3, 3).integer(4, 3);
  Bytes prefixed = bytes_of(definitions.size(), 4);
  add(prefixed, definitions);
  return page(0, 5, inner, prefixed, values, options);
}

inline Bytes dictionary_page(const Numbers& dictionary, PageOptions options) {
  options.v2 = false;
  Struct inner;
  inner.integer(1, dictionary.size()).integer(2, 0);
  return page(2, 7, inner, Bytes(), plain(dictionary, options.width), options);
}

}  // namespace karvan::test
