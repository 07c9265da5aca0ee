// The gradients of a backward pass: one sum for each distinct key of a plan, ready to be applied once.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "batch/plan.h"

namespace karvan {

// The gradient of a feature's output: rows of dim floats, `stride` floats apart. Null values: it had none.
struct OutputGradient {
  const float* values;
  uint64_t stride;
};

class Gradients {
 public:
  // Sums the gradients of the plan's outputs, one for each feature.
  Gradients(std::shared_ptr<const Plan> plan, const std::vector<OutputGradient>& of_features);
  // The sum of several backward passes over the same tables, in their order (gradient accumulation).
  static std::unique_ptr<Gradients> merge(const std::vector<Gradients*>& parts);

  // Divides each key's sum by the number of positions that the key has.
  void average();

  // Updates the rows. A table whose gradient is not finite is skipped and counted; so are, one by one, gradients of rows
  // that were removed since the lookup. A null rule skips its table. `steps` seed the rounding of 16-bit vectors.
  void apply(const std::vector<const Rule*>& rules, const std::vector<uint64_t>& steps);

  std::vector<bool> finite() const { return {finite_.begin(), finite_.end()}; }  // by slot
  std::vector<bool> touched() const;                                             // by slot: has any key a gradient?
  uint32_t slots() const { return static_cast<uint32_t>(values_.size()); }
  uint32_t dim(uint32_t slot) const { return dims_[slot]; }
  const Table* table(uint32_t slot) const { return tables_.empty() ? nullptr : tables_[slot].get(); }
  uint64_t unique_in(uint32_t slot) const { return groups().unique_in(slot); }
  void copy(uint32_t slot, uint64_t* keys, float* gradients) const;

 private:
  friend class Route;
  Gradients() = default;
  const KeyGroups& groups() const { return own_groups_ ? *own_groups_ : plan_->groups_; }
  uint32_t* row() const { return own_groups_ ? own_row_.data() : plan_->row_.data(); }
  void reduce(const std::vector<GradientSource>& sources, const std::vector<uint16_t>& feature_of);
  void each_bucket(const std::function<void(uint32_t)>& f) const;  // on all threads, without empty buckets
  void resolve();  // updates the rows after removals from the tables since the lookup
  float* values(uint32_t bucket) const;

  std::shared_ptr<const Plan> plan_;
  std::unique_ptr<KeyGroups> own_groups_;  // when the plan's do not fit: some features had no gradient, or merged
  std::vector<std::shared_ptr<Table>> tables_;
  std::vector<uint32_t> dims_;
  Array<uint32_t> own_row_;                // by unique key; the plan's unless grouped again
  std::vector<Array<float>> values_;       // by slot; a bucket's part starts where its positions do
  std::vector<uint8_t> finite_;
  std::vector<uint64_t> version_;          // of the tables, when rows were last found
  std::vector<uint64_t> looked_up_;        // of the tables, at the lookup
  std::vector<uint64_t> row_epoch_;
};

}  // namespace karvan
