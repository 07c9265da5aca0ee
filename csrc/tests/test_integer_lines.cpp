#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tests/check.h"
#include "tests/tools.h"
#include "text/integer_lines.h"

using namespace karvan;
using karvan::test::below;
using karvan::test::Random;

namespace {

using Cells = std::vector<std::vector<std::optional<int64_t>>>;  // columns of rows

std::optional<Cells> parse(const std::string& text, const std::vector<Cell>& cells, size_t rows) {
  std::vector<std::vector<int64_t>> values(cells.size(), std::vector<int64_t>(rows, 77));
  std::vector<std::vector<uint8_t>> present(cells.size(), std::vector<uint8_t>((rows + 7) / 8, 255));
  std::vector<Column> columns;
  for (size_t i = 0; i < cells.size(); ++i) columns.push_back({cells[i], values[i].data(), present[i].data()});
  if (!parse_lines(text, '\t', columns, rows)) return std::nullopt;
  Cells table(cells.size());
  for (size_t i = 0; i < cells.size(); ++i) {
    if (cells[i] == Cell::skipped) continue;
    size_t missing = 0;
    for (size_t row = 0; row < rows; ++row) {
      const bool there = present[i][row / 8] >> row % 8 & 1;
      table[i].push_back(there ? std::optional(values[i][row]) : std::nullopt);
      missing += !there;
      if (!there) CHECK_EQ(values[i][row], 0);
    }
    CHECK_EQ(columns[i].missing, missing);
  }
  return table;
}

bool reads(const std::string& text, size_t rows) {
  return parse(text, {Cell::decimal, Cell::hexadecimal}, rows).has_value();
}

}  // namespace

TEST(tables_of_integers_are_read_as_they_were_written) {
  Random random(3);
  for (int round = 0; round < 200; ++round) {
    const size_t rows = below(random, 40), width = 2 + below(random, 4);
    std::vector<Cell> cells;
    for (size_t i = 0; i < width; ++i) cells.push_back(static_cast<Cell>(below(random, 3)));
    Cells expected(width);
    std::string text;
    for (size_t row = 0; row < rows; ++row) {
      for (size_t i = 0; i < width; ++i) {
        std::optional<int64_t> value;
        std::string cell;
        if (below(random, 4)) {
          const uint64_t bits = random() >> below(random, 64);
          if (cells[i] == Cell::hexadecimal) {
            char digits[17];
            std::snprintf(digits, sizeof digits, below(random, 2) ? "%llx" : "%08llX",
                          static_cast<unsigned long long>(bits));
            cell = digits, value = static_cast<int64_t>(bits);
          } else {
            value = static_cast<int64_t>(bits % 1000000000000000000) * (below(random, 2) ? -1 : 1);
            cell = cells[i] == Cell::decimal ? std::to_string(*value) : "any text, -0.5";
          }
        }
        if (cells[i] != Cell::skipped) expected[i].push_back(value);
        text += cell + (i + 1 < width ? "\t" : "\n");
      }
    }
    if (rows && below(random, 2)) text.pop_back();
    const auto got = parse(text, cells, rows);
    CHECK(got.has_value());
    if (got) CHECK(*got == expected);
  }
}

TEST(anything_but_plain_integers_is_left_to_others) {
  CHECK(reads("1\tff\n-2\t\n", 2));
  CHECK(reads("\t", 1));
  for (const char* text : {"1.5\tf\n", "-\tf\n", "-0\tf\n", "+1\tf\n", " 1\tf\n", "1\tg\n", "1\t0xf\n", "1\tf\r\n", "1\n",
                           "1\tf\t2\n", "\n", "", "1\tf\n\n", "1\tf\n2\tf\n", "1234567890123456789\tf\n",
                           "1\t12345678901234567\n", "1\t-f\n"})
    CHECK(!reads(text, 1));
  CHECK(!reads("1\tf\n", 2));
  CHECK(!reads("1\tf\n2", 2));
}

TEST(lines_are_counted_unless_they_are_empty) {
  CHECK_EQ(count_lines(""), 0u);
  CHECK_EQ(count_lines("\n\r\n\n"), 0u);
  CHECK_EQ(count_lines("\r"), 0u);
  CHECK_EQ(count_lines("a"), 1u);
  CHECK_EQ(count_lines("a\n\nb\r\n\r\nc"), 3u);
  CHECK_EQ(count_lines("\rx\n \n"), 2u);
}
