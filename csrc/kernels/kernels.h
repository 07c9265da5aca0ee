// The arithmetic of a step, over rows at any addresses. Chosen once at run time for the machine's instruction set; every
// choice gives the same bits, because no operation is fused or reordered.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../../karvan/native/rules.inc"
#include "memory/arena.h"
#include "table/layout.h"

namespace karvan {

// Forward, first part: vectors of rows, side by side. Row 0 gives zeros.
struct GatherArgs {
  RowsView rows;
  VectorType type;
  uint32_t dim;
  const uint32_t* row;
  uint32_t count;
  float* out;  // count × dim
};

// Forward, second part. A position is one id of a feature; `unique_of` says which vector it has. Positions are summed
// in groups of `stack` to a cell: one id's vector (a stack above 1 is hash stacking). Cells are pooled per sample,
// copied, or padded.
struct PoolArgs {
  enum class Mode : uint8_t { pooled, cells, padded };
  const float* vectors;
  uint32_t dim;
  Mode mode;
  uint32_t stack;
  const uint32_t* unique_of;  // by position
  const int64_t* offsets;     // by sample, in cells; null: one cell each
  const float* weights;       // by cell; null: 1
  const float* scale;         // pooled: by sample; null: 1
  uint32_t length;            // padded: cells of a sample
  float* out;
  uint64_t begin, end;        // samples (pooled, padded) or cells
};

// Backward. Gradients of a feature's output, and how its positions find theirs.
struct GradientSource {
  const float* gradient;      // rows of dim floats
  uint64_t stride;            // floats from one row to the next
  uint64_t base;              // the feature's first position
  uint32_t stack;
  const uint32_t* out_row;    // by cell; null: the cell itself
  const float* weights;       // by cell; null: 1
  const float* scale;         // by output row; null: 1
};

// Sums the gradients of each unique key's positions, in order of position. `feature_of` maps a position's upper bits
// (position >> kFeatureShift) to its source.
inline constexpr uint32_t kFeatureShift = 8;
struct ReduceArgs {
  uint32_t dim;
  const GradientSource* sources;
  const uint16_t* feature_of;
  const GradientSource* only_source;  // of all positions; null: they have several
  const uint32_t* position;    // ascending
  const uint32_t* unique;      // of each: which sum it belongs to
  uint32_t positions;
  uint32_t first, count;       // the sums they belong to
  const uint32_t* size;        // of each sum: how many positions, at least one
  float* out;                  // by sum, dim floats each; [first, first + count) is written
  uint32_t* scratch;           // count + positions numbers
};

// The optimizers' rules; the names say the paper or system. All apply clip, decay, update, bound in that order.
struct Rule {
#define KARVAN_RULE_NAME(name, column_floats, row_floats) name,
  enum class Kind : uint8_t { KARVAN_RULES(KARVAN_RULE_NAME) };
#undef KARVAN_RULE_NAME
  Kind kind = Kind::sgd;
#define KARVAN_RULE_NUMBER(name, initial) float name = initial;
  KARVAN_RULE_NUMBERS(KARVAN_RULE_NUMBER)
#undef KARVAN_RULE_NUMBER
  bool accumulate_last = false;  // adagrad: whether the gradient is added after the update
};

struct RuleEntry {
  const char* name;
  Rule::Kind kind;
  uint32_t column_floats, row_floats;  // of optimizer state
};
#define KARVAN_RULE_ENTRY(name, column_floats, row_floats) {#name, Rule::Kind::name, column_floats, row_floats},
inline constexpr RuleEntry kRuleTable[] = {KARVAN_RULES(KARVAN_RULE_ENTRY)};  // by Rule::Kind
#undef KARVAN_RULE_ENTRY

constexpr uint32_t state_floats(Rule::Kind kind, uint32_t dim) {
  const RuleEntry& rule = kRuleTable[static_cast<size_t>(kind)];
  return rule.column_floats * dim + rule.row_floats;
}

struct ApplyArgs {
  RowsView rows;
  RowLayout layout;
  const Rule* rule;
  const uint32_t* row;       // by unique key; 0: skip
  const uint64_t* hash;      // by unique key: seeds the rounding
  const float* gradient;     // unique × dim
  uint32_t unique;
  uint64_t step;             // seeds the rounding
};

struct Kernels {
  const char* name;
  void (*gather)(const GatherArgs&);
  void (*pool)(const PoolArgs&);
  bool (*reduce)(const ReduceArgs&);  // false if any sum is not finite
  void (*apply)(const ApplyArgs&);
};

const Kernels& kernels();
const char* const* kernel_names();              // those this machine can run, best first, then null
bool choose_kernels(const char* name);          // for tests; false if this machine cannot run them

}  // namespace karvan
