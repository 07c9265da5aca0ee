// Tables: their rows, lookups and updates of distinct keys, policies.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <optional>
#include <tuple>

#include "batch/lookup_log.h"
#include "bindings/bindings.h"
#include "bindings/names.h"
#include "bindings/operation.h"
#include "bindings/table_arrays.h"
#include "kernels/kernels.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace karvan::bindings {
namespace {

const std::map<std::string, VectorType> kTypes = {
    {"float32", VectorType::f32}, {"bfloat16", VectorType::bf16}, {"float16", VectorType::f16}};
const std::map<std::string, Admission::Kind> kAdmissions = {{"always", Admission::Kind::always},
                                                            {"probability", Admission::Kind::probability},
                                                            {"probability_each", Admission::Kind::probability_each},
                                                            {"min_count", Admission::Kind::min_count},
                                                            {"read_only", Admission::Kind::read_only}};
const std::map<std::string, Eviction::Kind> kEvictions = {
    {"never", Eviction::Kind::never}, {"lru", Eviction::Kind::lru}, {"lfu", Eviction::Kind::lfu},
    {"age", Eviction::Kind::age},     {"ttl", Eviction::Kind::ttl}, {"norm", Eviction::Kind::norm}};

std::shared_ptr<Table> make_table(std::string name, uint32_t dim, const std::string& dtype,
                                  const std::tuple<std::string, float, float, float, float>& init, uint64_t seed,
                                  const std::tuple<std::string, double, uint64_t>& admit,
                                  const std::tuple<std::string, double, uint64_t>& evict, uint32_t shards) {
  TableConfig config;
  config.name = std::move(name);
  config.dim = dim;
  config.type = named(kTypes, dtype, "dtype");
  const auto& [kind, a, b, lo, hi] = init;
  config.init = make_initialiser(kind, a, b, lo, hi);
  config.seed = seed;
  config.admit.kind = named(kAdmissions, std::get<0>(admit), "admission");
  config.admit.probability = std::get<1>(admit);
  config.admit.min_count = static_cast<uint32_t>(std::get<1>(admit));
  config.admit.slots = std::get<2>(admit);
  config.evict.kind = named(kEvictions, std::get<0>(evict), "eviction");
  const double value = std::get<1>(evict);
  config.evict.capacity = config.evict.steps = static_cast<uint64_t>(value);
  config.evict.seconds = value;
  config.evict.below = static_cast<float>(value);
  config.evict.every = std::get<2>(evict);
  config.shards = shards;
  return std::make_shared<Table>(std::move(config));
}

auto evicted_since(const Table& table, uint64_t version) {
  if (!table.evictions().knows(version))
    throw std::invalid_argument("Table '" + table.config().name + "' remembers evictions since version " +
                                std::to_string(table.evictions().forgotten()) + ", but was asked for version " +
                                std::to_string(version) + ": take a full snapshot instead.");
  std::vector<uint64_t> hashes;
  table.evictions().each_since(version, [&](uint64_t hash) { hashes.push_back(hash); });
  return to_keys(hashes);
}

void load(Table& table, const Keys& keys, const Floats& vectors, const std::optional<Floats>& state,
          const Counts& counts, const Counts& last_steps) {
  const size_t n = keys.shape(0);
  expect(table, "rows of vectors", vectors.shape(0), n);
  expect(table, "columns of vectors", vectors.shape(1), table.layout().dim);
  expect(table, "counts", counts.shape(0), n);
  expect(table, "last steps", last_steps.shape(0), n);
  if (state) expect(table, "rows of state", state->shape(0), n);
  operation([&] {
    if (state) expect(table, "floats of optimizer state", state->shape(1), table.layout().state);
    table.load(reinterpret_cast<const uint64_t*>(keys.data()), n, vectors.data(), state ? state->data() : nullptr,
               counts.data(), last_steps.data());
  });
}

auto lookup(Table& table, const Keys& keys, const Counts& counts, bool training, uint32_t step, double now) {
  const size_t n = keys.shape(0), dim = table.layout().dim;
  expect(table, "counts", counts.shape(0), n);
  Array<float> vectors(n * dim);
  const uint64_t version = operation([&] {
    table.lookup(reinterpret_cast<const uint64_t*>(keys.data()), counts.data(), n, training, step, vectors.data());
    const uint64_t at = table.version();  // rows removed from now on were removed after the lookup
    if (training) table.maintain(step, now);
    return at;
  });
  return nb::make_tuple(to_numpy<float>(std::move(vectors), {n, dim}), version);
}

void apply(Table& table, const std::vector<std::tuple<Keys, Floats, uint64_t>>& pushes, const Rule& rule,
           uint64_t step) {
  std::vector<Table::Push> raw;
  for (const auto& [keys, gradients, version] : pushes) {
    expect(table, "gradients", gradients.shape(0), keys.shape(0));
    expect(table, "columns of gradients", gradients.shape(1), table.layout().dim);
    raw.push_back({reinterpret_cast<const uint64_t*>(keys.data()), keys.shape(0), gradients.data(), version});
  }
  operation([&] {
    expect(table, "floats of optimizer state", state_floats(rule.kind, table.layout().dim), table.layout().state);
    table.apply(raw, rule, step);
  });
}

}  // namespace

