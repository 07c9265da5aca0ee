#include <algorithm>
#include <cmath>
#include <tuple>

#include "tests/check.h"
#include "tests/tools.h"

using namespace karvan;
using namespace karvan::test;

namespace {

using Use = std::pair<uint32_t, uint32_t>;  // (count, last step)
using Uses = std::vector<std::pair<uint64_t, Use>>;  // by key

// Rows with few different counts and steps, so that ties are the rule.
Uses load_uses(Table& table, uint64_t rows, uint32_t counts, const std::vector<uint32_t>& steps) {
  Random random(rows);
  std::vector<uint64_t> keys;
  std::vector<uint32_t> count, last;
  Uses uses;
  for (uint64_t key = 0; key < rows; ++key) {
    keys.push_back(key);
    count.push_back(static_cast<uint32_t>(1 + below(random, counts)));
    last.push_back(steps[below(random, steps.size())]);
    uses.push_back({key, {count.back(), last.back()}});
  }
  const std::vector<float> vectors(rows * table.layout().dim, 1.0f);
  table.load(keys.data(), keys.size(), vectors.data(), nullptr, count.data(), last.data());
  return uses;
}

std::vector<uint64_t> remaining(Table& table) {
  const RowSet set = table.snapshot();
  std::vector<uint64_t> keys(set.keys.data(), set.keys.data() + set.rows);
  std::sort(keys.begin(), keys.end());
  return keys;
}

// By sorting everything.
std::vector<uint64_t> slow_remaining(const Uses& uses, uint64_t evicted, bool by_count) {
  std::vector<std::tuple<uint32_t, uint32_t, uint64_t>> order;
  for (const auto& [key, use] : uses)
    order.emplace_back(by_count ? use.first : use.second, by_count ? use.second : use.first, mix(key));
  std::sort(order.begin(), order.end());
  std::vector<uint64_t> keys;
  for (size_t i = evicted; i < order.size(); ++i) keys.push_back(unmix(std::get<2>(order[i])));
  std::sort(keys.begin(), keys.end());
  return keys;
}

void check_capacity(uint64_t capacity, uint64_t rows, uint32_t shards, const std::vector<uint32_t>& steps,
                    const std::vector<bool>& orders = {false, true}) {
  for (const bool by_count : orders) {
    TableConfig config = table_config(1, shards);
    config.evict.kind = by_count ? Eviction::Kind::lfu : Eviction::Kind::lru;
    config.evict.capacity = capacity;
    Table table(config);
    const auto uses = load_uses(table, rows, 3, steps);
    const uint64_t spare = capacity >= 65536 ? capacity / 16 : 0;
    const uint64_t expected = rows > capacity ? rows - capacity + spare : 0;
    CHECK_EQ(table.maintain(1, 0), expected);
    CHECK_EQ(table.rows(), rows - expected);
    CHECK_EQ(table.stats().evicted, expected);
    CHECK(remaining(table) == slow_remaining(uses, expected, by_count));
    CHECK_EQ(table.maintain(2, 0), 0u);
  }
}

}  // namespace

TEST(capacity_evicts_the_least_used_first) {
  const WithThreads with(2);
  for (const uint32_t shards : {1u, 16u, 256u})
    for (const uint64_t capacity : {0ull, 1ull, 999ull, 1000ull, 5000ull})
      check_capacity(capacity, 1000, shards, {0, 1, 2, 70000, 70001, UINT32_MAX});
}

TEST(a_large_capacity_frees_a_sixteenth_at_once) {
  const WithThreads with(2);
  check_capacity(65535, 65600, 16, {1, 2});
  check_capacity(65536, 65600, 16, {1, 2});
  check_capacity(70000, 90000, 16, {5, 1u << 20});
}

// More rows than are sorted at once: the limit is found digit by digit, down into the hash for the ties.
TEST(a_very_large_table_is_narrowed_down_by_digits) {
  if (KARVAN_TSAN) return;  // a million rows take it long, and the threads do what they do for fewer
  const WithThreads with(2);
  check_capacity(900000, (1 << 20) + 5000, 16, {(7u << 16) + 9}, {false});
}

