// Frames of records and tf.Example: round trips, and damage that must be found without reading beyond the bytes.
#include <sys/mman.h>

#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "hash/mix.h"
#include "records/examples.h"
#include "records/frames.h"

using namespace karvan;
using namespace karvan::records;

namespace {

std::vector<uint8_t> some_examples(std::vector<int64_t>& bounds) {
  const std::vector<uint8_t> present = {1, 0, 1};
  const std::vector<int32_t> offsets = {0, 2, 2, 3}, byte_offsets = {0, 1, 1, 4};
  const std::vector<int64_t> ids = {-1, 300, 7};
  const std::vector<float> scores = {0.5f, 1, 2};
  const std::string text = "abcd";
  const auto bytes = [](const void* data, size_t size) { return std::span(static_cast<const uint8_t*>(data), size); };
  const std::vector<FeatureValues> columns = {
      {"ids", Kind::integers, present, offsets, bytes(ids.data(), 24), {}},
      {"scores", Kind::floats, present, offsets, bytes(scores.data(), 12), {}},
      {"text", Kind::bytes, present, offsets, bytes(text.data(), 4), byte_offsets},
  };
  std::vector<uint8_t> out;
  bounds = encode_examples(columns, 3, out);
  return out;
}

ExampleFault decode(const std::vector<uint8_t>& data, const std::vector<int64_t>& starts,
                    const std::vector<int64_t>& lengths, std::vector<FeatureColumn>& columns) {
  columns.assign(3, {});
  const char* names[] = {"text", "ids", "scores"};
  const Kind kinds[] = {Kind::bytes, Kind::integers, Kind::floats};
  for (int i = 0; i < 3; ++i) {
    columns[i].name = names[i];
    columns[i].kind = kinds[i];
  }
  return decode_examples({data, starts, lengths}, columns, true);
}

}  // namespace

TEST(records_in_frames_are_found_and_damage_is_too) {
  std::vector<int64_t> bounds;
  const std::vector<uint8_t> data = some_examples(bounds);
  const std::vector<uint8_t> framed = frame_tfrecords(data, bounds);
  const Frames whole = find_tfrecords(framed, true);
  CHECK_EQ(whole.starts.size(), 3u);
  CHECK_EQ(whole.end, framed.size());
  for (size_t i = 0; i < 3; ++i) CHECK_EQ(whole.lengths[i], bounds[i + 1] - bounds[i]);
  for (size_t size = 0; size < framed.size(); ++size) {
    const std::vector<uint8_t> cut(framed.begin(), framed.begin() + static_cast<ptrdiff_t>(size));
    CHECK(find_tfrecords(cut, true).starts.size() < 3);
    find_tfrecords(cut, false);
    std::vector<uint8_t> damaged = framed;
    damaged[size] ^= 4;
    CHECK(find_tfrecords(damaged, true).fault != Fault::none);
  }
  const std::vector<uint8_t> chunk = frame_chunk_records(data, bounds);
  CHECK(find_chunk_records(chunk, 3).fault == Fault::none);
  CHECK(find_chunk_records(chunk, 2).fault == Fault::count);
  for (size_t size = 1; size < chunk.size(); ++size)
    CHECK(find_chunk_records(std::vector<uint8_t>(chunk.begin(), chunk.begin() + static_cast<ptrdiff_t>(size)), 3).fault !=
          Fault::none);
}

TEST(examples_come_back_and_damaged_ones_are_read_within_their_bytes) {
  std::vector<int64_t> bounds;
  const std::vector<uint8_t> data = some_examples(bounds);
  const std::vector<int64_t> starts(bounds.begin(), bounds.end() - 1);
  std::vector<int64_t> lengths;
  for (size_t i = 0; i < 3; ++i) lengths.push_back(bounds[i + 1] - bounds[i]);
  std::vector<FeatureColumn> columns;
  CHECK(decode(data, starts, lengths, columns).what == ExampleFault::What::none);
  CHECK(columns[0].bytes == (std::vector<uint8_t>{'a', 'b', 'c', 'd'}));
  CHECK(columns[0].byte_offsets == (std::vector<int32_t>{0, 1, 1, 4}));
  CHECK(columns[1].integers == (std::vector<int64_t>{-1, 300, 7}));
  CHECK(columns[2].floats == (std::vector<float>{0.5f, 1, 2}));
  for (const FeatureColumn& column : columns) {
    CHECK(column.present == (std::vector<uint8_t>{1, 0, 1}));
    CHECK(column.offsets == (std::vector<int32_t>{0, 2, 2, 3}));
  }
  uint64_t state = 1;
  for (int round = 0; round < 20000; ++round) {
    // A copy of one record, so that a sanitizer sees the first byte that is read beyond it.
    std::vector<uint8_t> record(data.begin(), data.begin() + bounds[1]);
    for (int i = 0; i < 3; ++i) {
      state = mix(state + 1);
      record[state % record.size()] = static_cast<uint8_t>(state >> 32);
    }
    record.resize(record.size() - mix(state) % 4);
    const auto size = static_cast<int64_t>(record.size());
    decode(record, {0}, {size}, columns);
    std::map<std::string, FeatureSummary> features;
    const std::vector<int64_t> start = {0}, length = {size};
    summarise_examples({record, start, length}, features);
  }
}

TEST(records_of_a_chunk_may_have_four_gigabytes_and_never_more_than_it_has) {
  const size_t size = (size_t{1} << 32) + 8;
  void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return;  // a machine without so many addresses
  const uint32_t length = 0xFFFFFFFC;  // with its own four bytes, 2^32
  std::memcpy(at, &length, sizeof length);
  const Frames found = find_chunk_records({static_cast<const uint8_t*>(at), size}, 3);
  munmap(at, size);
  CHECK(found.fault == Fault::none);
  CHECK_EQ(found.end, size);
  CHECK_EQ(found.lengths[0], int64_t{length});
  const std::vector<uint8_t> zeros(64);
  CHECK(find_chunk_records(zeros, 15).fault == Fault::count);
  CHECK(find_chunk_records(zeros, 17).fault == Fault::count);
  CHECK(find_chunk_records(zeros, 16).fault == Fault::none);
  CHECK(find_chunk_records(std::span(zeros).first(3), 1).fault == Fault::length);
  CHECK(find_chunk_records({}, 0).fault == Fault::none);
}

TEST(a_feature_in_many_pieces_is_read_in_a_time_that_grows_with_its_size) {
  // Features.feature: its name "ids", then 2^22 messages, each an empty list of integers; copying all at each takes hours.
  const size_t pieces = size_t{1} << 22;
  std::vector<uint8_t> entry = {0x0a, 3, 'i', 'd', 's'};
  for (size_t i = 0; i < pieces; ++i) entry.insert(entry.end(), {0x12, 2, 0x1a, 0});
  const auto wrapped = [](const std::vector<uint8_t>& content) {
    std::vector<uint8_t> field = {0x0a};
    for (uint64_t size = content.size();; size >>= 7) {
      field.push_back(static_cast<uint8_t>(size < 128 ? size : size | 128));
      if (size < 128) break;
    }
    field.insert(field.end(), content.begin(), content.end());
    return field;
  };
  const std::vector<uint8_t> record = wrapped(wrapped(entry));
  std::vector<FeatureColumn> columns;
  decode(record, {0}, {static_cast<int64_t>(record.size())}, columns);
  CHECK_EQ(columns[1].present[0], 1u);
}
