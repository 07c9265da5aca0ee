// tf.Example, TensorFlow's record of named features: its protocol buffer read into columns, and written from them.
//
//   Example  = 1: Features        Feature   = one of 1: BytesList, 2: FloatList, 3: Int64List
//   Features = 1: map entries     each list = 1: values, numbers packed into one field or one field each
//   entry    = 1: name, 2: Feature
//
// Read as protocol buffers are: fields in any order, unknown ones inside of a feature skipped, of a name that comes twice
// the last one. Unknown fields of Example and Features are faults: a SequenceExample has them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace karvan::records {

enum class Kind : uint8_t { none, bytes, floats, integers };

// The values of one feature in many records.
struct FeatureColumn {
  std::string name;
  Kind kind = Kind::none;
  std::vector<uint8_t> present;   // for each record, whether it has the feature
  std::vector<int32_t> offsets;   // of the values of each record; one more than there are records
  std::vector<int64_t> integers;  // the values, one of these three
  std::vector<float> floats;
  std::vector<uint8_t> bytes;
  std::vector<int32_t> byte_offsets;  // of each value in `bytes`; one more than there are values
};

struct ExampleFault {
  enum class What : uint8_t { none, malformed, kind, unknown, size } what = What::none;
  size_t record = 0;
  std::string feature;      // of `kind` and `unknown`
  Kind found = Kind::none;  // of `kind`
};

struct Payloads {
  std::span<const uint8_t> bytes;
  std::span<const int64_t> starts, lengths;  // within the bytes: the caller has checked it
};

// Reads the features that the columns name. With `all_named`, a feature of another name is a fault.
ExampleFault decode_examples(const Payloads& records, std::vector<FeatureColumn>& columns, bool all_named);

struct FeatureSummary {
  Kind kind = Kind::none;
  bool single = true;  // no record has more than one value
};

// The features that the records have. One that has two kinds is a fault.
ExampleFault summarise_examples(const Payloads& records, std::map<std::string, FeatureSummary>& features);

// What is written of a feature; as in FeatureColumn, with the bytes of numbers in `values`.
struct FeatureValues {
  std::string name;
  Kind kind;
  std::span<const uint8_t> present;
  std::span<const int32_t> offsets;
  std::span<const uint8_t> values;
  std::span<const int32_t> byte_offsets;
};

// An Example for each row, one after the other; gives their bounds, one more than there are rows.
std::vector<int64_t> encode_examples(std::span<const FeatureValues> columns, size_t rows, std::vector<uint8_t>& out);

}  // namespace karvan::records
