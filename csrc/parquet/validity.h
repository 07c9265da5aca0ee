// Which values of a column are there, as Arrow's bits; definition levels become them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

namespace karvan::parquet {

// Bits are written only from the first null on: most columns have none.
class Validity {
 public:
  explicit Validity(uint8_t* bits) : bits_(bits) {}

  void append(bool present, size_t count);
  void append(std::span<const uint8_t> packed, size_t count);

  // Levels of so many rows, none of them above 1. False if they are anything else.
  bool append_levels(std::span<const uint8_t> bytes, size_t rows);

  size_t rows() const { return rows_; }
  size_t nulls() const { return nulls_; }
  bool operator[](size_t row) const { return bits_[row / 8] >> row % 8 & 1; }

 private:
  void begin();

  uint8_t* bits_;  // those of the last byte that are behind the last row are zeros, once there are nulls
  size_t rows_ = 0;
  size_t nulls_ = 0;
};

}  // namespace karvan::parquet
