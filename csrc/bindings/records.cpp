// Records of TFRecord and RecordIO files, and tf.Example. What is made here crosses as arrays that own their memory.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "hash/crc32c.h"
#include "records/examples.h"
#include "records/frames.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace karvan::bindings {
namespace {

using namespace karvan::records;

template <class T>
using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Out = nb::ndarray<T, nb::numpy, nb::ndim<1>>;
using Names = std::vector<std::string>;

constexpr std::array kFaults = {"", "length", "data", "count"};
constexpr std::array kKinds = {"none", "bytes", "floats", "integers"};
constexpr std::array kExampleFaults = {"", "malformed", "kind", "unknown", "size"};

template <class T>
std::span<const T> view(const In<T>& array) {
  return {array.data(), array.size()};
}

template <class T>
Out<T> owned(std::vector<T>&& values) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* each) noexcept { delete static_cast<std::vector<T>*>(each); });
  return Out<T>(kept->data(), {kept->size()}, owner);
}

Kind kind_of(const std::string& name) {
  for (size_t i = 1; i < kKinds.size(); ++i)
    if (name == kKinds[i]) return static_cast<Kind>(i);
  throw std::invalid_argument("A kind must be bytes, floats or integers, but is '" + name + "'.");
}

Payloads payloads(const In<uint8_t>& bytes, const In<int64_t>& starts, const In<int64_t>& lengths) {
  if (starts.size() != lengths.size()) throw std::invalid_argument("Expected a length for each start.");
  const auto size = static_cast<int64_t>(bytes.size());
  for (size_t i = 0; i < starts.size(); ++i) {
    const int64_t start = starts.data()[i], length = lengths.data()[i];
    if (start < 0 || length < 0 || start > size || length > size - start)
      throw std::invalid_argument("Record " + std::to_string(i) + " is outside of the bytes.");
  }
  return {view(bytes), view(starts), view(lengths)};
}

nb::tuple frames(Frames&& found) {
  return nb::make_tuple(owned(std::move(found.starts)), owned(std::move(found.lengths)), found.end,
                        kFaults[static_cast<size_t>(found.fault)]);
}

nb::tuple tfrecords(In<uint8_t> bytes, bool verify) {
  Frames found;
  {
    nb::gil_scoped_release release;
    found = find_tfrecords(view(bytes), verify);
  }
  return frames(std::move(found));
}

nb::tuple chunk_records(In<uint8_t> bytes, size_t count) {
  Frames found;
  {
    nb::gil_scoped_release release;
    found = find_chunk_records(view(bytes), count);
  }
  return frames(std::move(found));
}

void check_bounds(std::span<const int64_t> offsets, size_t size) {
  bool good = !offsets.empty() && offsets[0] >= 0 && offsets.back() <= static_cast<int64_t>(size);
  for (size_t i = 1; i < offsets.size(); ++i) good = good && offsets[i - 1] <= offsets[i];
  if (!good) throw std::invalid_argument("offsets must not decrease, and end within the bytes.");
}

template <auto Frame>
Out<uint8_t> framed(In<uint8_t> bytes, In<int64_t> offsets) {
  std::vector<uint8_t> made;
  {
    nb::gil_scoped_release release;
    check_bounds(view(offsets), bytes.size());
    made = Frame(view(bytes), view(offsets));
  }
  return owned(std::move(made));
}

nb::object fault_of(const ExampleFault& fault) {
  if (fault.what == ExampleFault::What::none) return nb::none();
  return nb::make_tuple(kExampleFaults[static_cast<size_t>(fault.what)], fault.record,
                        nb::bytes(fault.feature.data(), fault.feature.size()),
                        kKinds[static_cast<size_t>(fault.found)]);
}

nb::tuple decode(In<uint8_t> bytes, In<int64_t> starts, In<int64_t> lengths, const Names& names, const Names& kinds,
                 bool all_named) {
  if (names.size() != kinds.size()) throw std::invalid_argument("Expected a kind for each name.");
  std::vector<FeatureColumn> columns(names.size());
  for (size_t i = 0; i < names.size(); ++i) {
    columns[i].name = names[i];
    columns[i].kind = kind_of(kinds[i]);
  }
  ExampleFault fault;
  {
    nb::gil_scoped_release release;
    fault = decode_examples(payloads(bytes, starts, lengths), columns, all_named);
  }
  nb::list made;
  if (fault.what == ExampleFault::What::none)
    for (FeatureColumn& column : columns) {
      nb::object values = column.kind == Kind::integers ? nb::cast(owned(std::move(column.integers)))
                          : column.kind == Kind::floats ? nb::cast(owned(std::move(column.floats)))
                                                        : nb::cast(owned(std::move(column.bytes)));
      made.append(nb::make_tuple(owned(std::move(column.present)), owned(std::move(column.offsets)), values,
                                 owned(std::move(column.byte_offsets))));
    }
  return nb::make_tuple(made, fault_of(fault));
}

