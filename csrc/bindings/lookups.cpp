// Lookups in flight: the keys of a batch by owner, and the log of lookups whose batches are not trained yet.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "batch/gradients.h"
#include "batch/key_routing.h"
#include "batch/lookup_log.h"
#include "bindings/bindings.h"
#include "bindings/operation.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace karvan::bindings {

void bind_lookups(nb::module_& m) {
  nb::class_<LookupLog>(m, "LookupLog", "Training lookups whose batches have not been trained yet.")
      .def(nb::init<>())
      .def("trained",
           [](LookupLog& log, const std::shared_ptr<Plan>& plan) {
             nb::gil_scoped_release release;
             log.trained(plan.get());
           },
           "plan"_a, "The batch of a lookup has been trained.")
      .def("withdraw",
           [](LookupLog& log, const std::vector<std::shared_ptr<Plan>>& plans) {
             std::vector<const Plan*> raw;
             for (const auto& plan : plans) raw.push_back(plan.get());
             operation([&] { log.withdraw(raw); });
           },
           "plans"_a, "Undoes these lookups in the tables; their batches will not be trained.")
      .def_prop_ro("in_flight", &LookupLog::in_flight)
      .def("__len__", &LookupLog::size);
}

void bind_route(nb::module_& m) {
  nb::class_<Route>(m, "Route", "The distinct keys of a plan, by the ranks that own them.")
      .def("__init__",
           [](Route* r, std::shared_ptr<Plan> plan, uint32_t ranks, bool alone) {
             nb::gil_scoped_release release;
             if (alone) {
               const Alone own_thread;
               new (r) Route(std::move(plan), ranks);
             } else {
               Exclusive exclusive;
               new (r) Route(std::move(plan), ranks);
             }
           },
           "plan"_a, "ranks"_a, "alone"_a, "alone: on the caller's thread, while other operations may run.")
      .def_prop_ro("counts", &Route::counts, "Keys, by rank and slot.")
      .def_prop_ro("keys", &Route::keys)
      .def_prop_ro("floats", &Route::floats)
      .def("pack_keys",
           [](const Route& r, uint64_t message) {
             nb::gil_scoped_release release;
             const Alone own_thread;
             r.pack_keys(reinterpret_cast<uint64_t*>(message));
           },
           "message"_a, "Writes the keys, and how often each is used, for each rank.")
      .def("pool",
           [](Route& r, uint64_t vectors) { operation([&] { r.pool(reinterpret_cast<const float*>(vectors)); }); },
           "vectors"_a, "Fills the plan's outputs from vectors in the order in which keys are sent.")
      .def("complete",
           [](const Route&, const Gradients& g) { return Route::complete(g); }, "gradients"_a,
           "Whether every feature had a gradient, so that gradients can be sent without their keys.")
      .def("pack_gradients",
           [](const Route& r, const Gradients& g, float scale, uint64_t out) {
             operation([&] { r.pack_gradients(g, scale, reinterpret_cast<float*>(out)); });
           },
           "gradients"_a, "scale"_a, "out"_a, "Writes gradients times scale in the order in which keys are sent.");
}

}  // namespace karvan::bindings
