// Keyed lookups and updates against a map of rows; what they share with plans is in test_plan.cpp.
#include <cmath>
#include <map>

#include "kernels/kernels.h"
#include "table/table.h"
#include "tests/check.h"
#include "tests/tools.h"

using namespace karvan;
using namespace karvan::test;

namespace {

constexpr uint32_t kDim = 5;

struct Reference {
  TableConfig config;
  Rows rows;
  uint64_t dropped = 0;

  std::vector<float> lookup(const std::vector<uint64_t>& keys, const std::vector<uint32_t>& counts,
                            bool training, uint32_t step) {
    std::vector<float> vectors;
    for (size_t i = 0; i < keys.size(); ++i) {
      if (training) {
        if (!rows.contains(keys[i])) rows[keys[i]] = {initial_vector(config, keys[i]), {}, 0, 0};
        rows[keys[i]].count += counts[i];
        rows[keys[i]].last = step;
      }
      const auto found = rows.find(keys[i]);
      if (found == rows.end()) vectors.insert(vectors.end(), kDim, 0.0f);
      else vectors.insert(vectors.end(), found->second.vector.begin(), found->second.vector.end());
    }
    return vectors;
  }
  void apply(const std::vector<uint64_t>& keys, const std::vector<float>& gradients, float lr,
             const std::set<uint64_t>& gone) {
    for (size_t i = 0; i < keys.size(); ++i) {
      const auto found = rows.find(keys[i]);
      if (found == rows.end() || gone.contains(keys[i])) {
        ++dropped;
        continue;
      }
      for (uint32_t c = 0; c < kDim; ++c) found->second.vector[c] -= times(gradients[i * kDim + c], lr);
    }
  }
};

}  // namespace

TEST(keyed_operations_do_what_a_map_of_rows_does) {
  std::map<uint32_t, Rows> results;
  for (const uint32_t shards : {1u, 8u, 256u}) {
    for (const int threads : {1, 4}) {
      const WithThreads with(threads);
      Table table(table_config(kDim, shards));
      Reference reference{table.config(), {}};
      Random random(4);
      for (uint32_t step = 1; step <= 40; ++step) {
        const std::vector<uint64_t> keys = distinct_keys(random, 2 + below(random, 700));
        std::vector<uint32_t> counts(keys.size());
        for (uint32_t& count : counts) count = static_cast<uint32_t>(1 + below(random, 5));
        const bool training = below(random, 4) != 0;
        std::vector<float> got(keys.size() * kDim);
        table.lookup(keys.data(), counts.data(), keys.size(), training, step, got.data());
        CHECK(same_bits(got, reference.lookup(keys, counts, training, step)));
        const uint64_t version = table.version();

        std::set<uint64_t> gone;
        if (below(random, 3) == 0) {  // some keys leave before the gradient comes, some of them return
          for (size_t i = 0; i < keys.size(); i += 3)
            if (reference.rows.erase(keys[i])) gone.insert(keys[i]);
          const std::vector<uint64_t> leaving(gone.begin(), gone.end());
          CHECK_EQ(table.erase_keys(leaving.data(), leaving.size()), leaving.size());
          std::vector<uint64_t> returning = leaving;
          returning.resize(leaving.size() / 2);
          const std::vector<uint32_t> once(returning.size(), 1);
          CHECK(same_bits(train(table, returning, step), reference.lookup(returning, once, true, step)));
        }
        std::vector<float> gradients(keys.size() * kDim);
        for (float& g : gradients) g = uniform(random, -1, 1);
        const Rule rule{.kind = Rule::Kind::sgd, .lr = 0.1f};
        table.apply({{keys.data(), keys.size(), gradients.data(), version}}, rule, step);
        reference.apply(keys, gradients, 0.1f, gone);
        CHECK_EQ(table.stats().dropped_gradients, reference.dropped);
        CHECK_EQ(table.rows(), reference.rows.size());
      }
      CHECK(contents(table) == reference.rows);
    }
  }
}

// Two lookups, their gradients in one update: summed by key, and each dropped by its own version.
TEST(pushes_of_several_lookups_are_summed_by_key) {
  const WithThreads with(2);
  Table table(table_config(1));
  const std::vector<uint64_t> first{1, 2, 3, 4}, second{5, 4, 3, 2};
  std::map<uint64_t, float> expected;
  train(table, first, 1);
  const uint64_t before = table.version();
  const uint64_t leaving[] = {3, 4};
  table.erase_keys(leaving, 2);
  train(table, second, 2);  // 3 and 4 come back
  const uint64_t after = table.version();
  table.erase_keys(leaving + 1, 1);
  for (const auto& [key, row] : contents(table)) expected[key] = row.vector[0];
  const std::vector<float> gradients{0.1f, 0.2f, 0.4f, 0.8f}, more{1.6f, 3.2f, 6.4f, 12.8f};
  const Rule rule{.kind = Rule::Kind::adagrad_row, .lr = 0.5f, .beta1 = 1.0f, .eps = 1.0f};
  table.set_state({0.0f});
  table.apply({{first.data(), 4, gradients.data(), before}, {second.data(), 4, more.data(), after}}, rule, 3);
  const std::map<uint64_t, double> sums{{1, 0.1}, {2, 0.2 + 12.8}, {3, 6.4}, {5, 1.6}};
  const Rows rows = contents(table);
  CHECK_EQ(rows.size(), sums.size());
  for (const auto& [key, sum] : sums)
    CHECK(std::fabs(rows.at(key).vector[0] - (expected[key] - 0.5 * sum / (sum + 1))) < 1e-5);
  CHECK_EQ(table.stats().dropped_gradients, 3u);  // 3 and 4 of the first, 4 of the second
}

TEST(keyed_operations_take_no_keys_at_all) {
  const WithThreads with(2);
  Table table(table_config(kDim));
  train(table, {}, 1);
  const Rule rule{};
  table.apply({{nullptr, 0, nullptr, table.version()}}, rule, 1);
  table.apply({}, rule, 1);
  CHECK_EQ(table.rows(), 0u);
  CHECK_EQ(table.snapshot().rows, 0u);
  CHECK_EQ(table.erase_keys(nullptr, 0), 0u);
  table.load(nullptr, 0, nullptr, nullptr, nullptr, nullptr);
  CHECK_EQ(table.rows(), 0u);
}
