#include "table/init.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <vector>

#include "hash/farm.h"
#include "hash/mix.h"
#include "tests/check.h"

using namespace karvan;

namespace {

constexpr uint64_t kSeed = 7;
const Initialiser kUniform = make_initialiser("uniform", 0.0f, 1.0f, 0, 0);
const Initialiser kNormal = make_initialiser("normal", 0.0f, 1.0f, 0, 0);

std::vector<float> row(const Initialiser& init, uint64_t stream, uint64_t key, int dim) {
  std::vector<float> out(static_cast<size_t>(dim));
  initialise(init, stream, mix(key), out.data(), dim);
  return out;
}

// Keys 0, 1, 2, ... are the hard case: their values must look independent all the same.
std::vector<float> sample(const Initialiser& init, int rows, int dim) {
  const uint64_t stream = table_stream(kSeed, "item");
  std::vector<float> all(static_cast<size_t>(rows) * dim);
  float* out = all.data();
  for (uint64_t key = 0; key < static_cast<uint64_t>(rows); ++key, out += dim) {
    initialise(init, stream, mix(key), out, dim);
  }
  return all;
}

struct Moments {
  double mean = 0, deviation = 0;
};

Moments moments(const std::vector<float>& values) {
  double sum = 0, squares = 0;
  for (float value : values) sum += value, squares += double{value} * value;
  const double count = static_cast<double>(values.size()), mean = sum / count;
  return {mean, std::sqrt(squares / count - mean * mean)};
}

// Kolmogorov-Smirnov: the largest distance of the sample's distribution from the given one, times sqrt(n).
// A right sample stays below 1.95 in 99.9 % of samples; ours are fixed, so a pass stays a pass.
template <class Distribution>
double distance(std::vector<float> values, Distribution distribution) {
  std::sort(values.begin(), values.end());
  const double count = static_cast<double>(values.size());
  double worst = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double expected = distribution(double{values[i]});
    worst = std::max({worst, expected - i / count, (i + 1) / count - expected});
  }
  return worst * std::sqrt(count);
}

double normal_distribution(double z) { return 0.5 * std::erfc(-z / std::sqrt(2.0)); }

double correlation(const std::vector<float>& values, size_t step) {
  const Moments m = moments(values);
  double sum = 0;
  for (size_t i = 0; i + step < values.size(); ++i) sum += (values[i] - m.mean) * (values[i + step] - m.mean);
  return sum / (m.deviation * m.deviation * static_cast<double>(values.size() - step));
}

uint32_t bits(float value) { return std::bit_cast<uint32_t>(value); }

}  // namespace

TEST(constant_fills_every_column) {
  const auto values = row(make_initialiser("constant", 0.25f, 0, 0, 0), 1, 2, 70);
  CHECK(std::all_of(values.begin(), values.end(), [](float value) { return value == 0.25f; }));
}

TEST(uniform_has_the_uniform_distribution) {
  const auto values = sample(kUniform, 20000, 16);
  const Moments m = moments(values);
  CHECK(std::abs(m.mean - 0.5) < 0.002);
  CHECK(std::abs(m.deviation - std::sqrt(1.0 / 12)) < 0.002);
  CHECK(distance(values, [](double u) { return u; }) < 1.95);
}

TEST(uniform_stays_in_its_half_open_range) {
  // Around 1 the floats are wider apart than the draws, so rounding would reach the upper bound.
  const float low = 1.0f, high = 1.0f + 4 * std::numeric_limits<float>::epsilon();
  const auto values = sample(make_initialiser("uniform", low, high, 0, 0), 2000, 16);
  CHECK(*std::min_element(values.begin(), values.end()) == low);
  CHECK(*std::max_element(values.begin(), values.end()) == std::nextafter(high, low));
  const auto empty = sample(make_initialiser("uniform", 0.5f, 0.5f, 0, 0), 10, 16);
  CHECK(std::all_of(empty.begin(), empty.end(), [](float value) { return value == 0.5f; }));
}

TEST(normal_has_the_normal_distribution) {
  const auto values = sample(kNormal, 20000, 16);
  const Moments m = moments(values);
  CHECK(std::abs(m.mean) < 0.006);
  CHECK(std::abs(m.deviation - 1) < 0.004);
  CHECK(distance(values, normal_distribution) < 1.95);
  // 320,000 draws: 0.3 % lie beyond 2.9677, and the farthest is expected near 4.5.
  const auto far = std::count_if(values.begin(), values.end(), [](float z) { return std::abs(z) > 2.9677f; });
  CHECK(std::abs(far - 960.0) < 4 * std::sqrt(960.0));
  CHECK(*std::max_element(values.begin(), values.end()) > 3.8f);
}

