// Records of bytes in a row: the frames of TFRecord files, and those inside of a chunk of a RecordIO file.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace karvan::records {

enum class Fault : uint8_t { none, length, data, count };

struct Frames {
  std::vector<int64_t> starts;   // the first byte of each record's payload
  std::vector<int64_t> lengths;  // its number of bytes
  uint64_t end = 0;              // the first byte after the last complete frame
  Fault fault = Fault::none;     // what is wrong with the frame at `end`
};

// TFRecord: u64 length, masked CRC-32C of the length, payload, masked CRC-32C of the payload; all little-endian.
// Stops before a frame that is not complete in the bytes. Without `verify` the last frame may end beyond the bytes, of
// payloads only the length is read, and `end` says where the next frame must start.
Frames find_tfrecords(std::span<const uint8_t> bytes, bool verify);
// The frames of consecutive records: record i is bytes[offsets[i]] to bytes[offsets[i + 1]].
std::vector<uint8_t> frame_tfrecords(std::span<const uint8_t> bytes, std::span<const int64_t> offsets);

// RecordIO: u32 length and payload, for exactly `count` records that exactly fill the bytes.
Frames find_chunk_records(std::span<const uint8_t> bytes, size_t count);
std::vector<uint8_t> frame_chunk_records(std::span<const uint8_t> bytes, std::span<const int64_t> offsets);

}  // namespace karvan::records
