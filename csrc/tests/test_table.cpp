#include "table/table.h"

#include <cmath>
#include <set>
#include <stdexcept>

#include "kernels/convert.h"
#include "kernels/kernels.h"
#include "tests/check.h"
#include "tests/tools.h"

using namespace karvan;
using namespace karvan::test;

namespace {

bool refuses(const TableConfig& config) {
  try {
    const Table table(config);
  } catch (const std::invalid_argument&) {
    return true;
  } catch (const std::exception&) {  // the wrong kind: it was not the settings that were looked at
  }
  return false;
}

float rounded(float x, VectorType type) {
  switch (type) {
    case VectorType::f32: return x;
    case VectorType::bf16: return bf16_to_float(nearest_bf16(x));
    case VectorType::f16: return f16_to_float(nearest_f16(x));
  }
  return x;
}

std::vector<uint64_t> first_keys(uint64_t begin, uint64_t end) {
  std::vector<uint64_t> keys;
  for (uint64_t key = begin; key < end; ++key) keys.push_back(key);
  return keys;
}

}  // namespace

TEST(table_refuses_impossible_settings) {
  for (uint32_t shards : {0u, 3u, 12u, 512u}) CHECK(refuses(table_config(4, shards)));
  CHECK(refuses(table_config(0)));
  CHECK(!refuses(table_config(1, 1)));
  CHECK(!refuses(table_config(1, 256)));
}

TEST(new_rows_have_their_initial_vector_and_state) {
  for (const VectorType type : {VectorType::f32, VectorType::bf16, VectorType::f16}) {
    const WithThreads with(2);
    const TableConfig config = table_config(7, 16, type);
    Table table(config);
    table.set_state({0.5f, 0.25f, 0.125f});
    Random random(1);
    const std::vector<uint64_t> keys = distinct_keys(random, 500);
    const std::vector<float> got = train(table, keys, 9);
    CHECK_EQ(table.rows(), 500u);
    CHECK_EQ(table.stats().inserted, 500u);
    const Rows rows = contents(table);
    bool right = rows.size() == keys.size();
    for (size_t i = 0; i < keys.size() && right; ++i) {
      std::vector<float> expected = initial_vector(config, keys[i]);
      for (float& x : expected) x = rounded(x, type);
      right &= rows.at(keys[i]) == Row{expected, {0.5f, 0.25f, 0.125f}, 1, 9};
      right &= std::equal(expected.begin(), expected.end(), got.begin() + static_cast<ptrdiff_t>(7 * i));
      const Entry entry = table.find(mix(keys[i]));
      right &= entry && entry.row() != 0 && entry.count() == 1 && entry.last() == 9;
    }
    CHECK(right);
    CHECK(!table.find(mix(123456789)));
  }
}

TEST(lookups_count_uses_in_training_only) {
  const WithThreads with(2);
  Table table(table_config(2));
  const uint64_t keys[] = {1, 2, 3};
  const uint32_t counts[] = {5, 1, UINT32_MAX};
  float vectors[6];
  table.lookup(keys, counts, 3, true, 1, vectors);
  table.lookup(keys, counts, 2, true, 4, vectors);
  CHECK_EQ(table.find(mix(1)).count(), 10u);
  CHECK_EQ(table.find(mix(1)).last(), 4u);
  const uint64_t version = table.version();
  const uint64_t others[] = {1, 2, 99};
  vectors[4] = vectors[5] = 7;
  table.lookup(others, counts, 3, false, 8, vectors);
  CHECK_EQ(table.find(mix(1)).count(), 10u);
  CHECK_EQ(table.find(mix(1)).last(), 4u);
  CHECK_EQ(table.rows(), 3u);
  CHECK_EQ(table.version(), version);
  CHECK(vectors[4] == 0 && vectors[5] == 0);  // an unknown key is a zero vector
  table.lookup(keys, counts, 3, true, 9, vectors);
  CHECK_EQ(table.find(mix(3)).count(), UINT32_MAX);  // does not wrap around
}

