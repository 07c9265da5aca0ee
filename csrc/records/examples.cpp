#include "records/examples.h"

#include <bit>
#include <cstring>
#include <limits>
#include <string_view>
#include <unordered_map>

namespace karvan::records {
namespace {

using What = ExampleFault::What;

constexpr uint32_t kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5;

// The fields of a message, one after the other. What is not a message makes `good` false.
class Fields {
 public:
  explicit Fields(std::span<const uint8_t> bytes) : at_(bytes.data()), end_(at_ + bytes.size()) {}

  bool next() {
    if (at_ == end_ || !good) return false;
    const uint64_t tag = varint();
    number = tag >> 3;
    wire = tag & 7;
    if (!good || number == 0 || tag >> 32) return fail();
    switch (wire) {
      case kVarint: value = varint(); return good;
      case kFixed64: return take(8);
      case kBytes: {
        const uint64_t size = varint();
        return good && take(size);
      }
      case kFixed32: return take(4);
      default: return fail();
    }
  }

  bool is_message(uint64_t field) const { return number == field && wire == kBytes; }

  uint64_t varint() {
    if (at_ != end_ && *at_ < 128) return *at_++;
    uint64_t made = 0;
    for (int shift = 0; shift < 70; shift += 7) {
      if (at_ == end_) break;
      const uint8_t byte = *at_++;
      made |= uint64_t{byte & 127u} << shift;
      if (byte < 128) return made;
    }
    good = false;
    return 0;
  }

  bool is_at_end() const { return at_ == end_; }

  uint64_t number = 0;
  uint32_t wire = 0;
  uint64_t value = 0;              // of a varint
  std::span<const uint8_t> bytes;  // of any other
  bool good = true;

 private:
  bool fail() { return good = false; }
  bool take(uint64_t size) {
    if (size > static_cast<uint64_t>(end_ - at_)) return fail();
    bytes = {at_, static_cast<size_t>(size)};
    at_ += size;
    return true;
  }

