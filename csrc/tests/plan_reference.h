// A random batch, and what a plan and its gradients must make of it: plain loops over maps, in double.
#pragma once
#include <cmath>
#include <memory>

#include "batch/gradients.h"
#include "batch/plan.h"
#include "tests/tools.h"

namespace karvan::test {

using Mode = PoolArgs::Mode;
using Sums = std::map<uint64_t, std::vector<double>>;  // by key

inline constexpr float kNothing = 0;  // where the gradient of an output without rows is

struct FeatureData {
  FeatureSpec spec;
  std::vector<uint64_t> values;
  std::vector<int64_t> offsets;  // empty: one cell each
  std::vector<float> weights;
  uint64_t samples = 0, cells = 0;
  uint32_t length = 0;
  std::vector<float> out;
  std::vector<float> gradient;  // `stride` floats for each output row
  uint64_t stride = 0;
  bool has_gradient = true;

  uint64_t first(uint64_t sample) const {
    return offsets.empty() ? sample : static_cast<uint64_t>(offsets[sample]);
  }
  uint64_t out_rows() const {
    return spec.mode == Mode::cells ? cells : spec.mode == Mode::padded ? samples * length : samples;
  }
  FeatureInput input() {
    out.assign(out_rows() * spec.dim, NAN);
    return {values.data(), cells, offsets.empty() ? nullptr : offsets.data(), samples,
            weights.empty() ? nullptr : weights.data(), length, out.data()};
  }
  float weight(uint64_t cell) const { return weights.empty() ? 1.0f : weights[cell]; }

  // Calls f(cell, output row, factor) for every cell that counts.
  template <class F>
  void each_cell(F&& f) const {
    const bool dense = cells > 5 * (samples + 1);
    const bool counts = spec.combiner == Combiner::mean_by_count ||
                        (spec.combiner == Combiner::mean_by_density && dense);
    for (uint64_t sample = 0; sample < samples; ++sample) {
      double size = 0;
      for (uint64_t c = first(sample); c < first(sample + 1); ++c)
        size += counts ? 1.0 : spec.combiner == Combiner::sqrtn ? double{weight(c)} * weight(c) : weight(c);
      if (spec.combiner == Combiner::sqrtn) size = std::sqrt(size);
      for (uint64_t c = first(sample); c < first(sample + 1); ++c) {
        const uint64_t inside = c - first(sample);
        if (spec.mode == Mode::padded && inside >= length) continue;
        if (spec.mode == Mode::cells) f(c, c, double{weight(c)});
        else if (spec.mode == Mode::padded) f(c, sample * length + inside, double{weight(c)});
        else f(c, sample, weight(c) * (spec.combiner == Combiner::sum ? 1.0 : size == 0 ? 0.0 : 1 / size));
      }
    }
  }
};

inline FeatureData random_feature(Random& random, uint32_t slot, uint32_t dim, uint64_t samples,
                                  uint64_t distinct) {
  FeatureData f;
  f.spec.name = "feature";
  f.spec.table_name = "table" + std::to_string(slot);
  f.spec.slot = slot;
  f.spec.mode = static_cast<Mode>(below(random, 3));
  f.spec.combiner = static_cast<Combiner>(below(random, 5));
  f.spec.stack = below(random, 4) == 0 ? 3 : 1;
  f.spec.dim = dim;
  f.samples = f.cells = samples;
  f.length = static_cast<uint32_t>(1 + below(random, 4));
  if (below(random, 3)) {
    const uint64_t most = below(random, 4) ? 7 : 14;  // the latter are dense
    f.offsets.push_back(0);
    for (uint64_t i = 0; i < samples; ++i)
      f.offsets.push_back(f.offsets.back() + static_cast<int64_t>(below(random, most)));
    f.cells = static_cast<uint64_t>(f.offsets.back());
  }
  for (uint64_t i = 0; i < f.cells * f.spec.stack; ++i) {
    const uint64_t kind = below(random, 20);
    f.values.push_back(kind == 0 ? ~uint64_t{0} : kind < 4 ? 3 : below(random, distinct));
  }
  if (below(random, 2))
    for (uint64_t i = 0; i < f.cells; ++i)
      f.weights.push_back(below(random, 9) ? uniform(random, 0.1f, 2.0f) : 0.0f);
  f.stride = dim + below(random, 2) * 3;
  for (uint64_t i = 0; i < f.out_rows() * f.stride; ++i) f.gradient.push_back(uniform(random, -1, 1));
  return f;
}

// Features of several tables, one to three for each; dims by slot.
struct Batch {
  std::vector<FeatureData> features;
  std::vector<uint32_t> dims;

