// Threads, instruction sets, pooled memory.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "ipc/shared_board.h"
#include "kernels/kernels.h"
#include "memory/buffer.h"
#include "threads/pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace karvan::bindings {
namespace {

// The buffer protocol, because it is ten times cheaper to cross than an array object.
int get_buffer(PyObject* object, Py_buffer* view, int flags) {
  const Buffer* buffer = nb::inst_ptr<Buffer>(object);
  return PyBuffer_FillInfo(view, object, buffer->data(), static_cast<Py_ssize_t>(buffer->size()), 0, flags);
}

}  // namespace

void bind_system(nb::module_& m) {
  m.def("thread_count", &thread_count, "How many threads a batch operation uses.");
  m.def(
      "set_thread_count",
      [](int count) {
        if (count < 1) throw std::invalid_argument("The number of threads must be at least 1, got " +
                                                   std::to_string(count) + ".");
        set_thread_count(count);
      },
      "count"_a, "Sets it, from the next operation on.");
  m.def(
      "share_team",
      [](uintptr_t run, uintptr_t width) {
        share_team({reinterpret_cast<decltype(Team::run)>(run), reinterpret_cast<decltype(Team::width)>(width)});
      },
      "run"_a, "width"_a,
      "Operations of the first thread run on OpenMP's threads: the addresses of GOMP_parallel and omp_get_max_threads, or "
      "0 and 0 for the core's own threads.");
  m.def(
      "kernel_names",
      [] {
        std::vector<std::string> names;
        for (const char* const* name = kernel_names(); *name; ++name) names.emplace_back(*name);
        return names;
      },
      "The kernels this machine can run, best first.");
  m.def("kernels", [] { return std::string(kernels().name); }, "The kernels in use.");
  nb::class_<Board>(m, "Board", "Messages between the processes of one machine, through memory that they share.")
      .def(nb::init<uint32_t, uint32_t>(), "rank"_a, "ranks"_a)
      .def_prop_ro("place", [](const Board& b) { return std::pair{b.place().process, b.place().file}; },
                   "Process and file number, by which others join.")
      .def("join",
           [](Board& b, const std::vector<std::pair<int64_t, int>>& places) {
             std::vector<Board::Place> all;
             for (const auto& [process, file] : places) all.push_back({process, file});
             b.join(all);
           },
           "places"_a)
      .def("exchange",
           [](Board& b, uint64_t send, const std::vector<uint64_t>& to, uint64_t receive, const std::vector<uint64_t>& of,
              double seconds) {
             nb::gil_scoped_release release;
             const Board::Outcome outcome = b.exchange(reinterpret_cast<const char*>(send), to,
                                                       reinterpret_cast<char*>(receive), of, seconds);
             const char* const names[] = {"done", "late", "lost", "left"};
             return std::string(names[static_cast<int>(outcome)]);
           },
           "send"_a, "to"_a, "receive"_a, "of"_a, "seconds"_a,
           "Bytes to and from each rank. Returns done, late, lost (the process of another rank has ended) or left.")
      .def("leave", &Board::leave, "Ends an exchange that another thread waits in, and all later ones.")
      .def_prop_ro("missing", &Board::missing, "The rank that an exchange was late or lost for.");
  static PyType_Slot slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)}, {0, nullptr}};
  nb::class_<Buffer>(m, "Buffer", nb::type_slots(slots),
                     "Uninitialised bytes from the pool, through the buffer protocol; they return to it with the object.")
      .def(nb::init<size_t>(), "bytes"_a);
}

}  // namespace karvan::bindings
