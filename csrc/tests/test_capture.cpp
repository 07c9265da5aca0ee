// Captures against whole snapshots of the same moment, while all that changes rows goes on.
#include <thread>

#include "kernels/kernels.h"
#include "table/capture.h"
#include "tests/check.h"
#include "tests/tools.h"

using namespace karvan;
using namespace karvan::test;

namespace {

constexpr uint32_t kDim = 3;
const Rule kRule{.kind = Rule::Kind::adagrad_row, .lr = 0.5f, .beta1 = 1.0f, .eps = 1.0f};

void add(Rows& rows, const RowSet& set, uint32_t dim, uint32_t state) {
  for (size_t i = 0; i < set.rows; ++i) {
    CHECK(!rows.contains(set.keys[i]));
    CHECK(i == 0 || mix(set.keys[i - 1]) < mix(set.keys[i]));
    Row& row = rows[set.keys[i]];
    row.vector.assign(set.vectors.data() + i * dim, set.vectors.data() + (i + 1) * dim);
    if (state) row.state.assign(set.state.data() + i * state, set.state.data() + (i + 1) * state);
    row.count = set.counts[i];
    row.last = set.last_steps[i];
  }
}

// A batch of training and whatever else may happen to rows; gradients of the batch before may come late.
struct Trainer {
  std::shared_ptr<Table> table;
  Random random;
  uint32_t step = 0;
  std::vector<uint64_t> late;
  uint64_t late_version = 0;

  void apply(const std::vector<uint64_t>& keys, uint64_t version) {
    std::vector<float> gradients(keys.size() * kDim);
    for (float& g : gradients) g = uniform(random, -1, 1);
    table->apply({{keys.data(), keys.size(), gradients.data(), version}}, kRule, step);
  }
  void one_step(uint64_t range, bool rare) {
    const Exclusive exclusive;
    ++step;
    std::set<uint64_t> keys;
    for (uint64_t i = below(random, 300); i > 0; --i) keys.insert(below(random, range));
    const std::vector<uint64_t> all(keys.begin(), keys.end());
    if (!late.empty()) apply(late, late_version);
    late.clear();
    train(*table, all, step);
    if (below(random, 4) == 0) {
      late = all;
      late_version = table->version();
    } else {
      apply(all, table->version());
    }
    if (below(random, 3) == 0) {
      std::vector<uint64_t> leaving;
      for (int i = 0; i < 20; ++i) leaving.push_back(below(random, range));
      table->erase_keys(leaving.data(), leaving.size());
    }
    if (rare && below(random, 5) == 0) {
      const uint32_t some[] = {7, 8};
      const float vectors[] = {1, 2, 3, 4, 5, 6}, state[] = {1, 2};
      const uint64_t loaded[] = {1, below(random, range) + 2};
      table->load(loaded, 2, vectors, state, some, some);
    }
    if (rare && below(random, 12) == 0) table->set_state({0.25f}, true);
    if (rare && below(random, 12) == 0) table->clear();
  }
};

std::unique_ptr<Capture> begin(const std::shared_ptr<Table>& table, uint32_t parts, bool track,
                               std::optional<uint64_t> since = {}) {
  const Exclusive exclusive;
  return Table::capture(table, parts, track, since);
}

Rows now(Table& table) {
  const Exclusive exclusive;
  return contents(table);
}

std::shared_ptr<Table> make_table(uint32_t shards) {
  auto table = std::make_shared<Table>(table_config(kDim, shards));
  const Exclusive exclusive;
  table->set_state({0.5f});
  return table;
}

}  // namespace

TEST(a_capture_is_of_one_moment_whatever_happens_between_its_parts) {
  for (const uint32_t shards : {1u, 4u, 32u}) {
    for (const uint32_t parts : {1u, 2u, 16u, 128u}) {
      Trainer trainer{make_table(shards), Random(shards * 1000 + parts)};
      for (int round = 0; round < 4; ++round) {
        for (int i = 0; i < 20; ++i) trainer.one_step(4000, true);
        const Rows expected = now(*trainer.table);
        const auto capture = begin(trainer.table, parts, false);
        Rows got;
        for (uint32_t p = 0; p < parts; ++p) {
          for (uint64_t i = below(trainer.random, 3); i > 0; --i) trainer.one_step(4000 << round, round > 1);
          add(got, capture->part(p), kDim, 1);
        }
        CHECK(got == expected);
      }
    }
  }
}

TEST(changes_since_a_capture_bring_a_copy_up_to_date) {
  for (const uint32_t shards : {1u, 32u}) {
    Trainer trainer{make_table(shards), Random(shards)};
    Rows copy;
    std::optional<uint64_t> since;
    uint64_t rows_read = 0;
    for (int round = 0; round < 12; ++round) {
      for (int i = 0; i < 5; ++i) trainer.one_step(20000, false);
      if (round == 7) {
        const Exclusive exclusive;
        trainer.table->clear();
      }
      const Rows expected = now(*trainer.table);
      const auto capture = begin(trainer.table, 4, true, since);
      for (uint64_t hash : capture->erased()) copy.erase(unmix(hash));
      Rows changed;
      for (uint32_t p = 0; p < 4; ++p) {
        trainer.one_step(20000, false);
        add(changed, capture->part(p), kDim, 1);
      }
      rows_read += changed.size();
      for (auto& [key, row] : changed) copy[key] = row;
      CHECK(copy == expected);
      since = capture->version();
    }
    CHECK(rows_read < 12 * copy.size());  // not everything every time
    const auto refused = [&](uint64_t version) {
      try {
        begin(trainer.table, 4, true, version);
      } catch (const std::invalid_argument&) {
        return true;
      }
      return false;
    };
    CHECK(refused(*since - 1));
    {
      const Exclusive exclusive;
      trainer.table->set_state({0.1f}, true);  // rows are laid out anew: what changed is not known any more
    }
    CHECK(refused(*since));
  }
}

TEST(a_capture_is_read_on_another_thread_while_training_goes_on) {
  Trainer trainer{make_table(8), Random(1)};
  for (int i = 0; i < 100; ++i) trainer.one_step(30000, false);
  const Rows expected = now(*trainer.table);
  const auto capture = begin(trainer.table, 32, true);
  Rows got;
  std::atomic<bool> done{false};
  std::thread reader([&] {
    for (uint32_t p = 0; p < 32; ++p) add(got, capture->part(p), kDim, 1);
    done = true;
  });
  do trainer.one_step(60000, false);
  while (!done);
  reader.join();
  CHECK(got == expected);
}

TEST(parts_are_read_in_order_and_one_capture_at_a_time) {
  const auto table = make_table(4);
  auto capture = begin(table, 4, false);
  const auto refused = [&](auto&& f) {
    try {
      f();
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  CHECK(refused([&] { capture->part(1); }));
  CHECK(refused([&] { begin(table, 4, false); }));
  CHECK(refused([&] { begin(table, 3, false); }));
  capture->close();
  CHECK(refused([&] { capture->part(0); }));
  CHECK(!refused([&] { begin(table, 4, false); }));
}
