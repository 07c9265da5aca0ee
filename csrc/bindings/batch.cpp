// One batch: features, lookups, gradients. Addresses of tensors cross as integers: the Python
// side has checked their type, device and layout, and keeps them alive.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <memory>
#include <optional>
#include <unordered_map>

#include "batch/gradients.h"
#include "batch/lookup_log.h"
#include "batch/plan.h"
#include "bindings/bindings.h"
#include "bindings/names.h"
#include "bindings/operation.h"
#include "bindings/table_arrays.h"
#include "threads/pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace karvan::bindings {
namespace {

const std::map<std::string, PoolArgs::Mode> kModes = {{"pooled", PoolArgs::Mode::pooled},
                                                      {"cells", PoolArgs::Mode::cells},
                                                      {"padded", PoolArgs::Mode::padded}};
const std::map<std::string, Combiner> kCombiners = {
    {"sum", Combiner::sum},
    {"mean", Combiner::mean},
    {"sqrtn", Combiner::sqrtn},
    {"mean_by_count", Combiner::mean_by_count},
    {"mean_by_density", Combiner::mean_by_density}};

struct Program {
  std::shared_ptr<std::vector<FeatureSpec>> features;
  std::vector<std::string> tables;  // a table's slot is its index here
  uint32_t slots() const { return static_cast<uint32_t>(tables.size()); }
};

std::string title(const FeatureSpec& feature) {
  return "Feature '" + feature.name + "' of table '" + feature.table_name + "': ";
}

void make_spec(FeatureSpec* made, std::string name, std::string table, uint32_t dim, const std::string& mode,
               const std::string& combiner, uint32_t stack) {
  FeatureSpec spec{std::move(name), std::move(table), 0, named(kModes, mode, "mode"),
                   named(kCombiners, combiner, "combiner"), stack, dim};
  if (dim == 0 || stack == 0)
    throw std::invalid_argument(title(spec) + "expected a dim and a stack of at least 1, got dim " +
                                std::to_string(dim) + " and stack " + std::to_string(stack) + ".");
  new (made) FeatureSpec(std::move(spec));
}

Program make_program(std::vector<FeatureSpec> features) {
  Program program{std::make_shared<std::vector<FeatureSpec>>(std::move(features)), {}};
  std::vector<uint32_t> dims;
  std::unordered_map<std::string, uint32_t> slots;
  for (FeatureSpec& feature : *program.features) {
    const auto [known, is_new] = slots.try_emplace(feature.table_name, program.slots());
    feature.slot = known->second;
    if (is_new) {
      program.tables.push_back(feature.table_name);
      dims.push_back(feature.dim);
    }
    if (feature.dim != dims[feature.slot])
      throw std::invalid_argument(title(feature) + "expected dim " + std::to_string(dims[feature.slot]) +
                                  " like the features of that table before it, got " + std::to_string(feature.dim) +
                                  ".");
  }
  return program;
}

void make_input(FeatureInput* made, uint64_t values, uint64_t cells, uint64_t samples, uint64_t out, uint64_t offsets,
                uint64_t weights, uint32_t length, uint64_t uses) {
  new (made) FeatureInput{reinterpret_cast<const uint64_t*>(values), cells,
                          reinterpret_cast<const int64_t*>(offsets), samples,
                          reinterpret_cast<const float*>(weights),   length,
                          reinterpret_cast<float*>(out),             reinterpret_cast<const uint32_t*>(uses)};
}

void expect_slot(uint32_t slot, uint32_t slots) {
  if (slot < slots) return;
  throw std::out_of_range("Expected a slot below " + std::to_string(slots) + ", got " + std::to_string(slot) + ".");
}

void expect_count(const char* what, size_t got, size_t expected) {
  if (got == expected) return;
  throw std::invalid_argument("Expected " + std::to_string(expected) + " " + what + ", got " + std::to_string(got) +
                              ".");
}

std::shared_ptr<Plan> make_plan(const Program& program, std::vector<FeatureInput> inputs) {
  return std::make_shared<Plan>(program.features, std::move(inputs), program.slots());
}

void expect_inputs(const Program& program, const std::vector<FeatureInput>& inputs) {
  expect_count("arrays of features, one for each", inputs.size(), program.features->size());
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

void bind_features(nb::module_& m) {
  nb::class_<FeatureSpec>(m, "FeatureSpec", "A feature, as the model declares it; mode: pooled, padded or cells.")
      .def("__init__", &make_spec, "name"_a, "table"_a, nb::kw_only(), "dim"_a, "mode"_a = "pooled",
           "combiner"_a = "sum", "stack"_a = 1)
      .def_ro("name", &FeatureSpec::name)
      .def_ro("table", &FeatureSpec::table_name)
      .def_ro("dim", &FeatureSpec::dim)
      .def_prop_ro("mode", [](const FeatureSpec& f) { return name_of(kModes, f.mode); })
      .def_prop_ro("combiner", [](const FeatureSpec& f) { return name_of(kCombiners, f.combiner); })
      .def_ro("stack", &FeatureSpec::stack, "How many keys an id has.");

  nb::class_<FeatureInput>(m, "FeatureArrays",
                           "The arrays of a feature in one batch, by address; an address of 0 means no array.\n\n"
                           "values: the int64 keys of `cells` ids. out: the float32 vectors. offsets: int64, where each\n"
                           "of `samples` starts; without, a sample has one id. weights: float32, of ids. length: the\n"
                           "ids of a padded sample. uses: uint32, how many uses an id counts as; without, one.")
      .def("__init__", &make_input, nb::kw_only(), "values"_a, "cells"_a, "samples"_a, "out"_a, "offsets"_a = 0,
           "weights"_a = 0, "length"_a = 1, "uses"_a = 0);

  nb::class_<Program>(m, "Program", "The features of an engine; a table's slot is its index in `tables`.")
      .def(nb::new_(&make_program), "features"_a)
      .def_ro("tables", &Program::tables, "In the order in which features first name them.");
}

void bind_gradients(nb::module_& m) {
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
}

void bind_plan(nb::module_& m) {
  nb::class_<Plan>(m, "Plan", "One batch between its lookup and its gradients.")
      .def(nb::new_([](const Program& program, std::vector<FeatureInput> inputs) {
             expect_inputs(program, inputs);
             return operation([&] {
               auto plan = make_plan(program, std::move(inputs));
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
           "Sums the gradients of the outputs by key; rows are `stride` floats apart, an address of 0 means no gradient.");
}

}  // namespace

void bind_batch(nb::module_& m) {
  bind_features(m);
  bind_gradients(m);
  bind_plan(m);

  m.def(
      "prepare",
      [](const Program& program, std::vector<FeatureInput> inputs) {
        expect_inputs(program, inputs);
        nb::gil_scoped_release release;
        const Alone alone;
        auto plan = make_plan(program, std::move(inputs));
        plan->group();
        return plan;
      },
      "program"_a, "inputs"_a, "Groups a batch's keys in advance, on the caller's thread, while other operations may run.");

  m.def(
      "forward",
      [](const Program& program, const std::vector<std::shared_ptr<Table>>& tables, std::vector<FeatureInput> inputs,
         bool training, uint32_t step, double now, LookupLog* log) {
        expect_inputs(program, inputs);
        return operation([&] {
          auto plan = make_plan(program, std::move(inputs));
          run(plan, tables, training, step, now, log);
          return plan;
        });
      },
      "program"_a, "tables"_a, "inputs"_a, "training"_a, "step"_a, "now"_a, "log"_a.none() = nb::none(),
      "Groups the batch's keys, finds or inserts their rows, pools them into the outputs, applies the eviction policies.");

  m.def(
      "forward_prepared",
      [](std::shared_ptr<Plan> plan, const std::vector<std::shared_ptr<Table>>& tables, bool training, uint32_t step,
         double now) { operation([&] { run(plan, tables, training, step, now, nullptr); }); },
      "plan"_a, "tables"_a, "training"_a, "step"_a, "now"_a, "The same for a batch that was prepared.");
}

}  // namespace karvan::bindings
