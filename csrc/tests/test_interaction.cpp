#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "math/interaction.h"
#include "tests/check.h"
#include "threads/pool.h"

using namespace karvan;

namespace {

// Vectors side by side in rows that are wider than them, and a gradient of the products.
struct Problem {
  size_t samples, n, dim, width, pairs, stride;
  std::vector<float> x, gradient;

  Problem(size_t samples, size_t n, size_t dim)
      : samples(samples), n(n), dim(dim), width(n * dim + 3), pairs(n * (n - 1) / 2), stride(pairs + 2) {
    std::mt19937 random(static_cast<uint32_t>(samples + 31 * n + 1009 * dim));
    std::normal_distribution<float> normal;
    x.resize(samples * width);
    gradient.resize(samples * stride);
    for (float& value : x) value = normal(random);
    for (float& value : gradient) value = normal(random);
  }

  std::vector<Vectors> vectors() const {
    std::vector<Vectors> made;
    for (size_t i = 0; i < n; ++i) made.push_back({x.data() + i * dim, width});
    return made;
  }
  double at(size_t s, size_t i, size_t k) const { return x[s * width + i * dim + k]; }
};

bool near(double got, double expected, size_t terms) {
  return std::fabs(got - expected) <= 1e-5 * (1 + std::sqrt(static_cast<double>(terms)));
}

const float kUntouched = 77;

// What is left and right of the products belongs to others.
std::vector<float> products(const Problem& p) {
  std::vector<float> out(p.samples * p.stride, kUntouched);
  Exclusive exclusive;
  interact(p.vectors(), p.samples, p.dim, out.data() + 1, p.stride);
  return out;
}

std::vector<float> gradients(const Problem& p) {
  std::vector<float> made(p.samples * p.n * p.dim + 1, kUntouched);
  Exclusive exclusive;
  interact_backward(p.vectors(), p.samples, p.dim, p.gradient.data(), p.stride, made.data());
  return made;
}

void check(const Problem& p) {
  const std::vector<float> out = products(p), made = gradients(p);
  bool right = made.back() == kUntouched;
  std::vector<double> expected(p.n * p.dim);
  for (size_t s = 0; s < p.samples; ++s) {
    right &= out[s * p.stride] == kUntouched && out[s * p.stride + p.pairs + 1] == kUntouched;
    expected.assign(p.n * p.dim, 0);
    for (size_t i = 0, pair = 0; i < p.n; ++i) {
      for (size_t j = 0; j < i; ++j, ++pair) {
        double dot = 0;
        const double g = p.gradient[s * p.stride + pair];
        for (size_t k = 0; k < p.dim; ++k) {
          dot += p.at(s, i, k) * p.at(s, j, k);
          expected[i * p.dim + k] += g * p.at(s, j, k);
          expected[j * p.dim + k] += g * p.at(s, i, k);
        }
        right &= near(out[s * p.stride + 1 + pair], dot, p.dim);
      }
    }
    for (size_t e = 0; e < expected.size(); ++e) right &= near(made[s * p.n * p.dim + e], expected[e], p.n);
  }
  CHECK(right);
}

}  // namespace

TEST(interaction_and_its_gradients_are_those_of_the_definition_for_all_shapes) {
  for (size_t n : {1, 2, 3, 4, 5, 7, 8, 17, 27})
    for (size_t dim : {1, 3, 4, 6, 16, 33}) check(Problem(3, n, dim));
  check(Problem(0, 5, 8));
  check(Problem(130, 6, 8));
}

TEST(interaction_does_not_depend_on_the_number_of_threads) {
  const Problem p(500, 9, 10);
  const int before = thread_count();
  set_thread_count(1);
  const auto out = products(p), made = gradients(p);
  for (int threads : {2, 5}) {
    set_thread_count(threads);
    CHECK(products(p) == out);
    CHECK(gradients(p) == made);
  }
  set_thread_count(before);
}
