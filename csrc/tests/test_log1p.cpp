#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "math/log1p.h"
#include "tests/check.h"

using namespace karvan;

namespace {

float one(float x) {
  float made = 0;
  log1p(&x, 1, &made);
  return made;
}

}  // namespace

TEST(log1p_is_within_two_units_in_the_last_place_of_the_double_result) {
  std::vector<float> values;
  for (uint64_t bits = 0; bits <= 0xffffffffu; bits += 40009) {
    const float x = std::bit_cast<float>(static_cast<uint32_t>(bits));
    if (x > -1 && std::isfinite(x)) values.push_back(x);
  }
  std::vector<float> made(values.size());
  log1p(values.data(), values.size(), made.data());
  int wrong = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double expected = std::log1p(static_cast<double>(values[i]));
    const float near = std::fabs(static_cast<float>(expected));
    const double unit = std::nextafter(near, std::numeric_limits<float>::infinity()) - static_cast<double>(near);
    wrong += !(std::fabs(made[i] - expected) <= 2 * unit);
  }
  CHECK_EQ(wrong, 0);
}

TEST(log1p_is_exact_in_its_limits) {
  const float infinity = std::numeric_limits<float>::infinity();
  CHECK_EQ(one(0.0f), 0.0f);
  CHECK(!std::signbit(one(0.0f)));
  CHECK(std::signbit(one(-0.0f)));
  CHECK_EQ(one(-1.0f), -infinity);
  CHECK_EQ(one(infinity), infinity);
  CHECK(std::isnan(one(-1.5f)));
  CHECK(std::isnan(one(-infinity)));
  CHECK(std::isnan(one(std::numeric_limits<float>::quiet_NaN())));
  CHECK_EQ(one(std::numeric_limits<float>::denorm_min()), std::numeric_limits<float>::denorm_min());
}

TEST(log1p_of_a_value_does_not_depend_on_its_neighbours) {
  std::vector<float> values, made(37);
  for (int i = 0; i < 37; ++i) values.push_back(static_cast<float>(i * i) * 0.37f - 0.9f);
  log1p(values.data(), values.size(), made.data());
  for (int i = 0; i < 37; ++i) CHECK_EQ(std::bit_cast<uint32_t>(made[i]), std::bit_cast<uint32_t>(one(values[i])));
}

TEST(log1p_within_limits_is_that_of_the_clipped_value) {
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> values{-infinity, -3, -1, -0.5f, 0, 1e-6f, 0.25f, 1, 2, 7.5f, 1e30f, infinity};
  while (values.size() < 1100) values.push_back(static_cast<float>(values.size()) * 0.01f - 4);
  std::vector<float> made(values.size());
  for (const Limits limits : {Limits{}, Limits{.low = 0}, Limits{.high = 2}, Limits{-0.5f, 5}}) {
    log1p(values.data(), values.size(), made.data(), limits);
    bool same = true;
    for (size_t i = 0; i < values.size(); ++i) {
      const float expected = one(std::min(std::max(values[i], limits.low), limits.high));
      same &= std::isnan(expected) ? std::isnan(made[i]) : made[i] == expected;
    }
    CHECK(same);
  }
  const float none = std::numeric_limits<float>::quiet_NaN();
  log1p(&none, 1, made.data(), {0, 1});
  CHECK(std::isnan(made[0]));
}