// What growth moves in a batch is a share of what the batch inserts, and it takes no memory beside the larger index.
TEST(growth_is_spread_over_batches) {
  const WithThreads with(2);
  const TableConfig config = table_config(16);
  Table table(config);
  table.set_state(std::vector<float>(16, 0.1f));
  constexpr uint64_t kBatch = 1500, kBatches = 200;
  bool complete = true, even = true, compact = true;
  for (uint64_t batch = 0; batch < kBatches; ++batch) {
    const uint64_t before = table.stats().moved;
    train(table, first_keys(batch * kBatch, (batch + 1) * kBatch), static_cast<uint32_t>(batch));
    if (batch >= 20) {
      even &= table.stats().moved - before <= 12 * kBatch;
      compact &= static_cast<double>(table.bytes()) <= 1.3 * 128 * static_cast<double>(table.rows());
    }
    if (batch % 20 == 19)
      for (uint64_t key = 0; key < (batch + 1) * kBatch; key += 7)
        complete &= static_cast<bool>(table.find(mix(key)));
  }
  CHECK(even);
  CHECK(compact);
  CHECK(table.stats().moved > 3 * table.rows());
  CHECK(complete);
  CHECK_EQ(table.rows(), kBatch * kBatches);
  const uint64_t absent = 1ull << 60;
  CHECK_EQ(table.erase_keys(&absent, 1), 0u);  // finishes growth
  CHECK(static_cast<double>(table.bytes()) <= 1.3 * 128 * static_cast<double>(table.rows()));
  bool right = true;
  uint32_t seen = 0;
  const RowSet set = table.snapshot();
  for (size_t i = 0; i < set.rows; ++i) {
    seen += set.keys[i] < kBatch * kBatches && set.last_steps[i] == set.keys[i] / kBatch;
    const float* const vector = set.vectors.data() + 16 * i;
    if (i % 50 == 0) right &= same_bits(initial_vector(config, set.keys[i]), {vector, vector + 16});
  }
  CHECK_EQ(seen, kBatch * kBatches);
  CHECK(right);
}

TEST(one_huge_batch_fits) {
  const WithThreads with(2);
  Table table(table_config(1, 4));
  train(table, first_keys(0, 10), 1);
  train(table, first_keys(10, 50000), 2);
  CHECK_EQ(table.rows(), 50000u);
  bool all = true;
  for (uint64_t key = 0; key < 50000; ++key) all &= static_cast<bool>(table.find(mix(key)));
  CHECK(all);
}

TEST(freed_rows_are_reset_and_used_again) {
  const WithThreads with(2);
  const TableConfig config = table_config(4);
  Table table(config);
  table.set_state({1.0f});
  const std::vector<uint64_t> keys = first_keys(0, 3000);
  train(table, keys, 1);
  const Rule rule{.kind = Rule::Kind::adagrad_row, .lr = 1.0f, .beta1 = 1.0f};
  const std::vector<float> ones(4 * keys.size(), 1.0f);
  table.apply({{keys.data(), keys.size(), ones.data(), table.version()}}, rule, 1);
  std::set<uint32_t> before;
  for (uint64_t key : keys) before.insert(table.find(mix(key)).row());
  CHECK_EQ(before.size(), keys.size());
  CHECK_EQ(table.erase_keys(keys.data(), keys.size()), keys.size());
  CHECK_EQ(table.rows(), 0u);
  const uint64_t bytes = table.bytes();
  // The same keys again, so that each shard needs as many rows as it has free.
  train(table, keys, 2);
  CHECK_EQ(table.bytes(), bytes);
  bool reused = true, reset = true;
  for (uint64_t key : keys) reused &= before.contains(table.find(mix(key)).row());
  for (const auto& [key, row] : contents(table))
    reset &= row == Row{initial_vector(config, key), {1.0f}, 1, 2};
  CHECK(reused);
  CHECK(reset);
}

TEST(clear_leaves_an_empty_usable_table) {
  const WithThreads with(2);
  const TableConfig config = table_config(4);
  Table table(config);
  table.set_state({1.0f, 2.0f});
  const uint64_t empty = table.bytes();
  train(table, first_keys(0, 20000), 1);
  const uint64_t version = table.version();
  table.clear();
  CHECK_EQ(table.rows(), 0u);
  CHECK(!table.find(mix(5)));
  std::set<uint64_t> gone;
  table.evictions().each_since(version, [&](uint64_t hash) { gone.insert(unmix(hash)); });
  CHECK_EQ(gone.size(), 20000u);
  CHECK_EQ(table.bytes(), empty + table.evictions().bytes());
  train(table, first_keys(100, 200), 2);
  CHECK_EQ(table.rows(), 100u);
  CHECK(contents(table).at(150) == (Row{initial_vector(config, 150), {1.0f, 2.0f}, 1, 2}));
  CHECK_EQ(table.stats().inserted, 20100u);
  CHECK_EQ(table.stats().evicted, 20000u);
}

