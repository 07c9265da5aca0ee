#include "kernels/kernels.h"

#include <cmath>
#include <string>
#include <utility>

#include "memory/arena.h"
#include "table/row_io.h"
#include "tests/check.h"
#include "tests/tools.h"

using namespace karvan;
using namespace karvan::test;

namespace {

using Kind = Rule::Kind;
constexpr uint32_t kDims[] = {1, 3, 4, 8, 15, 16, 17, 32, 33, 64, 100};
constexpr VectorType kTypes[] = {VectorType::f32, VectorType::bf16, VectorType::f16};

Rule make_rule(Kind kind, int variant) {
  Rule rule{.kind = kind, .lr = 0.05f, .eps = 1e-3f};
  switch (kind) {
    case Kind::sgd: break;
    case Kind::momentum:
    case Kind::nesterov: rule.beta1 = 0.9f; break;
    case Kind::adagrad:
    case Kind::adagrad_row: rule.beta1 = variant % 2 ? 0.95f : 1.0f; break;
    case Kind::adam: rule.beta1 = 0.9f, rule.beta2 = 0.99f, rule.alpha = 0.03f; break;
    case Kind::amsgrad:
    case Kind::adamw: rule.beta1 = 0.9f, rule.beta2 = 0.99f, rule.alpha = 0.03f, rule.shrink = 0.97f; break;
    case Kind::ftrl: rule.beta1 = 1.0f, rule.l1 = 0.3f, rule.l2 = 0.1f; break;
  }
  rule.accumulate_last = variant / 2 % 2;
  if (variant & 4) rule.clip_value = 0.4f;
  if (variant & 8) rule.clip_norm = 0.7f;
  if (variant & 16) rule.weight_decay = 0.1f;
  if (variant & 32) rule.bound = 0.5f;
  return rule;
}

using Vector = std::vector<double>;

// The published rules, column by column in double. `vector` and `state` become the new ones.
void slow_update(const Rule& r, Vector& vector, Vector& state, Vector g) {
  const size_t dim = vector.size();
  if (r.clip_value > 0)
    for (double& x : g) x = std::clamp<double>(x, -r.clip_value, r.clip_value);
  double squares = 0;
  for (double x : g) squares += x * x;
  if (r.clip_norm > 0 && std::sqrt(squares) > r.clip_norm)
    for (double& x : g) x *= r.clip_norm / std::sqrt(squares);
  squares = 0;
  for (size_t c = 0; c < dim; ++c) g[c] += r.weight_decay * vector[c], squares += g[c] * g[c];
  double row = 0;
  if (r.kind == Kind::adagrad_row) {
    const double before = state[0];
    state[0] = before * r.beta1 + squares / static_cast<double>(dim);
    row = r.accumulate_last ? before : state[0];
  }
  for (size_t c = 0; c < dim; ++c) {
    double& w = vector[c];
    switch (r.kind) {
      case Kind::sgd: w -= r.lr * g[c]; break;
      case Kind::momentum:
        state[c] = r.beta1 * state[c] + g[c];
        w -= r.lr * state[c];
        break;
      case Kind::nesterov:
        state[c] = r.beta1 * state[c] + g[c];
        w -= r.lr * (g[c] + r.beta1 * state[c]);
        break;
      case Kind::adagrad: {
        const double before = state[c];
        state[c] = before * r.beta1 + g[c] * g[c];
        w -= r.lr * g[c] / (std::sqrt(r.accumulate_last ? before : state[c]) + r.eps);
        break;
      }
      case Kind::adagrad_row: w -= r.lr * g[c] / (std::sqrt(row) + r.eps); break;
      case Kind::adam:
      case Kind::adamw: {
        double &m = state[c], &v = state[dim + c];
        m = r.beta1 * m + (1 - r.beta1) * g[c];
        v = r.beta2 * v + (1 - r.beta2) * g[c] * g[c];
        if (r.kind == Kind::adamw) w *= r.shrink;
        w -= r.alpha * m / (std::sqrt(v) + r.eps);
        break;
      }
      case Kind::amsgrad: {
        double &m = state[c], &v = state[dim + c], &most = state[2 * dim + c];
        m = r.beta1 * m + (1 - r.beta1) * g[c];
        v = r.beta2 * v + (1 - r.beta2) * g[c] * g[c];
        most = std::max(most, v);
        w = r.shrink * w - r.alpha * m / (std::sqrt(most) + r.eps);
        break;
      }
      case Kind::ftrl: {
        double &z = state[c], &n = state[dim + c];
        const double after = n + g[c] * g[c];
        z += g[c] - (std::sqrt(after) - std::sqrt(n)) / r.lr * w;
        n = after;
        const double kept = std::fabs(z) > r.l1 ? z - std::copysign(r.l1, z) : 0.0;
        w = -kept / ((std::sqrt(n) + r.beta1) / r.lr + r.l2);
        break;
      }
    }
    if (r.bound > 0) w = std::clamp<double>(w, -r.bound, r.bound);
  }
}

// Rows in an arena as a table has them, with random contents.
struct Bench {
  static constexpr uint32_t kRows = 20;
  RowLayout layout;
  RowArena arena;
  std::vector<uint32_t> row;
  std::vector<uint64_t> hash;
  std::vector<float> gradient;

