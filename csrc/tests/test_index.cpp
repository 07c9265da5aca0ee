#include "table/index.h"

#include <algorithm>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include "memory/pages.h"
#include "tests/check.h"
#include "tests/tools.h"

using namespace karvan;
using namespace karvan::test;

namespace {

struct Value {
  uint32_t row, count, last;
  bool operator==(const Value&) const = default;
};

// A shard's index beside a map that holds the same; every change goes to both.
class Twins {
 public:
  Twins(int shard_bits, uint32_t homes, uint64_t seed)
      : shard_bits_(shard_bits), homes_(homes), random_(seed) {
    index.set_shift(shard_bits);
    memory_ = Pages((shard() + 1) * size(homes) * sizeof(Bucket));
    index.attach(buckets(homes), homes);
  }

  // All keys of a shard share the top bits of their hash.
  uint64_t hash() {
    const uint64_t kind = below(random_, 20);
    uint64_t h = random_();
    if (kind == 0) h = 0;
    else if (kind == 1) h = ~uint64_t{0};
    else if (kind == 2) h = below(random_, 4);
    else if (kind == 3) h = ~below(random_, 4);
    else if (kind == 4 && !map.empty()) h = map.begin()->first + below(random_, 3);
    return shard_bits_ ? h >> shard_bits_ | uint64_t{1} << (64 - shard_bits_) : h;
  }

  bool full() const { return static_cast<double>(map.size()) > 0.8 * 3 * homes_; }

  void insert(uint64_t h) {
    if (map.contains(h)) return;
    const auto any = [&] { return static_cast<uint32_t>(random_()); };
    const Value value{any(), any(), any()};
    const Entry entry = index.insert(h, value.row, value.count, value.last);
    CHECK_EQ(entry.hash(), h);
    map.emplace(h, value);
  }

  void erase(uint64_t h) {
    settle();
    const Entry entry = index.find(h);
    CHECK_EQ(static_cast<bool>(entry), map.contains(h));
    if (entry) index.erase(entry);
    map.erase(h);
  }

  void erase_if(uint32_t modulo, uint32_t rest) {
    settle();
    uint64_t asked = 0;
    index.erase_if([&](Entry e) {
      ++asked;
      return e.row() % modulo == rest;
    });
    CHECK_EQ(asked, map.size());
    std::erase_if(map, [&](const auto& pair) { return pair.second.row % modulo == rest; });
  }

  void grow() {
    settle();
    const uint32_t before = homes_;
    homes_ += homes_ / 5 + 1 + (below(random_, 8) == 0 ? homes_ : 0);
    memory_.grow(((shard() + 1) * size(homes_)) * sizeof(Bucket));
    index.rebase(buckets(before));
    index.start_growth(buckets(homes_), homes_);
  }

  void settle() {
    index.finish_growth();
    CHECK(!index.growing());
  }

  bool finds(uint64_t h) const {
    const Entry entry = index.find(h);
    const auto found = map.find(h);
    if (found == map.end()) return !entry;
    return entry && entry.hash() == h && Value{entry.row(), entry.count(), entry.last()} == found->second;
  }

  // Every key of the map is found with its value, each() shows exactly these, and near misses are not found.
  bool same() {
    for (const auto& [h, value] : map)
      if (!finds(h) || !finds(h + 1) || !finds(h ^ 1ull << 40)) return false;
    size_t seen = 0;
    bool right = true;
    index.each([&](Entry e) {
      ++seen;
      const auto found = map.find(e.hash());
      right &= found != map.end() && Value{e.row(), e.count(), e.last()} == found->second;
    });
    return right && seen == map.size();
  }

  uint64_t any_key() {
    if (map.empty()) return hash();
    auto it = map.begin();
    std::advance(it, below(random_, std::min<size_t>(map.size(), 20)));
    return it->first;
  }

  ShardIndex index;
  std::unordered_map<uint64_t, Value> map;

 private:
  // Its array lies where that of shard 0 or of the third one of a table would.
  size_t shard() const { return shard_bits_ ? 2 : 0; }
  static size_t size(uint32_t homes) { return homes + ShardIndex::tail(homes); }
  Bucket* buckets(uint32_t homes) const { return reinterpret_cast<Bucket*>(memory_.data()) + shard() * size(homes); }