// Tables with common keys, some of them used alike, so that only the table decides.
TEST(tables_shrink_together_to_one_capacity) {
  const WithThreads with(2);
  for (const uint64_t capacity : {0ull, 1ull, 700ull, 1999ull, 2000ull, 3000ull}) {
    Table first(table_config(1, 1)), second(table_config(2, 16)), empty(table_config(1, 4));
    const auto uses = load_uses(first, 1000, 2, {1, 2, 70000});
    const auto others = load_uses(second, 1000, 2, {1, 2, 70000});
    std::vector<std::tuple<uint32_t, uint32_t, uint64_t, int>> order;
    for (const auto& [key, use] : uses) order.emplace_back(use.second, use.first, mix(key), 0);
    for (const auto& [key, use] : others) order.emplace_back(use.second, use.first, mix(key), 1);
    std::sort(order.begin(), order.end());
    const uint64_t gone = order.size() > capacity ? order.size() - capacity : 0;
    CHECK_EQ(Table::shrink({&first, &second, &empty}, capacity), gone);
    std::vector<uint64_t> expected[2];
    for (size_t i = gone; i < order.size(); ++i) expected[std::get<3>(order[i])].push_back(unmix(std::get<2>(order[i])));
    for (auto& keys : expected) std::sort(keys.begin(), keys.end());
    CHECK(remaining(first) == expected[0]);
    CHECK(remaining(second) == expected[1]);
    CHECK_EQ(Table::shrink({&first, &second, &empty}, capacity), 0u);
  }
}

TEST(age_evicts_rows_not_used_for_so_many_steps) {
  const WithThreads with(2);
  TableConfig config = table_config(1);
  config.evict = {Eviction::Kind::age, 0, 10, 0, 0, 4};
  Table table(config);
  std::vector<uint32_t> steps;
  for (uint32_t step = 0; step < 30; ++step) steps.push_back(step);
  auto uses = load_uses(table, 3000, 2, steps);
  for (const uint64_t step : {3ull, 8ull, 10ull, 16ull, 17ull, 32ull, 1000ull}) {
    uint64_t gone = 0;
    if (step % 4 == 0)  // looks only every 4th step
      gone = std::erase_if(uses, [&](const auto& use) { return step > 10 && use.second.second < step - 10; });
    CHECK_EQ(table.maintain(step, 0), gone);
    CHECK(remaining(table) == slow_remaining(uses, 0, false));
  }
  CHECK_EQ(table.rows(), 0u);
}

TEST(norm_evicts_rows_with_a_small_vector) {
  const WithThreads with(2);
  for (const VectorType type : {VectorType::f32, VectorType::bf16}) {
    TableConfig config = table_config(4, 16, type);
    config.evict = {Eviction::Kind::norm, 0, 0, 0, 0.75f, 2};
    Table table(config);
    Random random(1);
    const std::vector<uint64_t> keys = distinct_keys(random, 2000);
    train(table, keys, 1);
    std::vector<uint64_t> expected;
    for (const auto& [key, row] : contents(table)) {
      double squares = 0;
      for (float x : row.vector) squares += double{x} * x;
      if (squares >= 0.75 * 0.75) expected.push_back(key);
    }
    CHECK(expected.size() > 1000 && expected.size() < 2000);
    CHECK_EQ(table.maintain(3, 0), 0u);
    CHECK_EQ(table.maintain(4, 0), 2000 - expected.size());
    CHECK(remaining(table) == expected);
  }
}

TEST(ttl_keeps_rows_just_used_when_its_clock_was_behind_for_a_while) {
  const WithThreads with(1);
  TableConfig config = table_config(1);
  config.evict = {Eviction::Kind::ttl, 0, 0, 100.0, 0, 1};
  Table table(config);
  double real = 0;
  for (uint32_t step = 1; step <= 300; ++step) {
    real += 1;
    const double shown = step > 100 && step <= 200 ? real : real + 1e6;  // behind by days, for a hundred steps
    train(table, {step % 10}, step);
    CHECK_EQ(table.maintain(step, shown), 0u);
  }
  CHECK_EQ(table.evict(300, real + 1e6 + 200), 10u);
}

