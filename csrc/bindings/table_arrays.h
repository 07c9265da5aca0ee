// Keys and rows of tables as numpy arrays, and the checks of their sizes.
#pragma once
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "hash/mix.h"
#include "table/table.h"

namespace karvan::bindings {

using Keys = nanobind::ndarray<const int64_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using Floats = nanobind::ndarray<const float, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;
using Counts = nanobind::ndarray<const uint32_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

inline auto to_keys(const std::vector<uint64_t>& hashes) {
  Array<uint64_t> keys(hashes.size());
  for (size_t i = 0; i < hashes.size(); ++i) keys[i] = unmix(hashes[i]);
  return to_numpy<int64_t>(std::move(keys), {hashes.size()});
}

inline auto to_arrays(RowSet set, const RowLayout& layout) {
  const size_t n = set.rows;
  return nanobind::make_tuple(to_numpy<int64_t>(std::move(set.keys), {n}),
                              to_numpy<float>(std::move(set.vectors), {n, layout.dim}),
                              to_numpy<float>(std::move(set.state), {n, layout.state}),
                              to_numpy<uint32_t>(std::move(set.counts), {n}),
                              to_numpy<uint32_t>(std::move(set.last_steps), {n}));
}

inline void expect(const Table& table, const char* what, size_t got, size_t expected) {
  if (got == expected) return;
  throw std::invalid_argument("Table '" + table.config().name + "': expected " + std::to_string(expected) + " " + what +
                              ", got " + std::to_string(got) + ".");
}

}  // namespace karvan::bindings