  Bench(VectorType type, uint32_t dim, uint32_t state, uint64_t seed)
      : layout{type, dim, state}, arena(layout.stride()) {
    Random random(seed);
    arena.take(kRows);
    for (uint32_t i = 0; i < kRows; ++i) {
      row.push_back(i % 7 == 3 ? 0 : kRows - i);  // 0: the row has gone
      hash.push_back(random());
      for (uint32_t c = 0; c < dim; ++c) gradient.push_back(uniform(random, -1, 1));
      std::vector<float> vector(dim);
      for (float& x : vector) x = uniform(random, -0.6f, 0.6f);
      if (row[i] == 0) continue;
      write_vector(arena.view().at(row[i]), layout, vector.data());
      for (uint32_t s = 0; s < state; ++s) state_of(i)[s] = uniform(random, 0.1f, 1.0f);
    }
  }
  float* state_of(uint32_t i) const {
    return reinterpret_cast<float*>(arena.view().at(row[i]) + layout.vector_bytes());
  }
  std::vector<float> vector_of(uint32_t i) const {
    std::vector<float> vector(layout.dim);
    read_vector(arena.view().at(row[i]), layout, vector.data());
    return vector;
  }
  void apply(const Rule& rule, uint64_t step) const {
    kernels().apply({arena.view(), layout, &rule, row.data(), hash.data(), gradient.data(), kRows, step});
  }
  std::string bytes() const { return {arena.view().at(0), size_t{layout.stride()} * arena.taken()}; }
};

// One rounding of a half: its distance to the neighbours at this magnitude.
double half_ulp(VectorType type, double x) {
  if (type == VectorType::f32) return 0;
  int exponent = 0;
  std::frexp(x, &exponent);
  if (type == VectorType::bf16) return std::ldexp(1.0, exponent - 8);
  return std::ldexp(1.0, std::max(exponent - 11, -24));
}

bool near(double got, double expected, double slack) {
  return std::fabs(got - expected) <= slack + 4e-6 * (1 + std::fabs(expected));
}

// Runs `f` with every kernel set of this machine and checks that its result has the bits of the plain one.
template <class F>
void same_for_all_kernels(const F& f) {
  const std::string chosen = kernels().name;
  CHECK(choose_kernels("plain"));
  const auto expected = f();
  for (const char* const* name = kernel_names(); *name; ++name) {
    CHECK(choose_kernels(*name));
    CHECK_EQ(std::string(kernels().name), std::string(*name));
    if (!(f() == expected)) fail(__FILE__, __LINE__, (std::string(*name) + " differs from plain").c_str());
  }
  CHECK(choose_kernels(chosen.c_str()));
}

std::string as_bytes(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

}  // namespace

TEST(kernels_are_chosen_by_name) {
  CHECK(!choose_kernels("none such"));
  bool plain = false;
  for (const char* const* name = kernel_names(); *name; ++name) plain |= std::string(*name) == "plain";
  CHECK(plain);
}

TEST(updates_follow_the_published_rules) {
  if (KARVAN_TSAN) return;  // one thread
  for (const auto& [name, kind, column_floats, row_floats] : kRuleTable) {
    for (const uint32_t dim : kDims) {
      for (const VectorType type : kTypes) {
        for (int variant = 0; variant < 64; variant += type == VectorType::f32 ? 3 : 7) {
          const Rule rule = make_rule(kind, variant);
          Bench bench(type, dim, state_floats(kind, dim), dim);
          int wrong = 0;
          for (uint64_t step = 1; step <= 2; ++step) {
            std::vector<Vector> vectors, states;
            for (uint32_t i = 0; i < Bench::kRows; ++i) {
              const std::vector<float> now = bench.vector_of(i);
              vectors.emplace_back(now.begin(), now.end());
              states.emplace_back(bench.state_of(i), bench.state_of(i) + bench.layout.state);
              if (bench.row[i] == 0) continue;
              const float* g = bench.gradient.data() + i * dim;
              slow_update(rule, vectors[i], states[i], Vector(g, g + dim));
            }
            bench.apply(rule, step);
            for (uint32_t i = 0; i < Bench::kRows; ++i) {
              const std::vector<float> now = bench.vector_of(i);
              for (uint32_t c = 0; c < dim; ++c)
                wrong += !near(now[c], vectors[i][c], half_ulp(type, vectors[i][c]));
              for (uint32_t s = 0; s < bench.layout.state; ++s)
                wrong += !near(bench.state_of(i)[s], states[i][s], 0);
            }
          }
          if (wrong) {
            std::ostringstream text;
            text << "rule " << static_cast<int>(kind) << " dim " << dim << " type " << static_cast<int>(type)
                 << " variant " << variant << ": " << wrong << " wrong values";
            fail(__FILE__, __LINE__, text.str().c_str());
          }
        }
      }
    }
  }
}

TEST(updates_are_the_same_on_every_instruction_set) {
  if (KARVAN_TSAN) return;  // one thread
  for (const auto& [name, kind, column_floats, row_floats] : kRuleTable)
    for (const uint32_t dim : kDims)
      for (const VectorType type : kTypes)
        for (const int variant : {0, 3, 60, 63})
          same_for_all_kernels([&] {
            const Bench bench(type, dim, state_floats(kind, dim), 1);
            for (uint64_t step = 1; step <= 3; ++step) bench.apply(make_rule(kind, variant), step);
            return bench.bytes();
          });
}

TEST(rounding_of_halves_depends_on_the_step_and_is_unbiased) {
  for (const VectorType type : {VectorType::bf16, VectorType::f16}) {
    const Rule rule{.kind = Kind::sgd, .lr = 1.0f};
    double sum = 0, expected = 0, ulps = 0;
    uint64_t count = 0;
    std::set<std::string> different;
    for (uint64_t step = 0; step < 200; ++step) {
      const Bench bench(type, 16, 0, 3);
      std::vector<float> before;
      for (uint32_t i = 0; i < Bench::kRows; ++i)
        for (const float x : bench.vector_of(i)) before.push_back(x);
      bench.apply(rule, step);
      different.insert(bench.bytes());
      for (uint32_t i = 0; i < Bench::kRows; ++i) {
        const std::vector<float> after = bench.vector_of(i);
        for (uint32_t c = 0; c < 16 && bench.row[i]; ++c, ++count) {
          const double exact = double{before[i * 16 + c]} - bench.gradient[i * 16 + c];
          sum += after[c];
          expected += exact;
          ulps += half_ulp(type, exact);
        }
      }
    }
    CHECK(different.size() > 190);
    const double n = static_cast<double>(count);
    CHECK(std::fabs(sum - expected) / n < 5 * (ulps / n) / std::sqrt(n));
  }
}

TEST(gather_lays_vectors_side_by_side) {
  for (const VectorType type : kTypes) {
    for (const uint32_t dim : kDims) {
      const Bench bench(type, dim, 1, dim);
      std::vector<float> expected;
      for (uint32_t i = 0; i < Bench::kRows; ++i)
        for (const float x : bench.vector_of(i)) expected.push_back(x);
      same_for_all_kernels([&] {
        std::vector<float> out(expected.size() + 1, 9.0f);
        kernels().gather({bench.arena.view(), type, dim, bench.row.data(), Bench::kRows, out.data()});
        CHECK_EQ(out.back(), 9.0f);
        out.pop_back();
        CHECK(out == expected);
        return as_bytes(out);
      });
    }
  }
}

TEST(reduce_sums_gradients_in_order_and_tells_of_bad_ones) {
  for (const uint32_t dim : kDims) {
    Random random(dim);
    const uint64_t stride = dim + 3;  // gradients may be columns of something wider
    std::vector<float> gradient(40 * stride, NAN);
    for (size_t i = 0; i < gradient.size(); ++i)
      if (i % stride < dim) gradient[i] = uniform(random, -1, 1);
    const GradientSource source{gradient.data(), stride, 256, 1, nullptr, nullptr, nullptr};
    const std::vector<uint16_t> feature_of{0, 0};
    const std::vector<uint32_t> unique{2, 3, 2, 2, 4, 3}, size{3, 2, 1};
    // Positions without a gap are read as a stream, others key by key.
    for (const std::vector<uint32_t>& position :
         {std::vector<uint32_t>{256, 257, 258, 260, 290, 295}, std::vector<uint32_t>{290, 291, 292, 293, 294, 295}}) {
      const auto run = [&](bool one_source) {
        std::vector<float> out(6 * dim, 5.0f);
        std::vector<uint32_t> scratch(3 + 6);
        const bool finite = kernels().reduce({.dim = dim, .sources = &source, .feature_of = feature_of.data(),
                                              .only_source = one_source ? &source : nullptr,
                                              .position = position.data(), .unique = unique.data(), .positions = 6,
                                              .first = 2, .count = 3, .size = size.data(), .out = out.data(),
                                              .scratch = scratch.data()});
        return std::pair(finite, out);
      };
      std::vector<float> expected(6 * dim, 5.0f);
      std::fill_n(expected.begin() + 2 * dim, 3 * dim, 0.0f);
      for (size_t i = 0; i < position.size(); ++i)
        for (uint32_t c = 0; c < dim; ++c)
          expected[unique[i] * dim + c] += gradient[(position[i] - 256) * stride + c];
      for (const bool one_source : {true, false}) {
        same_for_all_kernels([&] {
          const auto [finite, out] = run(one_source);
          CHECK(finite);
          CHECK(out == expected);  // and nothing outside of [first, first + count) is written
          return as_bytes(out);
        });
        for (const float bad : {NAN, INFINITY, -INFINITY}) {
          const float kept = std::exchange(gradient[39 * stride + dim - 1], bad);
          CHECK(!run(one_source).first);
          gradient[39 * stride + dim - 1] = kept;
        }
      }
    }
  }
}
