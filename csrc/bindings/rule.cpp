// Optimizers' rules.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "bindings/bindings.h"
#include "bindings/names.h"
#include "kernels/kernels.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace karvan::bindings {
namespace {

const std::map<std::string, Rule::Kind> kRules = {
    {"sgd", Rule::Kind::sgd},   {"momentum", Rule::Kind::momentum}, {"adagrad", Rule::Kind::adagrad},
    {"adagrad_row", Rule::Kind::adagrad_row}, {"adam", Rule::Kind::adam}, {"adamw", Rule::Kind::adamw},
    {"ftrl", Rule::Kind::ftrl}, {"nesterov", Rule::Kind::nesterov}, {"amsgrad", Rule::Kind::amsgrad}};

}  // namespace

void bind_rule(nb::module_& m) {
  nb::class_<Rule>(m, "Rule", "An optimizer's rule and its numbers for one step.")
      .def("__init__", [](Rule* r, const std::string& kind) { new (r) Rule{.kind = named(kRules, kind, "rule")}; },
           "kind"_a)
      .def_prop_ro("kind", [](const Rule& r) { return name_of(kRules, r.kind); })
      .def_rw("lr", &Rule::lr)
      .def_rw("beta1", &Rule::beta1)
      .def_rw("beta2", &Rule::beta2)
      .def_rw("eps", &Rule::eps)
      .def_rw("weight_decay", &Rule::weight_decay)
      .def_rw("shrink", &Rule::shrink)
      .def_rw("alpha", &Rule::alpha)
      .def_rw("l1", &Rule::l1)
      .def_rw("l2", &Rule::l2)
      .def_rw("accumulate_last", &Rule::accumulate_last)
      .def_rw("clip_value", &Rule::clip_value)
      .def_rw("clip_norm", &Rule::clip_norm)
      .def_rw("bound", &Rule::bound);
}

}  // namespace karvan::bindings
