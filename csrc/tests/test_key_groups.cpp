#include "batch/key_groups.h"

#include <algorithm>
#include <map>

#include "hash/mix.h"
#include "tests/check.h"
#include "tests/tools.h"

using namespace karvan;
using namespace karvan::test;

namespace {

struct Keys {
  uint32_t slot;
  uint64_t base;
  std::vector<uint64_t> keys;
  bool hashed = false;
};

uint64_t hash_at(const Keys& source, size_t i) {
  return source.hashed ? source.keys[i] : mix(source.keys[i]);
}

// Sources one after the other, with gaps between their positions as plans leave them. `hot` in 100 keys are
// the same.
std::vector<Keys> make_sources(const std::vector<std::pair<uint32_t, size_t>>& sizes, uint64_t distinct,
                               uint64_t hot) {
  Random random(distinct);
  std::vector<Keys> all;
  uint64_t base = 0;
  for (const auto& [slot, size] : sizes) {
    Keys source{slot, base, {}, below(random, 4) == 0};
    for (size_t i = 0; i < size; ++i) {
      uint64_t key = below(random, distinct);
      if (below(random, 100) < hot) key = 7;
      else if (below(random, 50) == 0) key = ~below(random, 3);
      source.keys.push_back(source.hashed ? mix(key) : key);
    }
    base = (base + size + 255) / 256 * 256;
    all.push_back(std::move(source));
  }
  return all;
}

KeyGroups group(const std::vector<Keys>& all, uint32_t slots) {
  std::vector<KeySource> sources;
  uint64_t end = 0;
  for (const Keys& source : all) {
    sources.push_back({source.slot, source.keys.data(), source.keys.size(), source.base, source.hashed});
    end = source.base + source.keys.size();
  }
  KeyGroups groups(slots, std::move(sources), end);
  groups.group_all();
  return groups;
}

// What the groups of one slot must be: its keys by bucket and first position, each with its positions.
using Group = std::pair<uint64_t, std::vector<uint32_t>>;

std::vector<Group> slow_groups(const std::vector<Keys>& all, uint32_t slot, int bits) {
  std::map<uint64_t, std::vector<uint32_t>> positions;
  for (const Keys& source : all)
    if (source.slot == slot)
      for (size_t i = 0; i < source.keys.size(); ++i)
        positions[hash_at(source, i)].push_back(static_cast<uint32_t>(source.base + i));
  std::vector<Group> groups(positions.begin(), positions.end());
  const auto bucket = [&](const Group& g) { return bits ? g.first >> (64 - bits) : 0; };
  std::sort(groups.begin(), groups.end(), [&](const Group& a, const Group& b) {
    return std::pair(bucket(a), a.second[0]) < std::pair(bucket(b), b.second[0]);
  });
  return groups;
}

std::vector<Group> got_groups(const KeyGroups& g, uint32_t slot) {
  std::vector<Group> groups;
  const KeyGroups::Slot& s = g.slots[slot];
  for (uint32_t b = s.first_bucket; b < s.first_bucket + s.buckets; ++b) {
    CHECK_EQ(g.slot_of[b], slot);
    const size_t first = groups.size();
    for (uint32_t i = g.begin[b]; i < g.begin[b] + g.unique[b]; ++i) groups.push_back({g.hash[i], {}});
    const uint64_t before = g.begin[b] - g.first_index(slot);  // unique_at counts from the slot's start
    bool ascending = true;
    for (uint32_t i = g.begin[b]; i < g.begin[b + 1]; ++i) {
      ascending &= i == g.begin[b] || g.position[i] > g.position[i - 1];
      groups.at(first + g.unique_at[i] - before).second.push_back(g.position[i]);
    }
    CHECK(ascending);
    for (uint32_t i = 0; i < g.unique[b]; ++i)
      CHECK_EQ(g.count[g.begin[b] + i], groups[first + i].second.size());
  }
  return groups;
}

// unique_of leads from a position to its key.
bool positions_find_their_key(const KeyGroups& g, const std::vector<Keys>& all) {
  for (const Keys& source : all) {
    const uint64_t* const hashes = g.hash.data() + g.first_index(source.slot);
    for (size_t i = 0; i < source.keys.size(); ++i)
      if (hashes[g.unique_of[source.base + i]] != hash_at(source, i)) return false;
  }
  return true;
}

void check_groups(const std::vector<Keys>& all, uint32_t slots, bool expect_large) {
  bool large = false;
  for (const int threads : {1, 2, 4}) {
    const WithThreads with(threads);
    const KeyGroups g = group(all, slots);
    CHECK(positions_find_their_key(g, all));
    for (uint32_t s = 0; s < slots; ++s) {
      const auto expected = slow_groups(all, s, g.slots[s].bits);
      CHECK(got_groups(g, s) == expected);
      CHECK_EQ(g.unique_in(s), expected.size());
      large |= !g.slots[s].small;
    }
  }
  CHECK_EQ(large, expect_large);
}

}  // namespace