nb::tuple summarise(In<uint8_t> bytes, In<int64_t> starts, In<int64_t> lengths) {
  std::map<std::string, FeatureSummary> features;
  ExampleFault fault;
  {
    nb::gil_scoped_release release;
    fault = summarise_examples(payloads(bytes, starts, lengths), features);
  }
  nb::list made;
  for (const auto& [name, summary] : features)
    made.append(nb::make_tuple(nb::bytes(name.data(), name.size()), kKinds[static_cast<size_t>(summary.kind)],
                               summary.single));
  return nb::make_tuple(made, fault_of(fault));
}

void check_values(const FeatureValues& column, size_t rows) {
  const auto check = [](bool good, const char* what) {
    if (!good) throw std::invalid_argument(what);
  };
  check(column.present.size() == rows && column.offsets.size() == rows + 1, "Expected an offset and a flag for each row.");
  size_t count = column.values.size() / (column.kind == Kind::integers ? 8 : 4);
  if (column.kind == Kind::bytes) {
    check(!column.byte_offsets.empty() && column.byte_offsets[0] >= 0, "Values of bytes need offsets.");
    count = column.byte_offsets.size() - 1;
    for (size_t i = 0; i < count; ++i)
      check(column.byte_offsets[i] <= column.byte_offsets[i + 1], "Offsets must not decrease.");
    check(static_cast<size_t>(column.byte_offsets[count]) <= column.values.size(), "Offsets end beyond the bytes.");
  }
  check(column.offsets[0] >= 0, "Offsets must not be negative.");
  for (size_t i = 0; i < rows; ++i) check(column.offsets[i] <= column.offsets[i + 1], "Offsets must not decrease.");
  check(static_cast<size_t>(column.offsets[rows]) <= count, "Offsets end beyond the values.");
}

nb::tuple encode(size_t rows, const Names& names, const Names& kinds, const std::vector<In<uint8_t>>& present,
                 const std::vector<In<int32_t>>& offsets, const std::vector<In<uint8_t>>& values,
                 const std::vector<In<int32_t>>& byte_offsets) {
  const size_t count = names.size();
  if (kinds.size() != count || present.size() != count || offsets.size() != count || values.size() != count ||
      byte_offsets.size() != count)
    throw std::invalid_argument("Expected an entry of each kind for each of " + std::to_string(count) + " columns.");
  std::vector<FeatureValues> columns;
  for (size_t i = 0; i < count; ++i)
    columns.push_back({names[i], kind_of(kinds[i]), view(present[i]), view(offsets[i]), view(values[i]),
                       view(byte_offsets[i])});
  std::vector<uint8_t> made;
  std::vector<int64_t> bounds;
  {
    nb::gil_scoped_release release;
    for (const FeatureValues& column : columns) check_values(column, rows);
    bounds = encode_examples(columns, rows, made);
  }
  return nb::make_tuple(owned(std::move(made)), owned(std::move(bounds)));
}

}  // namespace

void bind_records(nb::module_& m) {
  m.def(
      "masked_crc32c",
      [](In<uint8_t> data) {
        nb::gil_scoped_release release;
        return karvan::masked_crc32c(view(data));
      },
      "data"_a, "CRC-32C, masked as TFRecord and Snappy's frames store it.");
  const char* found = "The starts and lengths of the records, the byte after the last, and the problem there.";
  m.def("find_tfrecords", &tfrecords, "data"_a, "verify"_a, found);
  m.def("find_chunk_records", &chunk_records, "data"_a, "count"_a, found);
  const char* with_frames = "The records data[offsets[i]:offsets[i + 1]] in their frames.";
  m.def("frame_tfrecords", &framed<frame_tfrecords>, "data"_a, "offsets"_a, with_frames);
  m.def("frame_chunk_records", &framed<frame_chunk_records>, "data"_a, "offsets"_a, with_frames);
  m.def("decode_examples", &decode, "data"_a, "starts"_a, "lengths"_a, "names"_a, "kinds"_a, "all_named"_a,
        "Of each named feature: whether records have it, the offsets of their values, the values, and the offsets of "
        "bytes in them; and the problem: a word, the record, the feature, the kind that it has.");
  m.def("summarise_examples", &summarise, "data"_a, "starts"_a, "lengths"_a,
        "The features of the records: name, kind, and whether no record has several values; and the problem.");
  m.def("encode_examples", &encode, "rows"_a, "names"_a, "kinds"_a, "present"_a, "offsets"_a, "values"_a,
        "byte_offsets"_a, "A tf.Example for each row, one after the other, and their bounds.");
}

}  // namespace karvan::bindings
