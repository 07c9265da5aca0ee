// Flat columns of Parquet. Addresses of buffers cross as integers: the Python side has made them as large as they must
// be, and keeps them alive.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "bindings/bindings.h"
#include "parquet/column.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace karvan::bindings {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using parquet::ColumnChunk;

ColumnChunk make_chunk(size_t begin, size_t size, size_t rows, unsigned width, bool snappy, bool optional,
                       uintptr_t values, uintptr_t validity) {
  if (width != 4 && width != 8) throw std::invalid_argument("A value must have 4 or 8 bytes.");
  if (!values || (optional && !validity)) throw std::invalid_argument("There must be room for values and validity.");
  return {begin,  size,     rows, width, snappy, optional, reinterpret_cast<void*>(values),
          reinterpret_cast<uint8_t*>(validity)};
}

std::vector<int64_t> decode_chunks(Bytes bytes, const std::vector<ColumnChunk>& chunks, int threads) {
  std::vector<int64_t> nulls(chunks.size());
  nb::gil_scoped_release release;
  parquet::decode({bytes.data(), bytes.size()}, chunks, threads, nulls);
  return nulls;
}

}  // namespace

void bind_parquet(nb::module_& m) {
  nb::class_<ColumnChunk>(m, "ColumnChunk",
                          "A column of a row group: where its pages are, what they hold, and the addresses of room for "
                          "its values and, if they may be null, for their bits.")
      .def("__init__",
           [](ColumnChunk* self, size_t begin, size_t size, size_t rows, unsigned width, bool snappy, bool optional,
              uintptr_t values, uintptr_t validity) {
             new (self) ColumnChunk(make_chunk(begin, size, rows, width, snappy, optional, values, validity));
           },
           "begin"_a, "size"_a, "rows"_a, "width"_a, "snappy"_a, "optional"_a, "values"_a, "validity"_a);
  m.def("decode_chunks", &decode_chunks, "bytes"_a, "chunks"_a, "threads"_a,
        "Decode column chunks of Parquet on up to that many threads. Returns the number of nulls in each, or -1 for one "
        "that another reader must decode; the bits are written if there are nulls.");
}

}  // namespace karvan::bindings
