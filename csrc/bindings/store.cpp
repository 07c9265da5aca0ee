// Tables and the batch operations over them. Addresses of tensors cross as integers: the Python side has checked their
// type, device and layout, and keeps them alive.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>

#include "batch/gradients.h"
#include "batch/lookup_log.h"
#include "batch/plan.h"
#include "batch/key_routing.h"
#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/names.h"
#include "bindings/operation.h"
#include "table/table.h"
#include "threads/pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace karvan::bindings {
namespace {

using Keys = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Counts = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

const std::map<std::string, VectorType> kTypes = {
    {"float32", VectorType::f32}, {"bfloat16", VectorType::bf16}, {"float16", VectorType::f16}};
const std::map<std::string, Admission::Kind> kAdmissions = {{"always", Admission::Kind::always},
                                                            {"probability", Admission::Kind::probability},
                                                            {"min_count", Admission::Kind::min_count},
                                                            {"read_only", Admission::Kind::read_only}};
const std::map<std::string, Eviction::Kind> kEvictions = {
    {"never", Eviction::Kind::never}, {"lru", Eviction::Kind::lru}, {"lfu", Eviction::Kind::lfu},
    {"age", Eviction::Kind::age},     {"ttl", Eviction::Kind::ttl}, {"norm", Eviction::Kind::norm}};
const std::map<std::string, PoolArgs::Mode> kModes = {{"pooled", PoolArgs::Mode::pooled},
                                                      {"cells", PoolArgs::Mode::cells},
                                                      {"padded", PoolArgs::Mode::padded}};
const std::map<std::string, Combiner> kCombiners = {
    {"sum", Combiner::sum}, {"mean", Combiner::mean}, {"sqrtn", Combiner::sqrtn}};

struct Program {
  std::shared_ptr<std::vector<FeatureSpec>> features;
  uint32_t slots;
};

using FeatureTuple = std::tuple<std::string, std::string, uint32_t, std::string, std::string, uint32_t, uint32_t>;

Program make_program(const std::vector<FeatureTuple>& features, uint32_t slots) {
  Program program{std::make_shared<std::vector<FeatureSpec>>(), slots};
  std::vector<uint32_t> dims(slots, 0);
  for (const auto& [name, table, slot, mode, combiner, stack, dim] : features) {
    if (slot >= slots || dim == 0 || stack == 0 || (dims[slot] && dims[slot] != dim))
      throw std::invalid_argument("Feature '" + name + "' of table '" + table + "': expected a slot below " +
                                  std::to_string(slots) + " and the dim of its table, got slot " + std::to_string(slot) +
                                  " and dim " + std::to_string(dim) + ".");
    dims[slot] = dim;
    program.features->push_back({name, table, slot, named(kModes, mode, "mode"),
                                named(kCombiners, combiner, "combiner"), stack, dim});
  }
  return program;
}

constexpr size_t kInputFields = 8;

std::vector<FeatureInput> make_inputs(const Program& program, const std::vector<uint64_t>& flat) {
  if (flat.size() != program.features->size() * kInputFields)
    throw std::invalid_argument("Expected " + std::to_string(kInputFields) + " numbers for each feature.");
  std::vector<FeatureInput> inputs;
  for (size_t i = 0; i < flat.size(); i += kInputFields)
    inputs.push_back({reinterpret_cast<const uint64_t*>(flat[i]), flat[i + 1],
                      reinterpret_cast<const int64_t*>(flat[i + 2]), flat[i + 3],
                      reinterpret_cast<const float*>(flat[i + 4]), static_cast<uint32_t>(flat[i + 5]),
                      reinterpret_cast<float*>(flat[i + 6]), reinterpret_cast<const uint32_t*>(flat[i + 7])});
  return inputs;
}

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

auto to_keys(const std::vector<uint64_t>& hashes) {
  Array<uint64_t> keys(hashes.size());
  for (size_t i = 0; i < hashes.size(); ++i) keys[i] = unmix(hashes[i]);
  return to_numpy<int64_t>(std::move(keys), {hashes.size()});
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

void expect(const Table& table, const char* what, size_t got, size_t expected) {
  if (got == expected) return;
  throw std::invalid_argument("Table '" + table.config().name + "': expected " + std::to_string(expected) + " " + what +
                              ", got " + std::to_string(got) + ".");
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
    const uint64_t at = table.version();  // what leaves now has left after the lookup
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

void expect_slot(uint32_t slot, uint32_t slots) {
  if (slot < slots) return;
  throw std::out_of_range("Expected a slot below " + std::to_string(slots) + ", got " + std::to_string(slot) + ".");
}

void expect_count(const char* what, size_t got, size_t expected) {
  if (got == expected) return;
  throw std::invalid_argument("Expected " + std::to_string(expected) + " " + what + ", got " + std::to_string(got) + ".");
}

void run(const std::shared_ptr<Plan>& plan, const std::vector<std::shared_ptr<Table>>& tables, bool training,
         uint32_t step, double now, LookupLog* log) {
  expect_count("tables, one for each slot", tables.size(), plan->slots());
  for (uint32_t s = 0; s < tables.size(); ++s)
    if (plan->dim(s)) expect(*tables[s], "columns of its features", plan->dim(s), tables[s]->layout().dim);
  plan->run(tables, training, step, log != nullptr);
  if (!training) return;
  if (log) log->add(plan);
  for (const auto& table : tables) table->maintain(step, now);
}

auto to_arrays(RowSet set, const RowLayout& layout) {
  const size_t n = set.rows;
  return nb::make_tuple(to_numpy<int64_t>(std::move(set.keys), {n}),
                        to_numpy<float>(std::move(set.vectors), {n, layout.dim}),
                        to_numpy<float>(std::move(set.state), {n, layout.state}),
                        to_numpy<uint32_t>(std::move(set.counts), {n}),
                        to_numpy<uint32_t>(std::move(set.last_steps), {n}));
}

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
    made.clear();  // closing takes the right to operate, which must have been given back
    throw;
  }
  return made;
}

void bind_capture(nb::module_& m) {
  nb::class_<Capture>(m, "Capture", "A table as it was at one moment, read part by part while training goes on.")
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
           "Keys that left since the capture before; some may have come back.")
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
        "log, as if its lookups in flight had not been.");
}

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
               layout = t.layout();  // an optimizer that takes the table over changes it
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
}

}  // namespace

