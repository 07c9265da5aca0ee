// Lookups in flight are left out of captures: against a replay of the batches that were trained.
#include "batch/lookup_log.h"

#include <deque>

#include "tests/check.h"
#include "tests/tools.h"

using namespace karvan;
using namespace karvan::test;

namespace {

constexpr uint32_t kDim = 2;

struct Use {
  uint64_t key;
  uint32_t times;
};

// A lookup of distinct keys, as a server has it for one trainer.
struct Lookup {
  std::vector<uint64_t> keys;
  std::vector<uint32_t> times;
  std::vector<float> out;
  std::shared_ptr<Plan> plan;
  uint32_t step = 0;
  bool trained = false;

  Lookup(const std::shared_ptr<Table>& table, LookupLog& log, const std::vector<Use>& uses, uint32_t step) : step(step) {
    for (const Use& use : uses) {
      keys.push_back(use.key);
      times.push_back(use.times);
    }
    out.resize(keys.size() * kDim);
    static const auto specs = std::make_shared<const std::vector<FeatureSpec>>(std::vector<FeatureSpec>{
        {"item", "item", 0, PoolArgs::Mode::cells, Combiner::sum, 1, kDim}});
    FeatureInput in;
    in.values = keys.data();
    in.cells = in.samples = keys.size();
    in.out = out.data();
    in.uses = times.data();
    const Exclusive exclusive;
    plan = std::make_shared<Plan>(specs, std::vector<FeatureInput>{in}, 1);
    plan->run({table}, true, step, true);
    log.add(plan);
  }
};

using Lookups = std::deque<std::unique_ptr<Lookup>>;

struct Known {
  uint32_t count = 0, last = 0;
  bool operator==(const Known&) const = default;
};

// The slow model: rows and counts of the trained lookups, or of all, in the order of lookups.
std::map<uint64_t, Known> model(const Table& table, const Lookups& lookups, bool all) {
  std::map<uint64_t, Known> rows;
  std::map<uint64_t, uint64_t> seen;
  for (const auto& lookup : lookups) {
    if (!lookup->trained && !all) continue;
    for (size_t i = 0; i < lookup->keys.size(); ++i) {
      const uint64_t key = lookup->keys[i];
      if (!rows.contains(key)) {
        seen[key] += lookup->times[i];
        const auto uses = static_cast<uint32_t>(std::min<uint64_t>(255, seen[key]));
        if (!table.would_admit(mix(key), uses, lookup->step)) continue;
      }
      rows[key].count += lookup->times[i];
      rows[key].last = lookup->step;
    }
  }
  return rows;
}

std::map<uint64_t, Known> known(const Rows& rows) {
  std::map<uint64_t, Known> found;
  for (const auto& [key, row] : rows) found[key] = {row.count, row.last};
  return found;
}

std::map<uint64_t, Known> captured(const std::shared_ptr<Table>& table, LookupLog& log) {
  const auto capture = [&] {
    const Exclusive exclusive;
    return Table::capture(table, 4, false, {}, log.corrections(*table));
  }();
  std::map<uint64_t, Known> found;
  for (uint32_t part = 0; part < 4; ++part) {
    const RowSet set = capture->part(part);
    for (size_t i = 0; i < set.rows; ++i) found[set.keys[i]] = {set.counts[i], set.last_steps[i]};
  }
  return found;
}

// A table that is filled with what a capture gave, as after a rollback, goes on as the model does.
std::map<uint64_t, uint32_t> filter_of(const std::shared_ptr<Table>& table, LookupLog& log, uint64_t keys) {
  const Exclusive exclusive;
  std::vector<uint8_t> copy(table->filter().bytes());
  std::copy_n(table->filter().data(), copy.size(), reinterpret_cast<char*>(copy.data()));
  log.correct_filter(*table, copy.data());
  Table other(table->config());
  std::copy_n(reinterpret_cast<const char*>(copy.data()), copy.size(), other.filter().data());
  std::map<uint64_t, uint32_t> counts;
  for (uint64_t key = 0; key < keys; ++key) counts[key] = other.filter_count(mix(key));
  return counts;
}

std::map<uint64_t, uint32_t> filter_model(const Table& table, const Lookups& lookups, uint64_t keys) {
  std::map<uint64_t, uint32_t> counts;
  std::set<uint64_t> rows;
  for (uint64_t key = 0; key < keys; ++key) counts[key] = 0;
  for (const auto& lookup : lookups) {
    for (size_t i = 0; lookup->trained && i < lookup->keys.size(); ++i) {
      const uint64_t key = lookup->keys[i];
      if (rows.contains(key)) continue;
      counts[key] += lookup->times[i];
      if (table.would_admit(mix(key), counts[key], lookup->step)) rows.insert(key);
    }
  }
  return counts;
}

TableConfig config_of(Admission::Kind kind) {
  TableConfig config = table_config(kDim, 4);
  config.admit.kind = kind;
  config.admit.min_count = 3;
  config.admit.probability = 0.5;
  config.admit.slots = 1 << 17;  // so that keys do not share counters
  return config;
}

std::vector<Use> some_uses(Random& random, uint64_t keys) {
  std::vector<Use> uses;
  for (uint64_t key = 0; key < keys; ++key)
    if (below(random, 3) == 0) uses.push_back({key, static_cast<uint32_t>(below(random, 2) + 1)});
  return uses;
}

}  // namespace