TEST(snapshot_parts_make_the_whole_in_order_of_hash) {
  for (const uint32_t shards : {1u, 16u}) {
    const WithThreads with(2);
    Table table(table_config(3, shards));
    Random random(2);
    for (uint32_t step = 0; step < 30; ++step) train(table, distinct_keys(random, 200), step);
    const Rows whole = contents(table);
    CHECK_EQ(whole.size(), table.rows());
    for (const uint32_t parts : {1u, 2u, 3u, 16u, 1000u}) {
      Rows joined;
      size_t rows = 0;
      uint64_t previous = 0;
      bool ordered = true;
      for (uint32_t part = 0; part < parts; ++part) {
        const RowSet set = table.snapshot(part, parts);
        rows += set.rows;
        for (size_t i = 0; i < set.rows; ++i) {
          ordered &= rows == 0 || mix(set.keys[i]) >= previous;
          previous = mix(set.keys[i]);
        }
        joined.merge(contents(table, part, parts));
      }
      CHECK(ordered);
      CHECK_EQ(rows, whole.size());
      CHECK(joined == whole);
    }
  }
}

TEST(load_inserts_and_overwrites) {
  for (const VectorType type : {VectorType::f32, VectorType::f16}) {
    const WithThreads with(2);
    const TableConfig config = table_config(3, 16, type);
    Table table(config);
    table.set_state({0.5f, 0.75f});
    train(table, first_keys(0, 100), 1);
    const std::vector<uint64_t> keys = first_keys(50, 5000);
    std::vector<float> vectors, state;
    std::vector<uint32_t> counts, last;
    for (uint64_t key : keys) {
      for (const float add : {0.25f, 0.0f, 0.0f}) vectors.push_back(static_cast<float>(key % 2048) + add);
      for (int c = 0; c < 2; ++c) state.push_back(static_cast<float>(key + c));
      counts.push_back(static_cast<uint32_t>(key * 3));
      last.push_back(static_cast<uint32_t>(key * 5));
    }
    for (const bool with_state : {true, false}) {
      table.load(keys.data(), keys.size(), vectors.data(), with_state ? state.data() : nullptr, counts.data(),
                 last.data());
      const Rows rows = contents(table);
      CHECK_EQ(rows.size(), 5000u);
      bool right = true;
      for (size_t i = 0; i < keys.size(); ++i) {
        Row expected{{}, {0.5f, 0.75f}, counts[i], last[i]};
        for (int c = 0; c < 3; ++c) expected.vector.push_back(rounded(vectors[3 * i + c], type));
        if (with_state) expected.state = {state[2 * i], state[2 * i + 1]};
        right &= rows.at(keys[i]) == expected;
      }
      CHECK(right);
      CHECK_EQ(rows.at(49).last, 1u);
    }
    // A second table loaded from a snapshot of the first holds the same.
    const RowSet set = table.snapshot();
    Table copy(config);
    copy.set_state({0, 0});
    copy.load(set.keys.data(), set.rows, set.vectors.data(), set.state.data(), set.counts.data(),
              set.last_steps.data());
    CHECK(contents(copy) == contents(table));
  }
}

TEST(set_state_keeps_vectors_and_starts_state_anew) {
  const WithThreads with(2);
  for (const VectorType type : {VectorType::f32, VectorType::bf16}) {
    Table table(table_config(5, 16, type));
    for (uint32_t batch = 0; batch < 30; ++batch)  // in the middle of growth as well
      train(table, first_keys(batch * 300, batch * 300 + 300), batch);
    Rows expected = contents(table);
    table.set_state({}, true);  // nothing to start anew
    CHECK(contents(table) == expected);
    const auto change = [&](const std::vector<float>& initial, bool fresh, bool starts_anew) {
      const uint64_t epoch = table.row_epoch();
      table.set_state(initial, fresh);
      if (starts_anew)
        for (auto& [key, row] : expected) row.state = initial;
      CHECK(contents(table) == expected);
      CHECK_EQ(table.row_epoch() != epoch, starts_anew);
    };
    change({1, 2, 3}, false, true);
    change({4, 5, 6}, false, false);  // same size: existing rows keep theirs …
    const uint64_t fresh_key = 1ull << 50;
    train(table, {fresh_key}, 77);
    CHECK(contents(table).at(fresh_key).state == (std::vector<float>{4, 5, 6}));  // … new rows have the new
    expected[fresh_key] = contents(table).at(fresh_key);
    change({4, 5, 6}, true, true);
    change(std::vector<float>(40, 0.5f), false, true);
    change({}, false, true);
    CHECK_EQ(table.layout().state, 0u);
  }
}

