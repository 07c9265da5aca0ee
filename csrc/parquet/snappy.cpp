#include "parquet/snappy.h"

#include <array>
#include <cstring>

namespace karvan::parquet {
namespace {

constexpr size_t kWide = 16;

inline void copy8(uint8_t* to, const uint8_t* from) {
  uint64_t word;
  std::memcpy(&word, from, 8);
  std::memcpy(to, &word, 8);
}

inline void copy16(uint8_t* to, const uint8_t* from) {
  unsigned char wide[kWide];
  std::memcpy(wide, from, kWide);
  std::memcpy(to, wide, kWide);
}

constexpr uint8_t kFurther[8] = {0, 8, 8, 9, 8, 10, 12, 14};  // the first multiple that is 8 or more

// Repeats what lies `offset` before `to`, up to 64 bytes, and may write up to 15 more than that.
inline void repeat(uint8_t* to, size_t offset, size_t length) {
  const uint8_t* from = to - offset;
  uint8_t* const stop = to + length;
  if (offset >= kWide) {
    copy16(to, from);
    while ((to += kWide) < stop) copy16(to, from += kWide);
    return;
  }
  if (offset < 8) {
    // After eight bytes one by one, the pattern can be taken from further back, a multiple of its length.
    for (int i = 0; i < 8; ++i) to[i] = from[i];
    to += 8;
    from = to - kFurther[offset];
    if (to >= stop) return;
  }
  copy8(to, from);
  while ((to += 8) < stop) copy8(to, from += 8);
}

bool read_length(const uint8_t*& at, const uint8_t* end, size_t& length) {
  length = 0;
  for (int shift = 0; shift < 35 && at != end; shift += 7) {
    const uint8_t byte = *at++;
    length |= size_t{byte & 127u} << shift;
    if (byte < 128) return length <= UINT32_MAX;
  }
  return false;
}

inline uint32_t load32(const uint8_t* bytes) {
  uint32_t word;
  std::memcpy(&word, bytes, 4);
  return word;
}

// What a tag says about a copy, so that the three kinds of them, which come in no order, need no branch.
struct Copy {
  uint8_t length;
  uint8_t bytes;    // of the offset, behind the tag
  uint16_t offset;  // the part of it that is in the tag
};

constexpr std::array<Copy, 256> make_copies() {
  std::array<Copy, 256> copies{};
  for (unsigned tag = 0; tag < 256; ++tag) {
    const auto length = static_cast<uint8_t>((tag >> 2) + 1);
    if ((tag & 3) == 1) copies[tag] = {static_cast<uint8_t>((tag >> 2 & 7) + 4), 1, static_cast<uint16_t>(tag >> 5 << 8)};
    if ((tag & 3) == 2) copies[tag] = {length, 2, 0};
    if ((tag & 3) == 3) copies[tag] = {length, 4, 0};
  }
  return copies;
}

constexpr auto kCopies = make_copies();
constexpr uint32_t kMasks[5] = {0, 0xFF, 0xFFFF, 0, 0xFFFFFFFF};

// Elements are read in two ways. Far from both ends nothing can go wrong but offsets; near them every step is checked.
class Block {
 public:
  Block(const uint8_t* at, const uint8_t* end, uint8_t* out, size_t size)
      : at_(at), end_(end), out_(out), to_(out), stop_(out + size) {}

  bool run() {
    while (at_ != end_) {
      if (left() > kFar && room() > kFar) {
        if (!read_far()) return false;
      } else if (!read_near()) {
        return false;
      }
    }
    return to_ == stop_;
  }

 private:
  static constexpr size_t kFar = 72;  // more than any copy or short literal reads or writes

  size_t left() const { return static_cast<size_t>(end_ - at_); }
  size_t room() const { return static_cast<size_t>(stop_ - to_); }

  bool read_far() {
    const uint8_t* at = at_;
    uint8_t* to = to_;
    const uint8_t* const far_at = end_ - kFar;
    uint8_t* const far_to = stop_ - kFar;
    do {
      const uint8_t tag = *at++;
      if ((tag & 3) == 0) {
        const size_t length = (tag >> 2) + 1u;
        if (length > 60) {
          --at;
          break;
        }
        copy16(to, at);
        if (length > kWide)
          for (size_t i = kWide; i < 64; i += kWide) copy16(to + i, at + i);
        at += length;
        to += length;
        continue;
      }
      const Copy copy = kCopies[tag];
      const size_t offset = copy.offset | (load32(at) & kMasks[copy.bytes]);
      at += copy.bytes;
      if (offset - 1 >= static_cast<size_t>(to - out_)) return false;
      repeat(to, offset, copy.length);
      to += copy.length;
    } while (at < far_at && to < far_to);
    at_ = at;
    to_ = to;
    // A long literal may be all there is.
    return (at < far_at && to < far_to) ? read_near() : true;
  }

  bool read_near() {
    const uint8_t tag = *at_++;
    if ((tag & 3) == 0) {
      size_t length = (tag >> 2) + 1u;
      if (length > 60) {
        const size_t bytes = length - 60;
        if (bytes > left()) return false;
        length = 0;
        for (size_t i = 0; i < bytes; ++i) length |= size_t{*at_++} << 8 * i;
        ++length;
      }
      if (length > left() || length > room()) return false;
      std::memcpy(to_, at_, length);
      at_ += length;
      to_ += length;
      return true;
    }
    const Copy copy = kCopies[tag];
    if (copy.bytes > left() || copy.length > room()) return false;
    size_t offset = copy.offset;
    for (size_t i = 0; i < copy.bytes; ++i) offset |= size_t{*at_++} << 8 * i;
    if (offset - 1 >= static_cast<size_t>(to_ - out_)) return false;
    repeat(to_, offset, copy.length);
    to_ += copy.length;
    return true;
  }

  const uint8_t* at_;
  const uint8_t* end_;
  uint8_t* out_;
  uint8_t* to_;
  uint8_t* stop_;
};

}  // namespace

bool snappy_uncompress(std::span<const uint8_t> block, uint8_t* out, size_t size) {
  const uint8_t* at = block.data();
  const uint8_t* const end = at + block.size();
  size_t promised = 0;
  return read_length(at, end, promised) && promised == size && Block(at, end, out, size).run();
}

}  // namespace karvan::parquet
