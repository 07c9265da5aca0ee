#include "batch/plan.h"

#include <cmath>
#include <stdexcept>

#include "batch/gradients.h"
#include "tests/check.h"
#include "tests/plan_reference.h"
#include "tests/tools.h"

using namespace karvan;
using namespace karvan::test;

namespace {

using Tables = std::vector<std::shared_ptr<Table>>;

const std::vector<uint32_t> kPlanDims{4, 17, 16};
const Rule kSgd{.kind = Rule::Kind::sgd, .lr = 0.1f};
const Rule kAdagrad{.kind = Rule::Kind::adagrad, .lr = 0.1f, .beta1 = 1.0f, .eps = 1e-6f};
const std::vector<uint64_t> kSteps{1, 1, 1};

// Slot 1 has Adagrad, the others SGD.
const std::vector<const Rule*> kRules{&kSgd, &kAdagrad, &kSgd};

Tables make_tables(uint32_t shards = 16, VectorType last = VectorType::f32) {
  Tables tables;
  for (uint32_t slot = 0; slot < kPlanDims.size(); ++slot) {
    TableConfig config = table_config(kPlanDims[slot], shards, slot == 2 ? last : VectorType::f32);
    config.name = "table" + std::to_string(slot);
    tables.push_back(std::make_shared<Table>(config));
    if (slot == 1) tables.back()->set_state(std::vector<float>(kPlanDims[slot], 0.1f));
  }
  return tables;
}

std::vector<Rows> all_contents(const Tables& tables) {
  std::vector<Rows> all;
  for (const auto& table : tables) all.push_back(contents(*table));
  return all;
}

// Were these sums applied to the rows, and to no others?
bool updated(const Rows& before, const Rows& after, const Sums& sums, const Rule& rule) {
  if (before.size() != after.size()) return false;
  for (const auto& [key, row] : before) {
    const Row& now = after.at(key);
    const auto sum = sums.find(key);
    if (sum == sums.end()) {
      if (!(now == row)) return false;
      continue;
    }
    for (size_t c = 0; c < row.vector.size(); ++c) {
      const double g = sum->second[c];
      double expected = row.vector[c] - 0.1 * g;
      if (rule.kind == Rule::Kind::adagrad)
        expected = row.vector[c] - 0.1 * g / (std::sqrt(row.state[c] + g * g) + 1e-6);
      if (!(std::fabs(now.vector[c] - expected) <= 2e-4 * (1 + std::fabs(expected)))) return false;
    }
  }
  return true;
}

Batch small_batch(uint64_t seed) { return Batch(seed, kPlanDims, 40, 100); }
Batch large_batch(uint64_t seed) { return Batch(seed, kPlanDims, 3000, 5000); }  // slots past 8192 positions

// One feature for each table, of the kind that takes the shortest way through the kernels.
Batch plain_batch(uint64_t seed, const std::vector<uint32_t>& dims, Mode mode, uint64_t samples) {
  Batch batch(seed, dims, 0, 1);
  batch.features.clear();
  Random random(seed);
  for (uint32_t slot = 0; slot < dims.size(); ++slot) {
    FeatureData f;
    f.spec = {.name = "feature", .table_name = "table", .slot = slot, .mode = mode, .dim = dims[slot]};
    f.samples = samples;
    f.length = 3;
    f.offsets.push_back(0);
    for (uint64_t i = 0; i < samples; ++i)
      f.offsets.push_back(f.offsets.back() + static_cast<int64_t>(below(random, 7)));
    f.cells = static_cast<uint64_t>(f.offsets.back());
    for (uint64_t i = 0; i < f.cells; ++i) f.values.push_back(below(random, 9) ? below(random, 5000) : 3);
    f.stride = dims[slot] + slot;
    for (uint64_t i = 0; i < f.out_rows() * f.stride; ++i) f.gradient.push_back(uniform(random, -1, 1));
    batch.features.push_back(std::move(f));
  }
  return batch;
}

}  // namespace

