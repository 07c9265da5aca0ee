#include "bindings/bindings.h"

NB_MODULE(_native, m) {
  // Objects that live until the interpreter ends are not leaks: no warnings about them.
  nanobind::set_leak_warnings(false);
  m.doc() = "Karvan's native core: tables of rows, batch operations, hashes.";
  karvan::bindings::bind_data(m);
  karvan::bindings::bind_hashing(m);
  karvan::bindings::bind_math(m);
  karvan::bindings::bind_records(m);
  karvan::bindings::bind_lookups(m);
  karvan::bindings::bind_table(m);
  karvan::bindings::bind_capture(m);
  karvan::bindings::bind_rule(m);
  karvan::bindings::bind_batch(m);
  karvan::bindings::bind_route(m);
  karvan::bindings::bind_system(m);
}