TEST(groups_of_small_slots_match_a_map) {
  check_groups(make_sources({{0, 1}}, 10, 0), 1, false);
  check_groups(make_sources({{0, 300}, {0, 0}, {0, 77}, {1, 500}, {3, 5}}, 100, 10), 5, false);
  check_groups(make_sources({{0, 8192}, {1, 8000}, {2, 192}}, 5000, 0), 3, false);
  check_groups(make_sources({{0, 4097}, {1, 4096}, {2, 4095}}, 1u << 30, 0), 3, false);
}

TEST(groups_of_large_slots_match_a_map) {
  check_groups(make_sources({{0, 8193}}, 100, 0), 1, true);
  check_groups(make_sources({{0, 20000}, {0, 9000}, {0, 3}, {1, 100}, {2, 30000}}, 20000, 0), 3, true);
  check_groups(make_sources({{0, 60000}}, 1u << 30, 0), 1, true);
}

TEST(groups_with_hot_keys_match_a_map) {
  check_groups(make_sources({{0, 30000}, {0, 500}, {1, 3000}}, 3000, 40), 2, true);
  check_groups(make_sources({{0, 20000}, {1, 900}}, 10, 100), 2, true);  // nearly all positions are one key
}

TEST(groups_without_any_position_are_empty) {
  const WithThreads with(2);
  for (const uint32_t slots : {0u, 1u, 3u}) {
    const KeyGroups g = group({}, slots);
    for (uint32_t s = 0; s < slots; ++s) CHECK_EQ(g.unique_in(s), 0u);
  }
}

TEST(groups_hold_labels_where_a_source_has_them) {
  const WithThreads with(2);
  for (const size_t size : {300u, 20000u}) {
    const std::vector<Keys> all = make_sources({{0, size}}, 1000, 5);
    std::vector<uint32_t> label(size);
    for (size_t i = 0; i < size; ++i) label[i] = static_cast<uint32_t>(i / 7);
    KeyGroups labelled(1, {{0, all[0].keys.data(), size, 0, all[0].hashed, label.data()}}, size);
    labelled.group_all();
    const KeyGroups plain = group(all, 1);
    CHECK(positions_find_their_key(labelled, all));
    for (size_t i = 0; i < size; ++i) {
      CHECK_EQ(labelled.position[i], label[plain.position[i]]);
      CHECK_EQ(labelled.unique_at[i], plain.unique_at[i]);
    }
  }
}

TEST(groups_can_be_moved) {
  const WithThreads with(2);
  const std::vector<Keys> all = make_sources({{0, 9000}, {1, 50}}, 300, 5);
  KeyGroups moved = group(all, 2);
  const KeyGroups g = std::move(moved);
  CHECK(positions_find_their_key(g, all));
  CHECK(got_groups(g, 0) == slow_groups(all, 0, g.slots[0].bits));
}