TEST(plans_pool_and_update_as_plain_loops_do) {
  const WithThreads with(2);
  for (const bool large : {false, true}) {
    const Tables tables = make_tables();
    for (uint32_t step = 1; step <= (large ? 2u : 20u); ++step) {
      Batch batch = large ? large_batch(step) : small_batch(100 + step);
      std::vector<Rows> expected = all_contents(tables);
      for (uint32_t slot = 0; slot < 3; ++slot) {
        for (const auto& [key, count] : batch.counts(slot)) {
          Row& row = expected[slot][key];
          if (row.vector.empty()) {
            row.vector = initial_vector(tables[slot]->config(), key);
            if (slot == 1) row.state.assign(kPlanDims[slot], 0.1f);
          }
          row.count += count;
          row.last = step;
        }
      }
      const auto plan = batch.plan();
      plan->run(tables, true, step);
      const std::vector<Rows> looked_up = all_contents(tables);
      CHECK(looked_up == expected);
      CHECK(batch.outputs_follow_from(expected));
      Gradients gradients(plan, batch.gradients());
      for (uint32_t slot = 0; slot < 3; ++slot) CHECK(close(copied(gradients, slot), batch.sums(slot)));
      CHECK(gradients.finite() == std::vector<bool>(3, true));
      gradients.apply(kRules, kSteps);
      for (uint32_t slot = 0; slot < 3; ++slot)
        CHECK(updated(looked_up[slot], contents(*tables[slot]), batch.sums(slot), *kRules[slot]));
    }
  }
}

TEST(plain_features_of_common_widths_are_summed_and_pooled_as_plain_loops_do) {
  const WithThreads with(2);
  const std::vector<uint32_t> dims{16, 32, 64, 20};
  for (const Mode mode : {Mode::pooled, Mode::cells, Mode::padded}) {
    for (const uint64_t samples : {0u, 1u, 50u, 1800u, 3500u}) {
      if (KARVAN_TSAN && samples > 2000) continue;  // more of what threads do with fewer
      for (const bool one_without : {false, true}) {
        Tables tables;
        for (const uint32_t dim : dims) {
          tables.push_back(std::make_shared<Table>(table_config(dim, 8, VectorType::f32)));
          tables.back()->set_state(std::vector<float>(dim, 0.1f));
        }
        Batch batch = plain_batch(samples + 1, dims, mode, samples);
        batch.features[2].has_gradient = !one_without;
        const auto plan = batch.plan();
        plan->run(tables, true, 1);
        const std::vector<Rows> before = all_contents(tables);
        CHECK(batch.outputs_follow_from(before));
        Gradients gradients(plan, batch.gradients());
        for (uint32_t slot = 0; slot < dims.size(); ++slot)
          CHECK(close(copied(gradients, slot), batch.sums(slot)));
        gradients.apply(std::vector<const Rule*>(4, &kAdagrad), {1, 1, 1, 1});
        for (uint32_t slot = 0; slot < dims.size(); ++slot)
          CHECK(updated(before[slot], contents(*tables[slot]), batch.sums(slot), kAdagrad));
      }
    }
  }
}

TEST(evaluation_gives_zeros_for_unknown_keys_and_changes_nothing) {
  const WithThreads with(2);
  const Tables tables = make_tables();
  Batch known = small_batch(1);
  known.plan()->run(tables, true, 1);
  const std::vector<Rows> before = all_contents(tables);
  for (const uint64_t seed : {2ull, 3ull}) {
    Batch batch(seed, kPlanDims, seed == 2 ? 50 : 4000, 300);
    const auto plan = batch.plan();
    plan->run(tables, false, 9);
    CHECK(batch.outputs_follow_from(before));
    CHECK(all_contents(tables) == before);
  }
}

TEST(results_do_not_depend_on_threads_or_shards) {
  for (const VectorType type : {VectorType::f32, VectorType::bf16}) {
    std::vector<std::vector<float>> outputs;
    std::vector<Rows> rows;
    for (const uint32_t shards : {16u, 1u, 2u, 256u}) {
      for (const int threads : {1, 2, 4}) {
        if (type != VectorType::f32 && threads == 2) continue;  // its rounding is what is new
        const WithThreads with(threads);
        const Tables tables = make_tables(shards, type);
        std::vector<std::vector<float>> all;
        for (uint32_t step = 1; step <= 3; ++step) {
          Batch batch = step == 2 ? large_batch(7) : small_batch(step);
          batch.features[1].has_gradient = step != 3;
          const auto plan = batch.plan();
          plan->run(tables, true, step);
          Gradients(plan, batch.gradients()).apply(kRules, {step, step, step});
          for (auto& out : batch.outputs()) all.push_back(std::move(out));
        }
        if (outputs.empty()) outputs = all, rows = all_contents(tables);
        bool same = all.size() == outputs.size();
        for (size_t i = 0; same && i < all.size(); ++i) same = same_bits(all[i], outputs[i]);
        CHECK(same);
        CHECK(all_contents(tables) == rows);
      }
    }
  }
}

