#include "records/frames.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "hash/crc32c.h"

namespace karvan::records {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr uint64_t kHead = 12, kTail = 4;

template <class Number>
Number load(const uint8_t* at) {
  Number number;
  std::memcpy(&number, at, sizeof number);
  return number;
}

template <class Number>
uint8_t* store(uint8_t* at, Number number) {
  std::memcpy(at, &number, sizeof number);
  return at + sizeof number;
}

}  // namespace

Frames find_tfrecords(std::span<const uint8_t> bytes, bool verify) {
  Frames found;
  const uint64_t size = bytes.size();
  while (found.end <= size && size - found.end >= kHead) {
    const uint8_t* head = bytes.data() + found.end;
    const auto length = load<uint64_t>(head);
    // A length that no file can have is damage, even if its checksum fits.
    if (masked_crc32c({head, 8}) != load<uint32_t>(head + 8) || length >> 62) {
      found.fault = Fault::length;
      break;
    }
    const uint64_t start = found.end + kHead;
    if (verify) {
      if (length + kTail > size - start) break;
      if (masked_crc32c({bytes.data() + start, length}) != load<uint32_t>(bytes.data() + start + length)) {
        found.fault = Fault::data;
        break;
      }
    }
    found.starts.push_back(static_cast<int64_t>(start));
    found.lengths.push_back(static_cast<int64_t>(length));
    found.end = start + length + kTail;
  }
  return found;
}

std::vector<uint8_t> frame_tfrecords(std::span<const uint8_t> bytes, std::span<const int64_t> offsets) {
  const size_t count = offsets.size() - 1;
  std::vector<uint8_t> framed(static_cast<size_t>(offsets[count] - offsets[0]) + count * (kHead + kTail));
  uint8_t* at = framed.data();
  for (size_t i = 0; i < count; ++i) {
    const std::span payload = bytes.subspan(offsets[i], offsets[i + 1] - offsets[i]);
    const uint8_t* head = at;
    at = store<uint64_t>(at, payload.size());
    at = store(at, masked_crc32c({head, 8}));
    if (!payload.empty()) std::memcpy(at, payload.data(), payload.size());
    at = store(at + payload.size(), masked_crc32c(payload));
  }
  return framed;
}

Frames find_chunk_records(std::span<const uint8_t> bytes, size_t count) {
  Frames found;
  const uint64_t size = bytes.size();
  const size_t most = std::min<uint64_t>(count, size / 4);
  found.starts.reserve(most);
  found.lengths.reserve(most);
  while (found.end < size && found.starts.size() < count) {
    const uint64_t left = size - found.end;
    const uint64_t length = left < 4 ? left : load<uint32_t>(bytes.data() + found.end);
    if (left < 4 || length > left - 4) {
      found.fault = Fault::length;
      return found;
    }
    found.starts.push_back(static_cast<int64_t>(found.end + 4));
    found.lengths.push_back(static_cast<int64_t>(length));
    found.end += 4 + length;
  }
  if (found.starts.size() != count || found.end != size) found.fault = Fault::count;
  return found;
}

std::vector<uint8_t> frame_chunk_records(std::span<const uint8_t> bytes, std::span<const int64_t> offsets) {
  const size_t count = offsets.size() - 1;
  std::vector<uint8_t> framed(static_cast<size_t>(offsets[count] - offsets[0]) + count * 4);
  uint8_t* at = framed.data();
  for (size_t i = 0; i < count; ++i) {
    const std::span payload = bytes.subspan(offsets[i], offsets[i + 1] - offsets[i]);
    at = store(at, static_cast<uint32_t>(payload.size()));
    if (!payload.empty()) std::memcpy(at, payload.data(), payload.size());
    at += payload.size();
  }
  return framed;
}

}  // namespace karvan::records