TEST(normal_scales_and_shifts) {
  const auto plain = sample(kNormal, 100, 8);
  const auto moved = sample(make_initialiser("normal", 3.0f, 0.5f, 0, 0), 100, 8);
  for (size_t i = 0; i < plain.size(); ++i) CHECK(std::abs(moved[i] - (3 + 0.5 * plain[i])) < 1e-6);
}

TEST(truncated_normal_stays_inside_and_keeps_its_shape) {
  const float low = -0.5f, high = 2.0f;
  const auto values = sample(make_initialiser("truncated_normal", 0.0f, 1.0f, low, high), 20000, 16);
  CHECK(*std::min_element(values.begin(), values.end()) >= low);
  CHECK(*std::max_element(values.begin(), values.end()) <= high);
  const double below = normal_distribution(low), inside = normal_distribution(high) - below;
  CHECK(distance(values, [=](double z) { return (normal_distribution(z) - below) / inside; }) < 1.95);
}

TEST(truncated_normal_reaches_into_a_far_tail) {
  const auto values = sample(make_initialiser("truncated_normal", 0.0f, 1.0f, 4.0f, 4.5f), 1000, 16);
  const double below = normal_distribution(4.0), inside = normal_distribution(4.5) - below;
  CHECK(distance(values, [=](double z) { return (normal_distribution(z) - below) / inside; }) < 1.95);
}

TEST(truncated_normal_without_a_reachable_value_gives_the_nearest_bound) {
  const Initialiser above = make_initialiser("truncated_normal", 0.0f, 1.0f, 8.0f, 9.0f);
  const Initialiser below = make_initialiser("truncated_normal", 0.0f, 1.0f, -9.0f, -8.0f);
  for (float value : row(above, 1, 2, 8)) CHECK_EQ(value, 8.0f);
  for (float value : row(below, 1, 2, 8)) CHECK_EQ(value, -8.0f);
}

TEST(truncated_normal_does_not_need_to_be_prepared) {
  const Initialiser prepared = make_initialiser("truncated_normal", 0.1f, 0.3f, 0.0f, 0.2f);
  const Initialiser plain{Initialiser::Kind::truncated_normal, 0.1f, 0.3f, 0.0f, 0.2f};
  CHECK(row(prepared, 1, 2, 33) == row(plain, 1, 2, 33));
}

TEST(a_column_does_not_depend_on_the_dimension) {
  for (const char* kind : {"uniform", "normal", "truncated_normal"}) {
    const Initialiser init = make_initialiser(kind, 0.0f, 1.0f, -1.0f, 1.0f);
    const auto longest = row(init, 5, 42, 200);
    for (int dim : {0, 1, 2, 3, 63, 64, 65, 127, 128, 129}) {
      const auto values = row(init, 5, 42, dim);
      CHECK(std::equal(values.begin(), values.end(), longest.begin()));
    }
  }
}

TEST(keys_columns_tables_and_seeds_give_different_values) {
  const uint64_t item = table_stream(kSeed, "item");
  const auto base = row(kUniform, item, 1, 64);
  const auto same = [&](const std::vector<float>& other) {
    int equal = 0;
    for (size_t i = 0; i < base.size(); ++i) equal += base[i] == other[i];
    return equal;
  };
  CHECK(same(row(kUniform, item, 1, 64)) == 64);
  CHECK(same(row(kUniform, item, 2, 64)) == 0);
  CHECK(same(row(kUniform, table_stream(kSeed, "user"), 1, 64)) == 0);
  CHECK(same(row(kUniform, table_stream(kSeed, ""), 1, 64)) == 0);
  CHECK(same(row(kUniform, table_stream(kSeed + 1, "item"), 1, 64)) == 0);
  auto sorted = base;
  std::sort(sorted.begin(), sorted.end());
  CHECK(std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end());
}

TEST(neighbouring_columns_and_keys_are_uncorrelated) {
  const int dim = 16;
  const auto values = sample(kUniform, 20000, dim);
  for (size_t step : {1, 2, 3, dim, dim + 1, 2 * dim}) {
    CHECK(std::abs(correlation(values, step)) < 4 / std::sqrt(static_cast<double>(values.size())));
  }
}