TEST(admission_rules_decide_who_gets_a_row) {
  const WithThreads with(2);
  const std::vector<uint64_t> keys = first_keys(0, 20000);
  std::map<uint32_t, Rows> by_shards, drawn_by_shards;
  for (const uint32_t shards : {1u, 16u}) {
    TableConfig config = table_config(1, shards);
    config.admit = {Admission::Kind::read_only, 1.0, 1, 0};
    Table read_only(config);
    const std::vector<float> vectors = train(read_only, keys, 1);
    CHECK_EQ(read_only.rows(), 0u);
    CHECK_EQ(read_only.stats().rejected, keys.size());
    CHECK(std::all_of(vectors.begin(), vectors.end(), [](float x) { return x == 0; }));

    config.admit = {Admission::Kind::probability, 0.3, 1, 0};
    Table some(config);
    train(some, keys, 1);
    const Rows chosen = contents(some);
    CHECK(std::fabs(static_cast<double>(chosen.size()) - 6000) < 5 * std::sqrt(20000 * 0.3 * 0.7));
    train(some, keys, 2);
    CHECK_EQ(some.rows(), chosen.size());  // the same keys again
    by_shards[shards] = chosen;

    config.admit.kind = Admission::Kind::probability_each;
    Table drawn(config);
    train(drawn, keys, 1);
    CHECK(std::fabs(static_cast<double>(drawn.rows()) - 6000) < 5 * std::sqrt(20000 * 0.3 * 0.7));
    train(drawn, keys, 2);  // others, of the keys that are left
    CHECK(std::fabs(static_cast<double>(drawn.rows()) - 10200) < 5 * std::sqrt(20000 * 0.51 * 0.49));
    drawn_by_shards[shards] = contents(drawn);
    for (uint32_t step = 3; step < 60; ++step) train(drawn, keys, step);
    CHECK_EQ(drawn.rows(), keys.size());
    config.admit.kind = Admission::Kind::probability;

    for (const double all_or_none : {0.0, 1.0}) {
      config.admit.probability = all_or_none;
      Table table(config);
      train(table, keys, 1);
      CHECK_EQ(table.rows(), all_or_none == 1.0 ? keys.size() : 0u);
    }
  }
  CHECK(by_shards[1] == by_shards[16]);
  CHECK(drawn_by_shards[1] == drawn_by_shards[16]);
}

TEST(min_count_admits_a_key_once_it_was_seen_often_enough) {
  std::map<uint32_t, Rows> by_shards;
  for (const uint32_t shards : {1u, 16u, 256u}) {
    const WithThreads with(2);
    TableConfig config = table_config(1, shards);
    config.admit = {Admission::Kind::min_count, 1.0, 4, 20000};
    Table table(config);
    std::map<uint64_t, uint32_t> seen;
    bool late = false;
    Random random(3);
    for (uint32_t step = 0; step < 20; ++step) {
      std::vector<uint64_t> keys = distinct_keys(random, 300);
      train(table, keys, step);
      for (uint64_t key : keys) late |= ++seen[key] >= 4 && !table.find(mix(key));
    }
    CHECK(!late);
    uint64_t often = 0;
    for (const auto& [key, count] : seen) often += count >= 4;
    CHECK(often > 50 && table.rows() >= often && table.rows() < often + 100);
    by_shards[shards] = contents(table);
    table.clear();
    train(table, {0}, 1);
    CHECK_EQ(table.rows(), 0u);  // counts are forgotten as well
  }
  CHECK(by_shards[1] == by_shards[16]);
  CHECK(by_shards[1] == by_shards[256]);
}