  Batch(uint64_t seed, std::vector<uint32_t> dims_, uint64_t samples, uint64_t distinct)
      : dims(std::move(dims_)) {
    Random random(seed);
    for (uint32_t slot = 0; slot < dims.size(); ++slot)
      for (uint64_t n = 1 + below(random, 3); n > 0; --n)
        features.push_back(random_feature(random, slot, dims[slot], samples, distinct));
  }
  std::shared_ptr<Plan> plan() {
    auto specs = std::make_shared<std::vector<FeatureSpec>>();
    std::vector<FeatureInput> inputs;
    for (FeatureData& f : features) specs->push_back(f.spec), inputs.push_back(f.input());
    return std::make_shared<Plan>(specs, inputs, static_cast<uint32_t>(dims.size()));
  }
  std::vector<OutputGradient> gradients() const {
    std::vector<OutputGradient> all;
    for (const FeatureData& f : features)
      all.push_back({!f.has_gradient ? nullptr : f.gradient.empty() ? &kNothing : f.gradient.data(), f.stride});
    return all;
  }
  std::vector<std::vector<float>> outputs() const {
    std::vector<std::vector<float>> all;
    for (const FeatureData& f : features) all.push_back(f.out);
    return all;
  }
  std::map<uint64_t, uint32_t> counts(uint32_t slot) const {  // of the keys that are looked up
    std::map<uint64_t, uint32_t> all;
    for (const FeatureData& f : features)
      if (f.spec.slot == slot)
        f.each_cell([&](uint64_t cell, uint64_t, double) {
          for (uint32_t s = 0; s < f.spec.stack; ++s) ++all[f.values[cell * f.spec.stack + s]];
        });
    return all;
  }
  // Do the outputs follow from these rows? Unknown keys count as zeros.
  bool outputs_follow_from(const std::vector<Rows>& rows) const {
    for (const FeatureData& f : features) {
      const uint32_t dim = f.spec.dim;
      std::vector<double> expected(f.out_rows() * dim, 0.0);
      f.each_cell([&](uint64_t cell, uint64_t row, double factor) {
        for (uint32_t s = 0; s < f.spec.stack; ++s) {
          const auto found = rows[f.spec.slot].find(f.values[cell * f.spec.stack + s]);
          if (found == rows[f.spec.slot].end()) continue;
          for (uint32_t c = 0; c < dim; ++c) expected[row * dim + c] += factor * found->second.vector[c];
        }
      });
      for (size_t i = 0; i < expected.size(); ++i)
        if (!(std::fabs(f.out[i] - expected[i]) <= 1e-5 * (1 + std::fabs(expected[i])))) return false;
    }
    return true;
  }
  Sums sums(uint32_t slot) const {
    Sums all;
    for (const FeatureData& f : features) {
      if (f.spec.slot != slot || !f.has_gradient) continue;
      f.each_cell([&](uint64_t cell, uint64_t row, double factor) {
        for (uint32_t s = 0; s < f.spec.stack; ++s) {
          std::vector<double>& sum = all[f.values[cell * f.spec.stack + s]];
          sum.resize(f.spec.dim);
          for (uint32_t c = 0; c < f.spec.dim; ++c) sum[c] += factor * f.gradient[row * f.stride + c];
        }
      });
    }
    return all;
  }
};

inline std::map<uint64_t, std::vector<float>> copied(const Gradients& gradients, uint32_t slot) {
  const uint64_t unique = gradients.unique_in(slot);
  const uint32_t dim = gradients.dim(slot);
  std::vector<uint64_t> keys(unique);
  std::vector<float> values(unique * dim);
  gradients.copy(slot, keys.data(), values.data());
  std::map<uint64_t, std::vector<float>> all;
  for (size_t i = 0; i < unique; ++i) all[keys[i]] = {values.data() + i * dim, values.data() + (i + 1) * dim};
  return all.size() == unique ? all : decltype(all){};
}

inline bool close(const std::map<uint64_t, std::vector<float>>& got, const Sums& expected) {
  if (got.size() != expected.size()) return false;
  for (const auto& [key, sum] : expected) {
    const auto found = got.find(key);
    if (found == got.end() || found->second.size() != sum.size()) return false;
    for (size_t c = 0; c < sum.size(); ++c)  // a hot key sums thousands of gradients
      if (!(std::fabs(found->second[c] - sum[c]) <= 1e-3 * (1 + std::fabs(sum[c])))) return false;
  }
  return true;
}

}  // namespace karvan::test
