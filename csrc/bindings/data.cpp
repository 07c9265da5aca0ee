// What turns data into numbers: text into integers, numbers into their logarithms.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "bindings/bindings.h"
#include "math/log1p.h"
#include "text/integer_lines.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace karvan::bindings {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatsOut = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Values = nb::ndarray<int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bits = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::string_view view(const Bytes& text) { return {reinterpret_cast<const char*>(text.data()), text.size()}; }

size_t count(Bytes text) {
  nb::gil_scoped_release release;
  return count_lines(view(text));
}

std::optional<std::vector<size_t>> parse(Bytes text, char delimiter, const std::vector<int>& bases, Values values,
                                         Bits present) {
  std::vector<Column> columns(bases.size());
  const size_t rows = values.shape(1);
  size_t made = 0;
  for (size_t i = 0; i < bases.size(); ++i) {
    if (bases[i] == 0) continue;
    if (bases[i] != 10 && bases[i] != 16) throw std::invalid_argument("A base must be 0 (not read), 10 or 16.");
    if (made < values.shape(0) && made < present.shape(0))
      columns[i] = {bases[i] == 10 ? Cell::decimal : Cell::hexadecimal, values.data() + made * rows,
                    present.data() + made * present.shape(1)};
    ++made;
  }
  if (values.shape(0) != made || present.shape(0) != made || present.shape(1) != (rows + 7) / 8)
    throw std::invalid_argument("Expected a row of values and one of bits for each of " + std::to_string(made) +
                                " columns.");
  {
    nb::gil_scoped_release release;
    if (!parse_lines(view(text), delimiter, columns, rows)) return std::nullopt;
  }
  std::vector<size_t> missing;
  for (const Column& column : columns)
    if (column.cell != Cell::skipped) missing.push_back(column.missing);
  return missing;
}

void log1p_of(const std::vector<Floats>& values, const std::vector<FloatsOut>& out, const std::vector<float>& low,
              const std::vector<float>& high) {
  const size_t count = values.size();
  if (out.size() != count || low.size() != count || high.size() != count)
    throw std::invalid_argument("Expected an out, a low and a high for each of " + std::to_string(count) + " arrays.");
  for (size_t i = 0; i < count; ++i)
    if (out[i].size() != values[i].size())
      throw std::invalid_argument("out must have " + std::to_string(values[i].size()) + " entries, but has " +
                                  std::to_string(out[i].size()) + ".");
  nb::gil_scoped_release release;
  for (size_t i = 0; i < count; ++i)
    karvan::log1p(values[i].data(), values[i].size(), out[i].data(), {low[i], high[i]});
}

}  // namespace

void bind_data(nb::module_& m) {
  m.def("count_lines", &count, "text"_a, "How many lines are not empty.");
  m.def("parse_lines", &parse, "text"_a, "delimiter"_a, "bases"_a, "values"_a.noconvert(), "present"_a.noconvert(),
        "Read a table of integers: a base for each column (0: not read), and for each that is read a row of values "
        "and one of bits, all set, of which those of empty cells are cleared. Returns how many those are in each, "
        "or None if the text is anything else than such a table.");
  m.def("log1p", &log1p_of, "values"_a, "out"_a, "low"_a, "high"_a,
        "For each array of values, out[i] becomes log(1 + values[i]), after values outside of low and high are moved to "
        "the nearest.");
}

}  // namespace karvan::bindings