  const uint8_t* at_;
  const uint8_t* end_;
};

// Values of a list, given to `add`; false if it is none.
template <class Add>
bool read_integers(std::span<const uint8_t> list, Add add) {
  Fields fields(list);
  while (fields.next()) {
    if (fields.number != 1) continue;
    if (fields.wire == kVarint) {
      add(static_cast<int64_t>(fields.value));
    } else if (fields.wire == kBytes) {
      Fields packed(fields.bytes);
      while (packed.good && !packed.is_at_end()) {
        const auto value = static_cast<int64_t>(packed.varint());
        if (packed.good) add(value);
      }
      if (!packed.good) return false;
    } else {
      return false;
    }
  }
  return fields.good;
}

template <class Add>
bool read_floats(std::span<const uint8_t> list, Add add) {
  Fields fields(list);
  while (fields.next()) {
    if (fields.number != 1) continue;
    if ((fields.wire != kFixed32 && fields.wire != kBytes) || fields.bytes.size() % 4) return false;
    add(fields.bytes);
  }
  return fields.good;
}

template <class Add>
bool read_bytes(std::span<const uint8_t> list, Add add) {
  Fields fields(list);
  while (fields.next()) {
    if (fields.number != 1) continue;
    if (fields.wire != kBytes) return false;
    add(fields.bytes);
  }
  return fields.good;
}

// The two fields of a map entry as they are mostly written: name, feature, both shorter than 128 bytes. False if otherwise.
bool read_short_entry(std::span<const uint8_t> entry, std::span<const uint8_t>& name, std::span<const uint8_t>& feature) {
  if (entry.size() < 4 || entry[0] != 0x0a) return false;
  const size_t name_size = entry[1];
  if (name_size > 127 || name_size + 4 > entry.size() || entry[2 + name_size] != 0x12) return false;
  if (entry[3 + name_size] != entry.size() - name_size - 4 || entry[3 + name_size] > 127) return false;
  name = entry.subspan(2, name_size);
  feature = entry.subspan(4 + name_size);
  return true;
}

// Gives each feature's name and message to `visit`, which says whether to continue; false if it is no Example.
template <class Visit>
bool visit_features(std::span<const uint8_t> record, Visit visit) {
  Fields example(record);
  std::vector<uint8_t> joined;
  while (example.next()) {
    if (!example.is_message(1)) return false;  // a SequenceExample has more, which must not be lost silently
    Fields features(example.bytes);
    while (features.next()) {
      if (!features.is_message(1)) return false;
      std::span<const uint8_t> name, feature;
      const bool is_read = read_short_entry(features.bytes, name, feature);
      Fields entry(is_read ? std::span<const uint8_t>() : features.bytes);
      while (entry.next()) {
        if (entry.is_message(1)) name = entry.bytes;
        if (!entry.is_message(2)) continue;
        if (feature.empty()) {
          feature = entry.bytes;
        } else {  // messages that come twice are merged, which their bytes in a row are
          if (feature.data() != joined.data()) joined.assign(feature.begin(), feature.end());
          joined.insert(joined.end(), entry.bytes.begin(), entry.bytes.end());
          feature = joined;
        }
      }
      if (!entry.good) return false;
      if (!visit(std::string_view(reinterpret_cast<const char*>(name.data()), name.size()), feature)) return true;
    }
    if (!features.good) return false;
  }
  return example.good;
}

// Takes back what the present record has put into a column, if anything.
void take_back(FeatureColumn& column) {
  const auto begin = static_cast<size_t>(column.offsets.back());
  if (column.kind == Kind::integers) column.integers.resize(begin);
  if (column.kind == Kind::floats) column.floats.resize(begin);
  if (column.kind == Kind::bytes) {
    column.byte_offsets.resize(begin + 1);
    column.bytes.resize(static_cast<size_t>(column.byte_offsets.back()));
  }
}

size_t values_in(const FeatureColumn& column) {
  if (column.kind == Kind::integers) return column.integers.size();
  return column.kind == Kind::floats ? column.floats.size() : column.byte_offsets.size() - 1;
}

constexpr size_t kMost = std::numeric_limits<int32_t>::max();

What read_list(FeatureColumn& column, std::span<const uint8_t> list) {
  bool good = true, fits = true;
  if (column.kind == Kind::integers) {
    good = read_integers(list, [&](int64_t value) { column.integers.push_back(value); });
  } else if (column.kind == Kind::floats) {
    good = read_floats(list, [&](std::span<const uint8_t> values) {
      const size_t before = column.floats.size();
      column.floats.resize(before + values.size() / 4);
      if (!values.empty()) std::memcpy(column.floats.data() + before, values.data(), values.size());
    });
  } else {
    good = read_bytes(list, [&](std::span<const uint8_t> value) {
      fits = fits && column.bytes.size() + value.size() <= kMost;
      if (!fits) return;
      column.bytes.insert(column.bytes.end(), value.begin(), value.end());
      column.byte_offsets.push_back(static_cast<int32_t>(column.bytes.size()));
    });
  }
  return good ? fits && values_in(column) <= kMost ? What::none : What::size : What::malformed;
}

// A feature of one number, as it is mostly written: a packed list in a list in the feature. False, and nothing is read, if
// it is anything else.
bool read_single(FeatureColumn& column, std::span<const uint8_t> feature) {
  const size_t size = feature.size();
  if (size < 5 || size > 129 || feature[1] != size - 2 || feature[2] != 0x0a || feature[3] != size - 4) return false;
  if (column.kind == Kind::floats && feature[0] == 0x12 && size == 8) {
    float value;
    std::memcpy(&value, feature.data() + 4, sizeof value);
    column.floats.push_back(value);
    return true;
  }
  if (column.kind != Kind::integers || feature[0] != 0x1a || size > 14) return false;
  uint64_t value = 0;
  for (size_t i = 4; i < size; ++i) {
    value |= uint64_t{feature[i] & 127u} << (7 * (i - 4));
    if ((feature[i] < 128) != (i + 1 == size)) return false;
  }
  column.integers.push_back(static_cast<int64_t>(value));
  return true;
}

// Reads a feature into its column. The kind that is set last holds, as for any "one of".
What read_feature(FeatureColumn& column, uint8_t& present, std::span<const uint8_t> feature, Kind& found) {
  take_back(column);
  if (values_in(column) < kMost && read_single(column, feature)) {
    found = column.kind;
    present = 1;
    return What::none;
  }
  found = Kind::none;
  Fields fields(feature);
  while (fields.next()) {
    if (fields.number > 3) continue;
    if (fields.wire != kBytes) return What::malformed;
    const auto kind = static_cast<Kind>(fields.number);
    if (kind != found) take_back(column);
    found = kind;
    if (kind != column.kind) continue;
    if (const What what = read_list(column, fields.bytes); what != What::none) return what;
  }
  present = found != Kind::none;
  if (!fields.good) return What::malformed;
  return present && found != column.kind ? What::kind : What::none;
}

std::span<const uint8_t> payload(const Payloads& records, size_t number) {
  return records.bytes.subspan(static_cast<size_t>(records.starts[number]),
                               static_cast<size_t>(records.lengths[number]));
}

}  // namespace

ExampleFault decode_examples(const Payloads& records, std::vector<FeatureColumn>& columns, bool all_named) {
  std::unordered_map<std::string_view, size_t> places;
  for (size_t i = 0; i < columns.size(); ++i) {
    FeatureColumn& column = columns[i];
    places[column.name] = i;
    column.present.assign(records.starts.size(), 0);
    column.offsets.assign(1, 0);
    column.offsets.reserve(records.starts.size() + 1);
    if (column.kind == Kind::bytes) column.byte_offsets.assign(1, 0);
    if (column.kind == Kind::integers) column.integers.reserve(records.starts.size());
    if (column.kind == Kind::floats) column.floats.reserve(records.starts.size());
  }
  ExampleFault fault;
  std::vector<size_t> order;  // of the columns in the record before: mostly the next one has the same
  for (size_t record = 0; record < records.starts.size(); ++record) {
    size_t number = 0;
    const auto visit = [&](std::string_view name, std::span<const uint8_t> feature) {
      if (number == order.size()) order.push_back(columns.size());
      size_t& place = order[number++];
      if (place >= columns.size() || columns[place].name != name) {
        const auto known = places.find(name);
        if (known == places.end()) {
          place = columns.size();
          if (all_named) fault = {What::unknown, record, std::string(name), Kind::none};
          return !all_named;
        }
        place = known->second;
      }
      FeatureColumn& column = columns[place];
      Kind found;
      const What what = read_feature(column, column.present[record], feature, found);
      if (what != What::none) fault = {what, record, column.name, found};
      return what == What::none;
    };
    if (!visit_features(payload(records, record), visit)) return {What::malformed, record, "", Kind::none};
    if (fault.what != What::none) return fault;
    for (FeatureColumn& column : columns) column.offsets.push_back(static_cast<int32_t>(values_in(column)));
  }
  return fault;
}

ExampleFault summarise_examples(const Payloads& records, std::map<std::string, FeatureSummary>& features) {
  ExampleFault fault;
  for (size_t record = 0; record < records.starts.size(); ++record) {
    const auto visit = [&](std::string_view name, std::span<const uint8_t> feature) {
      FeatureSummary& summary = features[std::string(name)];
      Kind kind = Kind::none;
      size_t count = 0;
      bool good = true;
      const auto add = [&](const auto&) { ++count; };
      Fields fields(feature);
      while (good && fields.next()) {
        if (fields.number > 3) continue;
        good = fields.wire == kBytes;
        if (!good) break;
        if (static_cast<Kind>(fields.number) != kind) count = 0;
        kind = static_cast<Kind>(fields.number);
        if (kind == Kind::integers) good = read_integers(fields.bytes, add);
        if (kind == Kind::bytes) good = read_bytes(fields.bytes, add);
        if (kind == Kind::floats)
          good = read_floats(fields.bytes, [&](std::span<const uint8_t> values) { count += values.size() / 4; });
      }
      if (!good || !fields.good) fault = {What::malformed, record, std::string(name), Kind::none};
      if (good && kind != Kind::none && summary.kind != Kind::none && summary.kind != kind)
        fault = {What::kind, record, std::string(name), kind};
      if (fault.what == What::none && kind != Kind::none) summary.kind = kind;
      summary.single = summary.single && count <= 1;
      return fault.what == What::none;
    };
    if (!visit_features(payload(records, record), visit)) return {What::malformed, record, "", Kind::none};
    if (fault.what != What::none) return fault;
  }
  return fault;
}

namespace {

size_t varint_size(uint64_t value) { return (static_cast<size_t>(std::bit_width(value | 1)) + 6) / 7; }

// A field of bytes: its tag, its size, and that many bytes.
size_t field_size(size_t size) { return 1 + varint_size(size) + size; }

// Writes to memory that is as large as the sizes say.
class Output {
 public:
  explicit Output(uint8_t* at) : at_(at) {}
  void varint(uint64_t value) {
    for (; value >= 128; value >>= 7) *at_++ = static_cast<uint8_t>(value | 128);
    *at_++ = static_cast<uint8_t>(value);
  }
  void field(uint64_t number, size_t size) {
    varint(number << 3 | kBytes);
    varint(size);
  }
  void bytes(const void* from, size_t size) {
    if (size) std::memcpy(at_, from, size);
    at_ += size;
  }

