#include "text/integer_lines.h"

#include <array>
#include <cstring>

namespace karvan {
namespace {

constexpr uint8_t kNoDigit = 255;

constexpr std::array<uint8_t, 256> make_digits() {
  std::array<uint8_t, 256> digits{};
  digits.fill(kNoDigit);
  for (uint8_t i = 0; i < 10; ++i) digits['0' + i] = i;
  for (uint8_t i = 0; i < 6; ++i) digits['a' + i] = digits['A' + i] = static_cast<uint8_t>(10 + i);
  return digits;
}

constexpr auto kDigits = make_digits();

template <unsigned base, int most>
const char* read_digits(const char* at, const char* end, uint64_t& value) {
  const char* const begin = at;
  uint64_t made = 0;
  for (; at != end; ++at) {
    const uint8_t digit = kDigits[static_cast<uint8_t>(*at)];
    if (digit >= base) break;
    made = made * base + digit;
  }
  value = made;
  return at - begin <= most ? at : nullptr;
}

// Where the number ends, or null if it is none that is read here. Minus zero is none: as a float it has a sign.
const char* read_decimal(const char* at, const char* end, uint64_t& value) {
  if (at == end || *at != '-') return read_digits<10, 18>(at, end, value);
  const char* const begin = at + 1;
  at = read_digits<10, 18>(begin, end, value);
  if (at == begin || value == 0) return nullptr;
  value = -value;
  return at;
}

const char* read_cell(Column& column, size_t row, char delimiter, const char* at, const char* end) {
  if (column.cell == Cell::skipped) {
    while (at != end && *at != delimiter && *at != '\n') ++at;
    return at;
  }
  uint64_t value = 0;
  const char* const stop =
      column.cell == Cell::decimal ? read_decimal(at, end, value) : read_digits<16, 16>(at, end, value);
  column.values[row] = static_cast<int64_t>(value);
  if (stop == at) {
    column.present[row / 8] &= static_cast<uint8_t>(~(1u << row % 8));
    ++column.missing;
  }
  return stop;
}

}  // namespace

size_t count_lines(std::string_view text) {
  size_t count = 0;
  for (const char *at = text.data(), *const end = at + text.size(); at != end;) {
    const auto* newline = static_cast<const char*>(std::memchr(at, '\n', static_cast<size_t>(end - at)));
    const char* const stop = newline ? newline : end;
    count += stop - at > 1 || (stop != at && *at != '\r');
    at = newline ? newline + 1 : end;
  }
  return count;
}

bool parse_lines(std::string_view text, char delimiter, std::span<Column> columns, size_t rows) {
  const char* at = text.data();
  const char* const end = at + text.size();
  for (size_t row = 0; row < rows; ++row) {
    for (size_t i = 0; i < columns.size(); ++i) {
      const bool last = i + 1 == columns.size();
      at = read_cell(columns[i], row, delimiter, at, end);
      if (at == nullptr) return false;
      if (at == end) return last && row + 1 == rows;
      if (*at++ != (last ? '\n' : delimiter)) return false;
    }
  }
  return at == end;
}

}  // namespace karvan
