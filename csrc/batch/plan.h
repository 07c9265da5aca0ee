// One batch on its way through the tables: which positions its features have, the rows of their keys, the outputs.
//
// A plan is made before a lookup and lives until the gradients have come back.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "batch/groups.h"
#include "kernels/kernels.h"
#include "table/table.h"

namespace karvan {

// How the ids of a sample become one vector.
enum class Combiner : uint8_t { sum, mean, sqrtn };

// A feature, as the model declares it.
struct FeatureSpec {
  std::string name, table_name;
  uint32_t slot = 0;  // its table's place in the plan
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
  uint32_t length = 0;               // padded: cells kept for a sample, from its first
  float* out = nullptr;
};

class Plan {
 public:
  // Checks the offsets (std::invalid_argument names feature and table) and groups the keys; no table is touched.
  Plan(std::vector<FeatureSpec> specs, std::vector<FeatureInput> inputs, uint32_t slots);

  // Rows from tables: one for each slot. Training inserts unknown keys, counts uses, notes the step.
  void lookup(std::vector<std::shared_ptr<Table>> tables, bool training, uint32_t step);
  // Vectors from elsewhere: for each slot unique_in(slot) × dim floats, in the order of unique_keys(slot).
  void lookup(const std::vector<const float*>& vectors);
  void pool() const;  // fills the outputs

  uint64_t unique_in(uint32_t slot) const { return groups_.unique_in(slot); }
  void unique_keys(uint32_t slot, uint64_t* keys, uint32_t* counts) const;

 private:
  friend class Gradients;
  struct Feature {
    FeatureSpec spec;
    FeatureInput in;
    uint64_t base = 0;                        // first position, a multiple of 2^kFeatureShift
    Array<uint64_t> kept_values;              // padded features that had to be cut
    Array<int64_t> kept_offsets;
    Array<float> kept_weights;
    Array<uint32_t> out_row;                  // by cell, for all but one-cell samples
    Array<float> scale;                       // by sample: mean and sqrtn
  };
  struct Unit {  // buckets whose keys belong to shards that no other unit has
    uint32_t slot, first, last;
  };

  void check(const Feature& feature) const;
  void cut(Feature& feature);
  void describe(Feature& feature);
  void find(const Unit& unit, bool training, uint32_t step, std::vector<uint32_t>& missing);
  void gather(uint32_t bucket);
  void make_room();
  void insert_missing(uint32_t step, const std::vector<Unit>& units, std::vector<std::vector<uint32_t>>& missing);
  std::vector<Unit> units() const;
  float* vectors(uint32_t bucket) const;

  std::vector<Feature> features_;
  std::vector<uint16_t> feature_of_;           // by position >> kFeatureShift
  std::vector<uint32_t> dims_, users_;         // by slot: dim, number of features
  KeyGroups groups_;
  std::vector<std::shared_ptr<Table>> tables_;
  std::vector<uint64_t> version_, row_epoch_;  // of the tables, at the lookup
  Array<uint32_t> row_;                        // by unique key, as KeyGroups::hash
  std::vector<Array<float>> vectors_;          // by slot: of each unique key, as KeyGroups::unique_of counts them
};

}  // namespace karvan
