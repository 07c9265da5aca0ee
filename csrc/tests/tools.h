// What several test files share: thread counts, tables and their contents as plain maps.
#pragma once
#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "table/table.h"
#include "threads/pool.h"

#if defined(__SANITIZE_THREAD__)
#define KARVAN_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define KARVAN_TSAN 1
#endif
#endif
#ifndef KARVAN_TSAN
#define KARVAN_TSAN 0
#endif

namespace karvan::test {

using Random = std::mt19937_64;

inline uint64_t below(Random& random, uint64_t end) { return random() % end; }

inline float uniform(Random& random, float low, float high) {
  return std::uniform_real_distribution<float>(low, high)(random);
}

// Runs batch operations with that many threads, as callers do: alone in the process.
class WithThreads {
 public:
  explicit WithThreads(int count) : before_(thread_count()) { set_thread_count(count); }
  ~WithThreads() { set_thread_count(before_); }

 private:
  int before_;
  Exclusive exclusive_;
};

inline TableConfig table_config(uint32_t dim, uint32_t shards = 16, VectorType type = VectorType::f32) {
  TableConfig config;
  config.name = "item";
  config.dim = dim;
  config.type = type;
  config.shards = shards;
  config.seed = 5;
  config.init = make_initialiser("uniform", -1.0f, 1.0f, 0, 0);
  return config;
}

struct Row {
  std::vector<float> vector, state;
  uint32_t count = 0, last = 0;
  bool operator==(const Row&) const = default;
};

using Rows = std::map<uint64_t, Row>;  // by key

inline Rows contents(Table& table, uint32_t part = 0, uint32_t parts = 1) {
  const RowSet set = table.snapshot(part, parts);
  const uint32_t dim = table.layout().dim, state = table.layout().state;
  Rows rows;
  for (size_t i = 0; i < set.rows; ++i) {
    Row& row = rows[set.keys[i]];
    row.vector.assign(set.vectors.data() + i * dim, set.vectors.data() + (i + 1) * dim);
    if (state) row.state.assign(set.state.data() + i * state, set.state.data() + (i + 1) * state);
    row.count = set.counts[i];
    row.last = set.last_steps[i];
  }
  return rows;
}

// The vector a new row of this key has, before it is rounded to the table's type.
inline std::vector<float> initial_vector(const TableConfig& config, uint64_t key) {
  std::vector<float> vector(config.dim);
  initialise(config.init, table_stream(config.seed, config.name), mix(key), vector.data(),
             static_cast<int>(config.dim));
  return vector;
}

// a·b rounded to float: the compiler must not fuse it with an addition that follows.
inline float times(float a, float b) {
  volatile float product = a * b;
  return product;
}

// Distinct keys, extreme ones among them.
inline std::vector<uint64_t> distinct_keys(Random& random, size_t count) {
  std::set<uint64_t> keys{0, ~uint64_t{0}};
  while (keys.size() < count) keys.insert(below(random, 2) ? random() : below(random, 4 * count));
  std::vector<uint64_t> all(keys.begin(), keys.end());
  all.resize(count);
  std::shuffle(all.begin(), all.end(), random);
  return all;
}

// A training lookup of distinct keys, each seen once.
inline std::vector<float> train(Table& table, const std::vector<uint64_t>& keys, uint32_t step) {
  std::vector<float> vectors(keys.size() * table.layout().dim);
  const std::vector<uint32_t> counts(keys.size(), 1);
  table.lookup(keys.data(), counts.data(), keys.size(), true, step, vectors.data());
  return vectors;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return false;
  return a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace karvan::test
