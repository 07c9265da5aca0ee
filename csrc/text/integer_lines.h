// Lines of text, and tables of integers in them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace karvan {

// Lines that hold something besides their end, "\n" or "\r\n"; the last one needs no end.
size_t count_lines(std::string_view text);

enum class Cell : uint8_t { skipped, decimal, hexadecimal };

struct Column {
  Cell cell = Cell::skipped;
  int64_t* values = nullptr;  // one for each row; 0 where the cell is empty
  uint8_t* present = nullptr;  // a bit for each row, all set before; cleared where the cell is empty
  size_t missing = 0;          // becomes the number of empty cells
};

// Reads exactly `rows` lines of one cell for each column. Cells are empty, or integers of up to 18 decimal or 16
// hexadecimal digits. For anything else it returns false, with the columns partly filled: the caller has a slower parser
// that knows everything that is allowed, and reports what is not.
bool parse_lines(std::string_view text, char delimiter, std::span<Column> columns, size_t rows);

}  // namespace karvan
