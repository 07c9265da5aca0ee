// The parts of the extension module; each file of this folder binds one namespace and only translates.
#pragma once
#include <nanobind/nanobind.h>

namespace karvan::bindings {

void bind_batch(nanobind::module_& m);    // batch.cpp: features, lookups and gradients of a batch
void bind_capture(nanobind::module_& m);  // capture.cpp: tables as they were at one moment
void bind_data(nanobind::module_& m);     // data.cpp: text to integers, logarithms
void bind_hashing(nanobind::module_& m);  // hashing.cpp: hashes, id helpers, initialisers
void bind_lookups(nanobind::module_& m);  // lookups.cpp: lookups whose batches are not trained yet
void bind_math(nanobind::module_& m);     // math.cpp: pairwise dot products
void bind_records(nanobind::module_& m);  // records.cpp: TFRecord, RecordIO, tf.Example
void bind_route(nanobind::module_& m);    // lookups.cpp: keys of a batch by owner
void bind_rule(nanobind::module_& m);     // rule.cpp: the rules of optimizers
void bind_system(nanobind::module_& m);   // system.cpp: threads, instruction sets, buffers
void bind_table(nanobind::module_& m);    // table.cpp: tables of rows

}  // namespace karvan::bindings
