#include "math/finite.h"

#include <cmath>
#include <limits>
#include <vector>

#include "tests/check.h"
#include "threads/pool.h"

using namespace karvan;

TEST(any_infinity_or_nan_is_found_wherever_it_is) {
  const Exclusive exclusive;
  std::vector<float> first(200'001, std::numeric_limits<float>::max()), second(3, -1e-42f);
  const auto finite = [&] {
    return all_finite({{first.data(), first.size()}, {nullptr, 0}, {second.data(), second.size()}});
  };
  CHECK(finite());
  for (const float bad : {INFINITY, -INFINITY, std::numeric_limits<float>::quiet_NaN()}) {
    for (float* place : {&first[0], &first[65'536], &first[200'000], &second[2]}) {
      const float before = *place;
      *place = bad;
      CHECK(!finite());
      *place = before;
    }
  }
  CHECK(finite());
  CHECK(all_finite({}));
}