// Never early; late by at most two of the 64 parts a lifetime is noted in.
TEST(ttl_evicts_rows_when_their_time_has_passed) {
  const WithThreads with(2);
  for (const double longest_pause : {0.2, 5.0, 300.0}) {
    TableConfig config = table_config(1);
    config.evict = {Eviction::Kind::ttl, 0, 0, 100.0, 0, 1};
    Table table(config);
    std::map<uint64_t, double> used;
    Random random(1);
    double now = 1.7e9;
    bool early = false, late = false;
    uint64_t gone = 0;
    for (uint32_t step = 1; step <= 1500; ++step) {
      now += longest_pause * static_cast<double>(below(random, 1000)) / 1000;
      const std::vector<uint64_t> keys{below(random, 50), 50 + below(random, 5000)};
      train(table, keys, step);
      for (uint64_t key : keys) used[key] = now;
      gone += table.maintain(step, now);
      if (step % 10) continue;
      for (auto it = used.begin(); it != used.end();) {
        const bool there = static_cast<bool>(table.find(mix(it->first)));
        early |= !there && now - it->second < 100.0;
        late |= there && now - it->second > 100.0 * (1 + 2.0 / 64) + longest_pause;
        it = there ? std::next(it) : used.erase(it);
      }
    }
    CHECK(!early);
    CHECK(!late);
    CHECK(gone > 100);
    CHECK_EQ(table.evict(1501, now + 1000.0), table.stats().inserted - gone);
    CHECK_EQ(table.rows(), 0u);
  }
}

TEST(a_table_that_never_evicts_keeps_everything) {
  const WithThreads with(2);
  Table table(table_config(1));
  load_uses(table, 100, 2, {0});
  CHECK_EQ(table.maintain(1u << 30, 1e12), 0u);
  CHECK_EQ(table.evict(1u << 30, 1e12), 0u);
  CHECK_EQ(table.rows(), 100u);
}

TEST(evictions_are_listed_since_a_version) {
  const WithThreads with(2);
  Table table(table_config(1));
  load_uses(table, 1000, 2, {0});
  std::vector<std::pair<uint64_t, std::vector<uint64_t>>> reference;  // (version before, keys)
  Random random(1);
  for (int i = 0; i < 20; ++i) {
    std::vector<uint64_t> keys;
    for (uint64_t n = below(random, 40); n > 0; --n) keys.push_back(below(random, 1200));
    std::vector<uint64_t> present;
    for (uint64_t key : std::set<uint64_t>(keys.begin(), keys.end()))
      if (table.find(mix(key))) present.push_back(key);
    const uint64_t version = table.version();
    CHECK_EQ(table.erase_keys(keys.data(), keys.size()), present.size());
    reference.emplace_back(version, present);
    const auto listed = [&](uint64_t since) {
      std::multiset<uint64_t> all;
      table.evictions().each_since(since, [&](uint64_t hash) { all.insert(unmix(hash)); });
      return all;
    };
    for (size_t from = 0; from < reference.size(); ++from) {
      std::multiset<uint64_t> expected;
      for (size_t j = from; j < reference.size(); ++j)
        expected.insert(reference[j].second.begin(), reference[j].second.end());
      CHECK(listed(reference[from].first) == expected);
      CHECK_EQ(table.evictions().any_since(reference[from].first), !expected.empty());
    }
    CHECK(!table.evictions().any_since(table.version()));
    train(table, keys.empty() ? keys : std::vector<uint64_t>{keys[0]}, 1);  // some come back
  }
}

TEST(the_eviction_log_is_bounded_and_says_what_it_forgot) {
  EvictionLog log;
  for (uint64_t version = 1; version <= 50; ++version)
    log.add(version, std::vector<uint64_t>(10, version), 100);
  CHECK(log.bytes() <= 100 * sizeof(uint64_t));
  CHECK_EQ(log.forgotten(), 40u);
  CHECK(log.knows(40) && log.knows(45) && !log.knows(39));
  std::set<uint64_t> versions;
  log.each_since(0, [&](uint64_t hash) { versions.insert(hash); });
  CHECK_EQ(versions.size(), 10u);
  CHECK_EQ(*versions.begin(), 41u);
  size_t left = 0;
  log.each_since(45, [&](uint64_t) { ++left; });
  CHECK_EQ(left, 50u);
  log.add(60, {}, 100);
  CHECK(!log.any_since(50));
  log.add(61, std::vector<uint64_t>(1000, 61), 100);  // more than the limit at once is still told
  left = 0;
  log.each_since(60, [&](uint64_t) { ++left; });
  CHECK_EQ(left, 1000u);
  CHECK_EQ(log.forgotten(), 50u);
}