TEST(gamma_and_poisson_have_their_moments) {
  for (const float shape : {0.3f, 1.0f, 7.5f}) {
    const Moments m = moments(sample(make_initialiser("gamma", shape, 2.0f, 0, 1e30f), 20000, 16));
    CHECK(std::abs(m.mean / (2 * shape) - 1) < 0.015);
    CHECK(std::abs(m.deviation / (2 * std::sqrt(shape)) - 1) < 0.015);
  }
  // A shape of 1 is the exponential distribution.
  const auto exponential = sample(make_initialiser("gamma", 1.0f, 1.0f, 0, 1e30f), 20000, 16);
  CHECK(distance(exponential, [](double x) { return 1 - std::exp(-x); }) < 1.95);
  for (const float rate : {0.01f, 3.5f, 40.0f}) {
    const auto values = sample(make_initialiser("poisson", rate, 0, 0, 1e30f), 20000, 16);
    const Moments m = moments(values);
    CHECK(std::abs(m.mean - rate) < 5 * std::sqrt(rate / 320000));
    CHECK(std::abs(m.deviation / std::sqrt(rate) - 1) < 0.02);
    CHECK(std::all_of(values.begin(), values.end(), [](float value) { return value == std::floor(value); }));
  }
}

TEST(an_unknown_kind_is_an_error) {
  bool thrown = false;
  try {
    make_initialiser("gaussian", 0, 1, 0, 0);
  } catch (const std::invalid_argument&) {
    thrown = true;
  }
  CHECK(thrown);
}

TEST(pinned_values_of_version_1) {
  CHECK_EQ(kInitVersion, 1);
  const uint64_t stream = table_stream(kSeed, "item");
  CHECK_EQ(stream, 0xe3fe6d5eed02eafeULL);
  struct Golden {
    const char* kind;
    uint32_t columns[4];  // the bits of columns 0, 1, 17 and 99
  };
  const Golden goldens[] = {
      {"uniform", {0x3e91f16a, 0xbe024024, 0xbd514fe0, 0xbef00b4a}},
      {"normal", {0xbdd7b5c3, 0xbf298745, 0xbf1070e2, 0xbfb74b12}},
      {"truncated_normal", {0xbe0b3fc8, 0xbf10eca2, 0xbefbedcf, 0xbf73cf9a}},
  };
  for (const Golden& golden : goldens) {
    const Initialiser init = make_initialiser(golden.kind, -0.5f, 0.5f, -1.0f, 0.25f);
    const auto values = row(init, stream, 12345678901234567ULL, 100);
    CHECK_EQ(bits(values[0]), golden.columns[0]);
    CHECK_EQ(bits(values[1]), golden.columns[1]);
    CHECK_EQ(bits(values[17]), golden.columns[2]);
    CHECK_EQ(bits(values[99]), golden.columns[3]);
  }
}

// Fused multiply-adds, if the build let them in, change the uniform digest. They seldom change a normal
// value, which is rounded from double to float.
TEST(pinned_digests_of_version_1) {
  const struct {
    const char* kind;
    uint64_t digest;
  } goldens[] = {
      {"uniform", 0xb260e99c70789a91ULL},
      {"normal", 0xe17e07b64277252cULL},
      {"truncated_normal", 0x3ad4e83903d05d5eULL},
  };
  const auto digest = [](const Initialiser& init) {
    const auto values = sample(init, 20000, 16);
    return farm_fingerprint64(values.data(), values.size() * sizeof(float));
  };
  for (const auto& golden : goldens)
    CHECK_EQ(digest(make_initialiser(golden.kind, -0.3f, 0.55f, -1.0f, 0.3f)), golden.digest);
  CHECK_EQ(digest(make_initialiser("gamma", 0.4f, 1.5f, 0.01f, 3.0f)), 0xb9d89bdc92e8047eULL);
  CHECK_EQ(digest(make_initialiser("gamma", 3.5f, 0.2f, -1.0f, 100.0f)), 0xaf5ba02de41d75f3ULL);
  CHECK_EQ(digest(make_initialiser("poisson", 3.5f, 0, 1.0f, 9.0f)), 0xc3c5fa1bfcf0f7f6ULL);
}
