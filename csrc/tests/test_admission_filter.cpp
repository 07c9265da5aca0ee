#include "table/admission_filter.h"

#include <algorithm>
#include <map>
#include <vector>

#include "hash/mix.h"
#include "tests/check.h"
#include "tests/tools.h"

using namespace karvan;
using namespace karvan::test;

namespace {

struct Occurrence {
  uint64_t hash;
  uint32_t times;
};

std::vector<Occurrence> occurrences(uint64_t keys, int count) {
  Random random(keys);
  std::vector<Occurrence> all;
  for (int i = 0; i < count; ++i)
    all.push_back({mix(below(random, keys)), static_cast<uint32_t>(1 + below(random, 3))});
  return all;
}

}  // namespace

TEST(filter_never_counts_less_than_the_truth) {
  for (uint64_t slots : {1ull, 1000ull, 100000ull}) {
    CountingFilter filter(slots);
    std::map<uint64_t, uint32_t> truth;
    bool less = false;
    for (const Occurrence& o : occurrences(3000, 20000)) {
      truth[o.hash] += o.times;
      less |= filter.add(o.hash, o.times) < std::min(255u, truth[o.hash]);
    }
    CHECK(!less);
  }
}

TEST(filter_with_room_counts_nearly_right) {
  CountingFilter filter(1 << 18);
  std::map<uint64_t, uint32_t> truth;
  for (const Occurrence& o : occurrences(3000, 20000)) {
    truth[o.hash] += o.times;
    filter.add(o.hash, o.times);
  }
  int wrong = 0;
  for (const auto& [hash, count] : truth) wrong += filter.add(hash, 0) != std::min(255u, count);
  CHECK(wrong < 30);
}

TEST(filter_counts_do_not_depend_on_the_order_of_keys) {
  std::vector<Occurrence> all = occurrences(2000, 10000);
  CountingFilter forward(5000), backward(5000);
  for (const Occurrence& o : all) forward.add(o.hash, o.times);
  std::reverse(all.begin(), all.end());
  for (const Occurrence& o : all) backward.add(o.hash, o.times);
  CHECK_EQ(forward.bytes(), backward.bytes());
  CHECK(std::memcmp(forward.data(), backward.data(), forward.bytes()) == 0);
}

// Shards are at most 256 equal ranges of hashes, and each counts on a thread of its own.
TEST(filter_blocks_belong_to_one_of_256_ranges) {
  CountingFilter filter(100000);
  const size_t range = filter.bytes() / 256;
  CHECK_EQ(range % 64, 0u);
  bool outside = false;
  Random random(3);
  for (uint64_t shard = 0; shard < 256; ++shard) {
    for (uint64_t low : {uint64_t{0}, ~uint64_t{0} >> 8, random() >> 8}) filter.add(shard << 56 | low, 1);
    for (size_t i = 0; i < filter.bytes(); ++i) {
      if (filter.data()[i] == 0) continue;
      outside |= i / range != shard;
      filter.data()[i] = 0;
    }
  }
  CHECK(!outside);
}

TEST(filter_saturates_at_255) {
  CountingFilter filter(100);
  const uint64_t hash = mix(9);
  CHECK_EQ(filter.add(hash, 254), 254u);
  CHECK_EQ(filter.add(hash, 1), 255u);
  CHECK_EQ(filter.add(hash, 1), 255u);
  CHECK_EQ(filter.add(hash, 1000000), 255u);
  CHECK_EQ(filter.add(mix(10), 300), 255u);
  CHECK_EQ(filter.add(mix(10), UINT32_MAX), 255u);  // must not wrap around
}

// All four places of this hash are one counter; of ~0 as well.
TEST(filter_counts_once_where_places_coincide) {
  CountingFilter filter(100);
  CHECK_EQ(filter.add(0, 1), 1u);
  CHECK_EQ(filter.add(0, 2), 3u);
  CHECK_EQ(filter.add(~uint64_t{0}, 5), 5u);
}
