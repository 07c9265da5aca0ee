// Optimizers' rules.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "bindings/bindings.h"
#include "kernels/kernels.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace karvan::bindings {
namespace {

Rule::Kind kind_of(const std::string& name) {
  for (const RuleEntry& rule : kRuleTable)
    if (name == rule.name) return rule.kind;
  throw std::invalid_argument("Unknown rule '" + name + "'.");
}

}  // namespace

void bind_rule(nb::module_& m) {
  nb::class_<Rule>(m, "Rule", "An optimizer's rule and its numbers for one step.")
      .def("__init__", [](Rule* r, const std::string& kind) { new (r) Rule{.kind = kind_of(kind)}; },
           "kind"_a)
      .def_prop_ro("kind", [](const Rule& r) { return kRuleTable[static_cast<size_t>(r.kind)].name; })
#define KARVAN_PROPERTY(name, initial) .def_rw(#name, &Rule::name)
          KARVAN_RULE_NUMBERS(KARVAN_PROPERTY)
#undef KARVAN_PROPERTY
      .def_rw("accumulate_last", &Rule::accumulate_last);
}

}  // namespace karvan::bindings