void bind_table(nb::module_& m) {
  nb::class_<Table>(m, "Table", "64-bit keys and their rows.")
      .def(nb::new_(&make_table), "name"_a, "dim"_a, "dtype"_a, "init"_a, "seed"_a, "admit"_a, "evict"_a, "shards"_a)
      .def_prop_ro("name", [](const Table& t) { return t.config().name; })
      .def_prop_ro("dim", [](const Table& t) { return t.layout().dim; })
      .def_prop_ro("rows", [](const Table& t) { return operation([&] { return t.rows(); }); })
      .def_prop_ro("bytes", [](const Table& t) { return operation([&] { return t.bytes(); }); })
      .def_prop_ro("version", [](const Table& t) { return operation([&] { return t.version(); }); })
      .def("stats",
           [](const Table& t) {
             const TableStats s = operation([&] { return t.stats(); });
             nb::dict d;
             d["rows"] = s.rows;
             d["bytes"] = s.bytes;
             d["inserted"] = s.inserted;
             d["evicted"] = s.evicted;
             d["rejected"] = s.rejected;
             d["dropped_gradients"] = s.dropped_gradients;
             d["skipped_updates"] = s.skipped_updates;
             d["moved"] = s.moved;
             return d;
           })
      .def("set_state",
           [](Table& t, const std::vector<float>& initial, bool fresh) {
             operation([&] { t.set_state(initial, fresh); });
           },
           "initial"_a, "fresh"_a)
      .def("lookup", &lookup, "keys"_a, "counts"_a, "training"_a, "step"_a, "now"_a)
      .def("apply", &apply, "pushes"_a, "rule"_a, "step"_a)
      .def("count_skipped", [](Table& t) { t.skipped_updates.fetch_add(1); })
      .def("evict", [](Table& t, uint64_t step, double now) { return operation([&] { return t.evict(step, now); }); },
           "step"_a, "now"_a)
      .def("erase",
           [](Table& t, const Keys& keys) {
             return operation([&] {
               return t.erase_keys(reinterpret_cast<const uint64_t*>(keys.data()), keys.shape(0));
             });
           },
           "keys"_a)
      .def("clear", [](Table& t) { operation([&] { t.clear(); }); })
      .def("evicted_since", &evicted_since, "version"_a)
      .def("snapshot",
           [](Table& t, uint32_t part, uint32_t parts) {
             RowLayout layout;
             RowSet rows = operation([&] {
               layout = t.layout();  // attaching another optimizer changes it
               return t.snapshot(part, parts);
             });
             return to_arrays(std::move(rows), layout);
           },
           "part"_a = 0, "parts"_a = 1)
      .def("load", &load, "keys"_a, "vectors"_a, "state"_a.none(), "counts"_a, "last_steps"_a)
      .def("clock",
           [](Table& t) {
             return operation([&] { return t.clock(); });
           },
           "Steps and their times, which a time to live is measured by.")
      .def("set_clock",
           [](Table& t, std::vector<std::pair<uint64_t, double>> clock) {
             operation([&] { t.clock() = std::move(clock); });
           },
           "clock"_a)
      .def("filter_counts",
           [](Table& t, LookupLog* log) {
             Array<uint8_t> copy(t.filter().bytes());
             operation([&] {
               if (!copy) return;
               std::copy_n(t.filter().data(), t.filter().bytes(), reinterpret_cast<char*>(copy.data()));
               if (log) log->correct_filter(t, copy.data());
             });
             const size_t n = copy.size();
             return to_numpy<uint8_t>(std::move(copy), {n});
           },
           "log"_a.none() = nb::none(),
           "The admission filter's counters, to be saved with the rows; with a log, without its lookups in flight.")
      .def("set_filter_counts",
           [](Table& t, const nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& counts) {
             if (counts.shape(0) != t.filter().bytes())
               throw std::invalid_argument("Table '" + t.config().name + "': expected a filter of " +
                                           std::to_string(t.filter().bytes()) + " counters, got " +
                                           std::to_string(counts.shape(0)) + ".");
             operation([&] { std::copy_n(reinterpret_cast<const char*>(counts.data()), counts.shape(0),
                                         t.filter().data()); });
           },
           "counts"_a);

  m.def("shrink",
        [](const std::vector<std::shared_ptr<Table>>& tables, uint64_t capacity) {
          std::vector<Table*> raw;
          for (const auto& table : tables) raw.push_back(table.get());
          return operation([&] { return Table::shrink(raw, capacity); });
        },
        "tables"_a, "capacity"_a,
        "If tables have more rows than this together: removes those used least recently. Returns how many.");
}

}  // namespace karvan::bindings