TEST(features_without_a_gradient_leave_their_keys_alone) {
  const WithThreads with(2);
  for (const uint64_t seed : {1ull, 2ull, 3ull, 4ull}) {
    const Tables tables = make_tables();
    Batch batch = seed == 4 ? large_batch(seed) : Batch(seed, kPlanDims, 40, 2000);
    for (size_t f = 0; f < batch.features.size(); ++f)
      batch.features[f].has_gradient = batch.features[f].spec.slot == 1 ? false : f % 2 == 0;
    const auto plan = batch.plan();
    plan->run(tables, true, 1);
    const std::vector<Rows> before = all_contents(tables);
    Gradients gradients(plan, batch.gradients());
    CHECK(!gradients.touched()[1]);
    gradients.apply(kRules, kSteps);
    for (uint32_t slot = 0; slot < 3; ++slot)
      CHECK(updated(before[slot], contents(*tables[slot]), batch.sums(slot), *kRules[slot]));
    CHECK(contents(*tables[1]) == before[1]);
  }
}

TEST(merged_gradients_are_the_sum_and_are_applied_once) {
  const WithThreads with(2);
  for (const bool large : {false, true}) {
    const Tables tables = make_tables();
    std::vector<Batch> batches;
    std::vector<std::unique_ptr<Gradients>> parts;
    std::vector<Gradients*> pointers;
    std::vector<Sums> sums(3);
    for (uint64_t seed = 1; seed <= 3; ++seed)
      batches.push_back(large && seed == 2 ? large_batch(seed) : small_batch(seed));
    batches[2].features[0].has_gradient = false;
    for (Batch& batch : batches) {
      const auto plan = batch.plan();
      plan->run(tables, true, 1);
      parts.push_back(std::make_unique<Gradients>(plan, batch.gradients()));
      pointers.push_back(parts.back().get());
      for (uint32_t slot = 0; slot < 3; ++slot) {
        for (const auto& [key, sum] : batch.sums(slot)) {
          std::vector<double>& total = sums[slot][key];
          total.resize(sum.size());
          for (size_t c = 0; c < sum.size(); ++c) total[c] += sum[c];
        }
      }
    }
    const std::vector<Rows> before = all_contents(tables);
    const auto merged = Gradients::merge(pointers);
    for (uint32_t slot = 0; slot < 3; ++slot) CHECK(close(copied(*merged, slot), sums[slot]));
    merged->apply(kRules, kSteps);
    for (uint32_t slot = 0; slot < 3; ++slot)
      CHECK(updated(before[slot], contents(*tables[slot]), sums[slot], *kRules[slot]));
  }
}

// Rows leave between lookup and update, some of their keys come back, others' rows go to new keys.
TEST(gradients_of_evicted_rows_are_dropped_and_counted) {
  const WithThreads with(2);
  for (const bool merged : {false, true}) {
    const Tables tables = make_tables();
    Batch batch = small_batch(5);
    const auto plan = batch.plan();
    plan->run(tables, true, 1);
    Gradients gradients(plan, batch.gradients());
    std::vector<Sums> sums;
    uint64_t dropped = 0;
    for (uint32_t slot = 0; slot < 3; ++slot) {
      sums.push_back(batch.sums(slot));
      std::vector<uint64_t> leaving, coming{1ull << 40, 1ull << 41, 1ull << 42};
      for (const auto& [key, row] : contents(*tables[slot]))
        if (key % 3 == 0) leaving.push_back(key);
      tables[slot]->erase_keys(leaving.data(), leaving.size());
      for (size_t i = 0; i < leaving.size(); ++i) {
        if (slot == 0) dropped += sums[slot].contains(leaving[i]);
        sums[slot].erase(leaving[i]);
        if (i % 2) coming.push_back(leaving[i]);
      }
      train(*tables[slot], coming, 2);
    }
    tables[1]->set_state(std::vector<float>(kPlanDims[1], 0.2f), true);  // rows move as well
    const std::vector<Rows> before = all_contents(tables);
    if (merged) Gradients::merge({&gradients})->apply(kRules, kSteps);
    else gradients.apply(kRules, kSteps);
    for (uint32_t slot = 0; slot < 3; ++slot)
      CHECK(updated(before[slot], contents(*tables[slot]), sums[slot], *kRules[slot]));
    CHECK(dropped > 0);
    CHECK_EQ(tables[0]->stats().dropped_gradients, dropped);
  }
}