void bind_store(nb::module_& m) {
  bind_lookups(m);
  bind_table(m);
  bind_capture(m);
  bind_rule(m);

  nb::class_<Program>(m, "Program", "The features of an engine: (name, table, slot, mode, combiner, stack, dim) each.")
      .def(nb::new_(&make_program), "features"_a, "slots"_a);

  nb::class_<Gradients>(m, "Gradients", "One gradient for each distinct key of a batch.")
      .def("finite", &Gradients::finite, "By slot: is its gradient free of NaN and infinity?")
      .def("touched", &Gradients::touched, "By slot: has any key a gradient?")
      .def("average", [](Gradients& g) { operation([&] { g.average(); }); },
           "Divides each key's sum by the number of its positions.")
      .def("keys_and_values",
           [](const Gradients& g, uint32_t slot) {
             expect_slot(slot, g.slots());
             const size_t n = g.unique_in(slot), dim = g.dim(slot);
             Array<uint64_t> keys(n);
             Array<float> values(n * dim);
             operation([&] { g.copy(slot, keys.data(), values.data()); });
             return nb::make_tuple(to_numpy<int64_t>(std::move(keys), {n}),
                                   to_numpy<float>(std::move(values), {n, dim}));
           },
           "slot"_a)
      .def_static("merge",
                  [](const std::vector<std::shared_ptr<Gradients>>& parts) {
                    std::vector<Gradients*> raw;
                    for (const auto& part : parts) raw.push_back(part.get());
                    return std::shared_ptr<Gradients>(operation([&] { return Gradients::merge(raw); }));
                  },
                  "parts"_a)
      .def("apply",
           [](Gradients& g, const std::vector<std::optional<Rule>>& rules, const std::vector<uint64_t>& steps) {
             expect_count("rules, one for each slot", rules.size(), g.slots());
             expect_count("steps, one for each slot", steps.size(), g.slots());
             std::vector<const Rule*> raw;
             for (const auto& rule : rules) raw.push_back(rule ? &*rule : nullptr);
             operation([&] {
               for (uint32_t s = 0; s < rules.size(); ++s)
                 if (const Table* table = g.table(s); table && rules[s])
                   expect(*table, "floats of optimizer state", state_floats(rules[s]->kind, table->layout().dim),
                          table->layout().state);
               g.apply(raw, steps);
             });
           },
           "rules"_a, "steps"_a);

  nb::class_<Plan>(m, "Plan", "One batch between its lookup and its gradients.")
      .def(nb::new_([](const Program& program, const std::vector<uint64_t>& inputs) {
             std::vector<FeatureInput> made = make_inputs(program, inputs);
             return operation([&] {
               auto plan = std::make_shared<Plan>(program.features, std::move(made), program.slots);
               plan->group();
               return plan;
             });
           }),
           "program"_a, "inputs"_a)
      .def("unique",
           [](const Plan& plan, uint32_t slot) {
             expect_slot(slot, plan.slots());
             const size_t n = plan.unique_in(slot);
             Array<uint64_t> keys(n);
             Array<uint32_t> counts(n);
             operation([&] { plan.unique_keys(slot, keys.data(), counts.data()); });
             return nb::make_tuple(to_numpy<int64_t>(std::move(keys), {n}), to_numpy<uint32_t>(std::move(counts), {n}));
           },
           "slot"_a)
      .def("pool_from",
           [](Plan& plan, const std::vector<Floats>& vectors) {
             expect_count("arrays of vectors, one for each slot", vectors.size(), plan.slots());
             std::vector<const float*> raw;
             for (uint32_t s = 0; s < vectors.size(); ++s) {
               if (plan.dim(s)) expect_count("columns of vectors", vectors[s].shape(1), plan.dim(s));
               if (vectors[s].shape(0) != plan.unique_in(s))
                 throw std::invalid_argument("Expected a vector for each of " + std::to_string(plan.unique_in(s)) +
                                             " keys, got " + std::to_string(vectors[s].shape(0)) + ".");
               raw.push_back(vectors[s].data());
             }
             operation([&] { plan.run(raw); });
           },
           "vectors"_a)
      .def("reduce",
           [](std::shared_ptr<Plan> plan, const std::vector<uint64_t>& addresses, const std::vector<uint64_t>& strides) {
             expect_count("addresses, one for each feature", addresses.size(), plan->features());
             expect_count("strides, one for each feature", strides.size(), plan->features());
             std::vector<OutputGradient> gradients;
             for (size_t f = 0; f < addresses.size(); ++f)
               gradients.push_back({reinterpret_cast<const float*>(addresses[f]), strides.at(f)});
             return operation([&] { return std::make_shared<Gradients>(std::move(plan), gradients); });
           },
           "addresses"_a, "strides"_a,
           "Sums the gradients of the outputs by key; rows lie `stride` floats apart, an address of 0 means no gradient.");

  bind_route(m);

  m.def(
      "prepare",
      [](const Program& program, const std::vector<uint64_t>& inputs) {
        std::vector<FeatureInput> made = make_inputs(program, inputs);
        nb::gil_scoped_release release;
        const Alone alone;
        auto plan = std::make_shared<Plan>(program.features, std::move(made), program.slots);
        plan->group();
        return plan;
      },
      "program"_a, "inputs"_a, "Groups a batch's keys ahead, on the caller's thread, beside whatever runs.");

  m.def(
      "forward",
      [](const Program& program, const std::vector<std::shared_ptr<Table>>& tables, const std::vector<uint64_t>& inputs,
         bool training, uint32_t step, double now, LookupLog* log) {
        std::vector<FeatureInput> made = make_inputs(program, inputs);
        return operation([&] {
          auto plan = std::make_shared<Plan>(program.features, std::move(made), program.slots);
          run(plan, tables, training, step, now, log);
          return plan;
        });
      },
      "program"_a, "tables"_a, "inputs"_a, "training"_a, "step"_a, "now"_a, "log"_a.none() = nb::none(),
      "Groups the batch's keys, finds or inserts their rows, pools them into the outputs, lets the policies evict.");

  m.def(
      "forward_prepared",
      [](std::shared_ptr<Plan> plan, const std::vector<std::shared_ptr<Table>>& tables, bool training, uint32_t step,
         double now) { operation([&] { run(plan, tables, training, step, now, nullptr); }); },
      "plan"_a, "tables"_a, "training"_a, "step"_a, "now"_a, "The same for a batch that was prepared.");
}

}  // namespace karvan::bindings
