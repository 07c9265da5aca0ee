// Captures: tables as they were at one moment.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <tuple>

#include "batch/lookup_log.h"
#include "bindings/bindings.h"
#include "bindings/table_arrays.h"
#include "threads/pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace karvan::bindings {
namespace {

using Wanted = std::tuple<std::shared_ptr<Table>, uint32_t, std::optional<uint64_t>>;

std::vector<std::unique_ptr<Capture>> capture(const std::vector<Wanted>& tables, bool track, LookupLog* log) {
  std::vector<std::unique_ptr<Capture>> made;
  nb::gil_scoped_release release;
  try {
    Exclusive exclusive;
    for (const auto& [table, parts, since] : tables)
      made.push_back(Table::capture(table, parts, track, since,
                                    log ? log->corrections(*table) : std::vector<Correction>()));
  } catch (...) {
    made.clear();  // closing takes the right to operate, which must have been released
    throw;
  }
  return made;
}

}  // namespace

void bind_capture(nb::module_& m) {
  nb::class_<Capture>(m, "Capture", "A table as it was at one moment, read part by part while training continues.")
      .def("part",
           [](Capture& c, uint32_t part) {
             RowSet set = [&] {
               nb::gil_scoped_release release;
               return c.part(part);
             }();
             return to_arrays(std::move(set), c.layout());
           },
           "part"_a, "The rows of a part; each part once, in ascending order.")
      .def("erased", [](const Capture& c) { return to_keys(c.erased()); },
           "Keys removed since the previous capture; some may have rows again.")
      .def("close",
           [](Capture& c) {
             nb::gil_scoped_release release;
             c.close();
           })
      .def_prop_ro("version", &Capture::version)
      .def_prop_ro("parts", &Capture::parts)
      .def_prop_ro("kept", &Capture::kept, "Rows that were copied because training was about to change them.");
  m.def("capture", &capture, "tables"_a, "track"_a, "log"_a.none() = nb::none(),
        "Captures (table, parts, since) all at one moment. With a version as `since`, only what changed after it. With a "
        "log, without its lookups in flight.");
}

}  // namespace karvan::bindings