TEST(gradients_after_clear_are_all_dropped) {
  const WithThreads with(2);
  const Tables tables = make_tables();
  Batch batch = small_batch(6);
  const auto plan = batch.plan();
  plan->run(tables, true, 1);
  Gradients gradients(plan, batch.gradients());
  const uint64_t keys = batch.sums(0).size();
  for (const auto& table : tables) table->clear();
  train(*tables[0], {3}, 2);
  const std::vector<Rows> before = all_contents(tables);
  gradients.apply(kRules, kSteps);
  CHECK(all_contents(tables) == before);
  CHECK_EQ(tables[0]->stats().dropped_gradients, keys);
}

TEST(a_bad_gradient_skips_its_table_and_no_other) {
  const WithThreads with(2);
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    for (const bool merged : {false, true}) {
      const Tables tables = make_tables();
      Batch batch = small_batch(7);
      for (FeatureData& f : batch.features) {
        if (f.spec.slot != 1) continue;
        f.spec.mode = Mode::pooled;
        f.spec.combiner = Combiner::sum;
        f.weights.clear();
        f.gradient.assign(f.samples * f.stride, 1.0f);
        for (uint64_t i = 0; i < f.samples; ++i) f.gradient[i * f.stride + 2] = bad;
      }
      const auto plan = batch.plan();
      plan->run(tables, true, 1);
      const std::vector<Rows> before = all_contents(tables);
      Gradients gradients(plan, batch.gradients());
      CHECK(gradients.finite() == (std::vector<bool>{true, false, true}));
      if (merged) Gradients::merge({&gradients})->apply(kRules, kSteps);
      else gradients.apply(kRules, kSteps);
      CHECK(contents(*tables[1]) == before[1]);
      for (const uint32_t slot : {0u, 2u}) {
        CHECK(updated(before[slot], contents(*tables[slot]), batch.sums(slot), *kRules[slot]));
        CHECK_EQ(tables[slot]->stats().skipped_updates, 0u);
      }
      CHECK_EQ(tables[1]->stats().skipped_updates, 1u);
    }
  }
}

TEST(a_table_without_a_rule_is_left_alone) {
  const WithThreads with(2);
  const Tables tables = make_tables();
  Batch batch = small_batch(8);
  const auto plan = batch.plan();
  plan->run(tables, true, 1);
  const std::vector<Rows> before = all_contents(tables);
  Gradients(plan, batch.gradients()).apply({nullptr, &kAdagrad, nullptr}, kSteps);
  CHECK(contents(*tables[0]) == before[0]);
  CHECK(contents(*tables[2]) == before[2]);
  CHECK(updated(before[1], contents(*tables[1]), batch.sums(1), kAdagrad));
}

// What a store behind a wire does: the plan says its keys, vectors come back, summed gradients go out.
TEST(vectors_from_elsewhere_give_the_same_as_tables) {
  for (const bool large : {false, true}) {
    const WithThreads with(2);
    const Tables here = make_tables(), there = make_tables(4);
    for (uint32_t step = 1; step <= 3; ++step) {
      Batch local = large ? large_batch(step) : small_batch(step), remote = local;
      const auto plan = local.plan(), far = remote.plan();
      plan->run(here, true, step);
      Gradients(plan, local.gradients()).apply(kRules, {step, step, step});

      far->group();
      std::vector<std::vector<float>> vectors(3);
      std::vector<const float*> pointers;
      std::vector<uint64_t> versions;
      for (uint32_t slot = 0; slot < 3; ++slot) {
        const uint64_t unique = far->unique_in(slot);
        std::vector<uint64_t> keys(unique);
        std::vector<uint32_t> counts(unique);
        far->unique_keys(slot, keys.data(), counts.data());
        vectors[slot].resize(unique * kPlanDims[slot]);
        there[slot]->lookup(keys.data(), counts.data(), unique, true, step, vectors[slot].data());
        pointers.push_back(vectors[slot].data());
        versions.push_back(there[slot]->version());
      }
      far->run(pointers);
      for (size_t f = 0; f < local.features.size(); ++f)
        CHECK(same_bits(local.features[f].out, remote.features[f].out));
      const Gradients gradients(far, remote.gradients());
      for (uint32_t slot = 0; slot < 3; ++slot) {
        const uint64_t unique = gradients.unique_in(slot);
        std::vector<uint64_t> keys(unique);
        std::vector<float> values(unique * kPlanDims[slot]);
        gradients.copy(slot, keys.data(), values.data());
        there[slot]->apply({{keys.data(), unique, values.data(), versions[slot]}}, *kRules[slot], step);
      }
      CHECK(all_contents(here) == all_contents(there));
    }
  }
}