TEST(captures_have_the_uses_of_trained_lookups_alone) {
  for (const auto kind : {Admission::Kind::always, Admission::Kind::min_count, Admission::Kind::probability,
                          Admission::Kind::probability_each}) {
    for (uint64_t seed = 0; seed < 30; ++seed) {
      Random random(seed);
      const uint64_t trainers = 1 + seed % 3, keys = 4 + below(random, 20);
      auto table = std::make_shared<Table>(config_of(kind));
      LookupLog log;
      Lookups lookups;
      std::vector<std::deque<Lookup*>> ahead(trainers);
      for (uint32_t round = 0; round < 120; ++round) {
        auto& mine = ahead[below(random, trainers)];
        switch (below(random, 8)) {
          case 0: {
            CHECK(captured(table, log) == model(*table, lookups, false));
            if (kind == Admission::Kind::min_count)
              CHECK(filter_of(table, log, keys) == filter_model(*table, lookups, keys));
            break;
          }
          case 1: {  // a trainer stops, and withdraws all that it has looked up ahead
            std::vector<const Plan*> plans;
            for (const Lookup* lookup : mine) plans.push_back(lookup->plan.get());
            {
              const Exclusive exclusive;
              log.withdraw(plans);
            }
            std::erase_if(lookups, [&](const auto& one) {
              return std::find(mine.begin(), mine.end(), one.get()) != mine.end();
            });
            mine.clear();
            const Exclusive exclusive;
            CHECK(known(contents(*table)) == model(*table, lookups, true));
            break;
          }
          case 2:
          case 3:
          case 4:
            if (!mine.empty()) {
              mine.front()->trained = true;
              log.trained(mine.front()->plan.get());
              mine.pop_front();
            }
            break;
          default:
            if (mine.size() < 4) {
              lookups.push_back(std::make_unique<Lookup>(table, log, some_uses(random, keys), round));
              mine.push_back(lookups.back().get());
            }
        }
      }
      for (auto& mine : ahead)
        for (Lookup* lookup : mine) {
          lookup->trained = true;
          log.trained(lookup->plan.get());
        }
      CHECK(log.size() == 0);  // nothing is held for nothing
      CHECK(captured(table, log) == model(*table, lookups, false));
      const Exclusive exclusive;
      CHECK(known(contents(*table)) == model(*table, lookups, true));
    }
  }
}

TEST(a_trainer_that_has_stopped_does_not_make_the_log_grow) {
  Random random(1);
  auto table = std::make_shared<Table>(config_of(Admission::Kind::always));
  LookupLog log;
  Lookups lookups;
  lookups.push_back(std::make_unique<Lookup>(table, log, some_uses(random, 50), 1));
  for (uint32_t step = 2; step < 500; ++step) {
    lookups.push_back(std::make_unique<Lookup>(table, log, some_uses(random, 50), step));
    lookups.back()->trained = true;
    log.trained(lookups.back()->plan.get());
    CHECK(log.size() < 100);
  }
  CHECK(log.in_flight() == 1);
  CHECK(captured(table, log) == model(*table, lookups, false));
  lookups.front()->trained = true;
  log.trained(lookups.front()->plan.get());
  CHECK(log.size() == 0);
}

TEST(lookups_before_a_table_was_emptied_are_forgotten) {
  Random random(2);
  auto table = std::make_shared<Table>(config_of(Admission::Kind::always));
  LookupLog log;
  Lookups lookups;
  lookups.push_back(std::make_unique<Lookup>(table, log, some_uses(random, 50), 1));
  {
    const Exclusive exclusive;
    table->clear();
  }
  lookups.pop_front();
  lookups.push_back(std::make_unique<Lookup>(table, log, some_uses(random, 50), 2));
  lookups.back()->trained = true;
  log.trained(lookups.back()->plan.get());
  CHECK(captured(table, log) == model(*table, lookups, false));
}

TEST(changes_since_a_capture_have_the_rows_that_it_corrected) {
  auto table = std::make_shared<Table>(config_of(Admission::Kind::always));
  LookupLog log;
  Lookup ahead(table, log, {{1, 1}, {2, 1}}, 1);
  uint64_t version = 0;
  {
    const auto first = [&] {
      const Exclusive exclusive;
      return Table::capture(table, 1, true, {}, log.corrections(*table));
    }();
    version = first->version();
    CHECK(first->part(0).rows == 0);
  }
  log.trained(ahead.plan.get());  // without a gradient
  const auto next = [&] {
    const Exclusive exclusive;
    return Table::capture(table, 1, true, version, log.corrections(*table));
  }();
  const RowSet set = next->part(0);
  CHECK(set.rows == 2);
  CHECK(set.counts[0] == 1);
}