 private:
  uint8_t* at_;
};

int64_t integer_at(const FeatureValues& column, size_t place) {
  int64_t value;
  std::memcpy(&value, column.values.data() + 8 * place, 8);
  return value;
}

// The sizes of one row's list, and of the packed numbers in it.
struct Sizes {
  size_t packed = 0, list = 0;
};

Sizes sizes_of(const FeatureValues& column, size_t begin, size_t end) {
  Sizes sizes;
  if (column.kind == Kind::bytes) {
    for (size_t i = begin; i < end; ++i)
      sizes.list += field_size(static_cast<size_t>(column.byte_offsets[i + 1] - column.byte_offsets[i]));
    return sizes;
  }
  if (column.kind == Kind::floats) sizes.packed = 4 * (end - begin);
  if (column.kind == Kind::integers)
    for (size_t i = begin; i < end; ++i) sizes.packed += varint_size(static_cast<uint64_t>(integer_at(column, i)));
  sizes.list = begin == end ? 0 : field_size(sizes.packed);
  return sizes;
}

}  // namespace

std::vector<int64_t> encode_examples(std::span<const FeatureValues> columns, size_t rows, std::vector<uint8_t>& out) {
  std::vector<int64_t> bounds(1, 0);
  std::vector<Sizes> sizes(columns.size());
  for (size_t row = 0; row < rows; ++row) {
    size_t total = 0;
    const auto entry_size = [&](size_t i) {
      return field_size(columns[i].name.size()) + field_size(field_size(sizes[i].list));
    };
    for (size_t i = 0; i < columns.size(); ++i) {
      if (!columns[i].present[row]) continue;
      const auto begin = static_cast<size_t>(columns[i].offsets[row]);
      sizes[i] = sizes_of(columns[i], begin, static_cast<size_t>(columns[i].offsets[row + 1]));
      total += field_size(entry_size(i));
    }
    const size_t before = out.size();
    if (out.capacity() - before < field_size(total)) out.reserve(2 * (before + field_size(total)));
    out.resize(before + field_size(total));
    Output output(out.data() + before);
    output.field(1, total);
    for (size_t i = 0; i < columns.size(); ++i) {
      const FeatureValues& column = columns[i];
      if (!column.present[row]) continue;
      output.field(1, entry_size(i));
      output.field(1, column.name.size());
      output.bytes(column.name.data(), column.name.size());
      output.field(2, field_size(sizes[i].list));
      output.field(static_cast<uint64_t>(column.kind), sizes[i].list);
      const auto begin = static_cast<size_t>(column.offsets[row]), end = static_cast<size_t>(column.offsets[row + 1]);
      if (begin == end) continue;
      if (column.kind != Kind::bytes) output.field(1, sizes[i].packed);
      if (column.kind == Kind::floats) output.bytes(column.values.data() + 4 * begin, 4 * (end - begin));
      if (column.kind == Kind::integers)
        for (size_t k = begin; k < end; ++k) output.varint(static_cast<uint64_t>(integer_at(column, k)));
      if (column.kind == Kind::bytes)
        for (size_t k = begin; k < end; ++k) {
          const auto first = static_cast<size_t>(column.byte_offsets[k]);
          const size_t size = static_cast<size_t>(column.byte_offsets[k + 1]) - first;
          output.field(1, size);
          output.bytes(column.values.data() + first, size);
        }
    }
    bounds.push_back(static_cast<int64_t>(out.size()));
  }
  return bounds;
}

}  // namespace karvan::records
