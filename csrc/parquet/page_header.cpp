#include "parquet/page_header.h"

#include <limits>

namespace karvan::parquet {
namespace {

enum Type : uint8_t { kStop, kTrue, kFalse, kByte, kInt16, kInt32, kInt64, kDouble, kBinary, kList, kSet, kMap, kStruct };

constexpr int kMostFields = 9;   // numbers of the fields that are read are below
constexpr int kDeepest = 16;     // structs within structs that are skipped

// The integers and booleans of a struct by the number of their field.
struct Fields {
  int32_t value[kMostFields] = {};
  uint32_t present = 0;

  bool has(int field) const { return present >> field & 1; }
  bool take(int field, int64_t number) {
    if (has(field) || number < std::numeric_limits<int32_t>::min() || number > std::numeric_limits<int32_t>::max())
      return false;
    value[field] = static_cast<int32_t>(number);
    present |= 1u << field;
    return true;
  }
  bool size(int field, size_t& out) const {
    out = static_cast<size_t>(value[field]);
    return has(field) && value[field] >= 0;
  }
};

class Reader {
 public:
  explicit Reader(std::span<const uint8_t> bytes) : begin_(bytes.data()), at_(begin_), end_(begin_ + bytes.size()) {}

  size_t used() const { return static_cast<size_t>(at_ - begin_); }

  // The fields of a struct; `nested` gets the number of each that is a struct itself, and reads or skips it.
  template <class Nested>
  bool fields(Fields& into, Nested&& nested) {
    int field = 0;
    for (Type type; next_field(field, type);) {
      if (type == kStop) return true;
      const bool known = field > 0 && field < kMostFields;
      if (known && type == kStruct) {
        if (!nested(field)) return false;
      } else if (known && (type == kTrue || type == kFalse)) {
        if (!into.take(field, type == kTrue)) return false;
      } else if (known && type == kInt32) {
        int64_t number = 0;
        if (!integer(number) || !into.take(field, number)) return false;
      } else if (!skip(type, 0)) {
        return false;
      }
    }
    return false;
  }

  bool skip_struct(int depth) {
    int field = 0;
    for (Type type; next_field(field, type);) {
      if (type == kStop) return true;
      if (!skip(type, depth)) return false;
    }
    return false;
  }

 private:
  bool next_field(int& field, Type& type) {
    if (at_ == end_) return false;
    const uint8_t byte = *at_++;
    type = static_cast<Type>(byte & 15);
    if (type == kStop) return byte == 0;
    int64_t number = field + (byte >> 4);
    if (byte >> 4 == 0 && !integer(number)) return false;
    field = static_cast<int>(number);
    return number >= 0 && number <= std::numeric_limits<int16_t>::max() && type <= kStruct;
  }

  bool varint(uint64_t& value) {
    value = 0;
    for (int shift = 0; shift < 64 && at_ != end_; shift += 7) {
      const uint8_t byte = *at_++;
      value |= uint64_t{byte & 127u} << shift;
      if (byte < 128) return true;
    }
    return false;
  }

  bool integer(int64_t& value) {
    uint64_t zigzag = 0;
    if (!varint(zigzag)) return false;
    value = static_cast<int64_t>(zigzag >> 1 ^ (0 - (zigzag & 1)));
    return true;
  }

  bool skip_bytes(uint64_t count) {
    if (count > static_cast<uint64_t>(end_ - at_)) return false;
    at_ += count;
    return true;
  }

  bool skip(Type type, int depth) {
    uint64_t count = 0;
    switch (type) {
      case kTrue:
      case kFalse:
        return true;
      case kByte:
        return skip_bytes(1);
      case kInt16:
      case kInt32:
      case kInt64:
        return varint(count);
      case kDouble:
        return skip_bytes(8);
      case kBinary:
        return varint(count) && skip_bytes(count);
      case kStruct:
        return depth < kDeepest && skip_struct(depth + 1);
      case kList:
      case kSet: {
        if (at_ == end_) return false;
        const uint8_t byte = *at_++;
        count = byte >> 4;
        if (count == 15 && !varint(count)) return false;
        return skip_elements(static_cast<Type>(byte & 15), count, depth);
      }
      case kMap: {
        if (!varint(count)) return false;
        if (count == 0) return true;
        if (at_ == end_) return false;
        const uint8_t types = *at_++;
        for (; count; --count)
          if (!skip_elements(static_cast<Type>(types >> 4), 1, depth) ||
              !skip_elements(static_cast<Type>(types & 15), 1, depth))
            return false;
        return true;
      }
      default:
        return false;
    }
  }

  // Each takes a byte at least, so a wrong count ends where the bytes do.
  bool skip_elements(Type type, uint64_t count, int depth) {
    if (depth >= kDeepest) return false;
    for (; count; --count)
      if (!(type == kTrue || type == kFalse ? skip_bytes(1) : skip(type, depth + 1))) return false;
    return true;
  }

  const uint8_t* begin_;
  const uint8_t* at_;
  const uint8_t* end_;
};

constexpr int kData = 5, kDictionary = 7, kDataV2 = 8;  // fields of the header that are the headers of a type

bool fill(PageHeader& header, const Fields& inner, int which) {
  header.encoding = inner.value[which == kDataV2 ? 4 : 2];
  if (!inner.size(1, header.values) || !inner.has(which == kDataV2 ? 4 : 2)) return false;
  switch (header.type) {
    case PageType::data:
      header.level_encoding = inner.value[3];
      return which == kData && inner.has(3) && inner.has(4);
    case PageType::dictionary:
      return which == kDictionary;
    case PageType::data_v2:
      if (inner.has(7)) header.compressed = inner.value[7] != 0;
      return which == kDataV2 && inner.size(2, header.nulls) && inner.size(3, header.rows) &&
             inner.size(5, header.definition_bytes) && inner.size(6, header.repetition_bytes);
    default:
      return false;
  }
}

}  // namespace

bool read_page_header(std::span<const uint8_t> bytes, PageHeader& header) {
  Reader reader(bytes);
  Fields outer, inner;
  int which = 0;
  const auto nested = [&](int field) {
    if (field != kData && field != kDictionary && field != kDataV2) return reader.skip_struct(0);
    if (which) return false;
    which = field;
    return reader.fields(inner, [&](int) { return reader.skip_struct(0); });
  };
  if (!reader.fields(outer, nested) || !outer.has(1)) return false;
  header = {};
  header.size = reader.used();
  header.type = static_cast<PageType>(outer.value[1]);
  header.has_crc = outer.has(4);
  header.crc = static_cast<uint32_t>(outer.value[4]);
  return outer.value[1] >= 0 && outer.value[1] <= 3 && outer.size(2, header.uncompressed_size) &&
         outer.size(3, header.compressed_size) && fill(header, inner, which);
}

}  // namespace karvan::parquet
