// Parquet's hybrid of run lengths and packed bits, which levels and dictionary indices are written in.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

namespace karvan::parquet {

// One value `count` times, or `count` values packed side by side, lowest bits first.
struct Run {
  size_t count = 0;
  uint32_t value = 0;
  std::span<const uint8_t> packed;
  bool is_packed = false;
};

// The runs of a known number of values of `width` bits, up to 32.
class Runs {
 public:
  Runs(std::span<const uint8_t> bytes, unsigned width, size_t values)
      : at_(bytes.data()), end_(at_ + bytes.size()), width_(width), left_(values) {}

  // False at the end, and for whatever no careful writer makes: an empty run, one that goes beyond the last value.
  bool next(Run& run);

  // Whether the values have all come, and took all bytes.
  bool is_complete() const { return left_ == 0 && at_ == end_; }

 private:
  const uint8_t* at_;
  const uint8_t* end_;
  unsigned width_;
  size_t left_;
};

constexpr size_t kUnpackRoom = 8;  // values behind the last one that `unpack` may write

// The first `count` of the packed values, which must begin at a whole byte and all be there.
void unpack(std::span<const uint8_t> packed, unsigned width, size_t count, uint32_t* out);

}  // namespace karvan::parquet
