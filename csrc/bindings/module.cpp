#include "bindings/bindings.h"

NB_MODULE(_native, m) {
  m.doc() = "Karvan's native core: tables of rows, batch operations, hashes.";
  karvan::bindings::bind_hashing(m);
  karvan::bindings::bind_store(m);
  karvan::bindings::bind_system(m);
}
