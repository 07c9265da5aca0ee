// The lookup of one batch: the positions of its features, the rows of their keys, the outputs.
//
// A plan is created before a lookup and lives until the gradients have been applied. A table is larger than any cache, so
// the speed of a step depends on how many memory accesses are in flight at once. Stages: group positions by key; find the
// rows; insert those of new keys, all shards at once; gather each distinct row once, as float32; pool. A prefetch blocks
// the instructions behind it until its address is translated, so several are issued together.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "batch/key_groups.h"
#include "kernels/kernels.h"
#include "table/table.h"

namespace karvan {

// How the ids of a sample become one vector. A mean divides by the sum of weights; one by count by the number of ids; one
// by density by that number in a batch with more than kDensity ids for each of its samples and one more, as RecIS 1.0
// does, and otherwise by the sum of weights.
enum class Combiner : uint8_t { sum, mean, sqrtn, mean_by_count, mean_by_density };
inline constexpr uint64_t kDensity = 5;

// A feature, as the model declares it.
struct FeatureSpec {
  std::string name, table_name;
  uint32_t slot = 0;  // its table's index in the plan
  PoolArgs::Mode mode = PoolArgs::Mode::pooled;
  Combiner combiner = Combiner::sum;
  uint32_t stack = 1;
  uint32_t dim = 0;
};

// Its ids in one batch. Pointers stay valid for the plan's life.
struct FeatureInput {
  const uint64_t* values = nullptr;  // cells × stack keys
  uint64_t cells = 0;
  const int64_t* offsets = nullptr;  // samples + 1, in cells; null: one cell for each sample
  uint64_t samples = 0;
  const float* weights = nullptr;    // by cell
  uint32_t length = 0;               // padded: cells of a sample that are used, from its first
  float* out = nullptr;
  const uint32_t* uses = nullptr;    // by cell: how many uses of its key it counts as; null: one
};

class Plan {
 public:
  // Checks the offsets: std::invalid_argument names feature and table. No table is touched.
  Plan(std::shared_ptr<const std::vector<FeatureSpec>> specs, std::vector<FeatureInput> inputs, uint32_t slots);

  // Distinct keys and their positions, a function of the batch alone, so it may be called in advance, or by run().
  void group();

  // Rows from tables, one for each slot, then the outputs. Training inserts unknown keys, counts uses, stores the step.
  // Once for a plan.
  // With `remember`, a training run records the previous state of each key, for each_use.
  void run(std::vector<std::shared_ptr<Table>> tables, bool training, uint32_t step, bool remember = false);

  // f(hash, uses, count, last) for each distinct key, with what a run that remembers found before it counted the uses. Of
  // a key without a row, last is kAbsent, and count that of the admission filter. f may change the last two.
  static constexpr uint32_t kAbsent = UINT32_MAX;
  template <class F>
  void each_use(uint32_t slot, F&& f) {
    const KeyGroups::Slot& s = groups_.slots[slot];
    for (uint32_t b = s.first_bucket; b < s.first_bucket + s.buckets; ++b)
      for (uint32_t i = groups_.begin[b]; i < groups_.begin[b] + groups_.unique[b]; ++i)
        f(groups_.hash[i], uses()[i], count_before_[i], last_before_[i]);
  }
  uint32_t step() const { return step_; }
  Table* table(uint32_t slot) const { return tables_[slot].get(); }
  bool remembers() const { return static_cast<bool>(count_before_); }

  // The same with vectors of the caller, after group(): for each slot unique_in(slot) × dim floats, in the order of
  // unique_keys(slot).
  uint64_t unique_in(uint32_t slot) const { return groups_.unique_in(slot); }
  void unique_keys(uint32_t slot, uint64_t* keys, uint32_t* counts) const;
  void run(const std::vector<const float*>& vectors);
  uint32_t slots() const { return static_cast<uint32_t>(dims_.size()); }
  uint32_t dim(uint32_t slot) const { return dims_[slot]; }
  size_t features() const { return features_.size(); }

 private:
  friend class Gradients;
  friend class Route;
  struct Feature {
    const FeatureSpec* spec;
    FeatureInput in;
    uint64_t base = 0;                        // first position, a multiple of 2^kFeatureShift
    Array<uint64_t> kept_values;              // padded features that had to be cut
    Array<int64_t> kept_offsets;
    Array<float> kept_weights;
    Array<uint32_t> out_row;                  // by cell, for all but one-cell samples
    Array<float> scale;                       // by sample: mean and sqrtn
    bool labelled = false;                    // groups_ holds its out_rows instead of positions
  };
  // Buckets whose keys belong to shards that no other unit has, so that one thread can find and insert without locks.
  struct Unit {
    uint32_t slot, first, last;
    std::vector<std::pair<uint32_t, uint32_t>> missing;  // (bucket, unique key) that shall get a row
  };

  void check(const Feature& feature) const;
  void cut(Feature& feature);
  void describe(Feature& feature);
  void count_uses(uint32_t slot);
  const uint32_t* uses() const { return uses_ ? uses_.data() : groups_.count.data(); }
  std::vector<Unit> units(uint32_t slot) const;
  void find(Unit& unit, bool training, uint32_t step);
  void find_some(Unit& unit, uint32_t bucket, uint32_t from, uint32_t count, bool training, uint32_t step);
  void reserve(uint32_t slot, const std::vector<Unit>& units);
  void insert(const Unit& unit, uint32_t step);
  void gather(uint32_t bucket);
  void run_slot(uint32_t slot, bool training, uint32_t step);  // all of the above on the caller's threads
  void pool_slot(uint32_t slot);
  float* vectors(uint32_t bucket) const;

  std::shared_ptr<const std::vector<FeatureSpec>> specs_;
  std::vector<Feature> features_;
  std::vector<uint16_t> feature_of_;           // by position >> kFeatureShift
  std::vector<uint32_t> dims_;                 // by slot
  std::vector<std::vector<uint32_t>> users_;   // by slot: its features
  KeyGroups groups_;
  bool grouped_ = false;
  Array<uint32_t> uses_;                       // as KeyGroups::count, where positions count as several uses
  std::vector<std::shared_ptr<Table>> tables_;
  std::vector<uint64_t> version_, row_epoch_;  // of the tables, at the lookup
  Array<uint32_t> row_;                        // by unique key, as KeyGroups::hash
  Array<uint32_t> count_before_, last_before_;  // the same, of a run that remembers
  uint32_t step_ = 0;
  std::vector<Array<float>> vectors_;          // by slot, while it is looked up: of each unique key, as unique_of counts
};

}  // namespace karvan