  int shard_bits_;
  uint32_t homes_;
  Random random_;
  Pages memory_;
};

}  // namespace

TEST(index_holds_what_a_map_holds_over_random_operations) {
  for (const int shard_bits : {0, 1, 4, 8}) {
    for (const uint32_t homes : {2u, 7u, 100u}) {
      Twins twins(shard_bits, homes, homes * 10 + static_cast<uint64_t>(shard_bits));
      Random random(homes);
      for (int i = 0; i < 4000; ++i) {
        const uint64_t what = below(random, 100);
        if (twins.full() && !twins.index.growing()) twins.grow();
        if (twins.full()) twins.settle();
        if (twins.full()) twins.grow();
        if (what < 60) twins.insert(twins.hash());
        else if (what < 75) CHECK(twins.finds(twins.hash()));
        else if (what < 88) twins.index.advance(static_cast<uint32_t>(below(random, 8)));
        else if (what < 96) twins.erase(below(random, 2) ? twins.any_key() : twins.hash());
        else if (what < 97 && twins.map.size() > 50)
          twins.erase_if(5, static_cast<uint32_t>(below(random, 5)));
        else if (what < 98 && below(random, 4) == 0) twins.grow();
        if (i % 50 == 0) CHECK(twins.same());
      }
      CHECK(twins.same());
      twins.settle();
      CHECK(twins.same());
    }
  }
}

TEST(index_is_whole_at_every_moment_of_growth) {
  for (const int shard_bits : {0, 3}) {
    Twins twins(shard_bits, 150, 7);
    while (!twins.full()) twins.insert(twins.hash());
    twins.grow();
    CHECK(twins.index.growing());
    int steps = 0;
    for (; twins.index.growing(); ++steps) {
      CHECK(twins.same());
      if (steps % 3 == 0) twins.insert(twins.hash());
      twins.index.advance(1);
    }
    CHECK(steps > 20);  // a little at a time
    CHECK(twins.same());
  }
}

TEST(advance_moves_at_least_as_many_entries_as_asked) {
  Twins twins(0, 200, 11);
  while (!twins.full()) twins.insert(twins.hash());
  twins.grow();
  uint64_t calls = 0;
  while (twins.index.growing()) twins.index.advance(16), ++calls;
  CHECK(calls <= twins.map.size() / 16 + 1);
  CHECK(calls > twins.map.size() / 64);
  twins.index.advance(16);  // nothing left to do
  CHECK(twins.same());
}

TEST(index_stays_right_while_it_is_emptied) {
  Twins twins(2, 40, 13);
  while (!twins.full()) twins.insert(twins.hash());
  while (!twins.map.empty()) {
    twins.erase(twins.any_key());
    CHECK(twins.same());
  }
  for (int i = 0; i < 50; ++i) twins.insert(twins.hash());
  twins.erase_if(1, 0);  // all
  CHECK(twins.map.empty());
  CHECK(twins.same());
}

TEST(entries_can_be_changed_through_find) {
  Twins twins(0, 10, 17);
  const uint64_t h = twins.hash();
  twins.insert(h);
  twins.index.find(h).count() = 77;
  twins.index.find(h).last() = 78;
  CHECK_EQ(twins.index.find(h).count(), 77u);
  CHECK_EQ(twins.index.find(h).last(), 78u);
}

// Keys whose home is the last one run over into the tail; past the tail it is an error, not a wild write.
TEST(index_tail_takes_keys_pushed_over_the_end) {
  const uint32_t homes = 50;
  const Pages memory((homes + ShardIndex::tail(homes)) * sizeof(Bucket));
  ShardIndex index;
  index.attach(reinterpret_cast<Bucket*>(memory.data()), homes);
  uint32_t held = 0;
  bool refused = false;
  while (!refused && held < 1000) {
    try {
      index.insert(~uint64_t{held}, held, 1, 1);
      ++held;
    } catch (const std::runtime_error&) {
      refused = true;
    }
  }
  CHECK(refused);
  CHECK_EQ(held, 3 * ShardIndex::tail(homes));
  bool found = true;
  for (uint32_t i = 0; i < held; ++i) {
    const Entry entry = index.find(~uint64_t{i});
    found &= entry && entry.row() == i;
  }
  CHECK(found);
  CHECK(!index.find(~uint64_t{held}));
}
