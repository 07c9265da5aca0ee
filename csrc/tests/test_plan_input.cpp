// Offsets that make no sense are refused before any table is touched; batches without ids are fine.
#include <stdexcept>

#include "batch/gradients.h"
#include "batch/plan.h"
#include "tests/check.h"
#include "tests/plan_reference.h"

using namespace karvan;
using namespace karvan::test;

namespace {

FeatureSpec spec(Mode mode = Mode::pooled) {
  FeatureSpec s;
  s.name = "history";
  s.table_name = "item";
  s.dim = 2;
  s.mode = mode;
  return s;
}

std::string refusal(const std::vector<uint64_t>& values, const std::vector<int64_t>& offsets,
                    uint64_t samples) {
  FeatureInput input;
  input.values = values.data();
  input.cells = values.size();
  input.offsets = offsets.empty() ? nullptr : offsets.data();
  input.samples = samples;
  const auto specs = std::make_shared<std::vector<FeatureSpec>>(1, spec());
  try {
    const Plan plan(specs, {input}, 1);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

bool names_all(const std::string& text, std::initializer_list<const char*> words) {
  for (const char* word : words)
    if (text.find(word) == std::string::npos) return false;
  return true;
}

}  // namespace

TEST(wrong_offsets_are_refused_by_name) {
  const WithThreads with(2);
  const std::vector<uint64_t> ids{1, 2, 3};
  CHECK_EQ(refusal(ids, {0, 1, 3}, 2), std::string());
  CHECK_EQ(refusal(ids, {}, 3), std::string());
  CHECK(names_all(refusal(ids, {1, 2, 3}, 2), {"history", "item", "start at 0", "got 1"}));
  CHECK(names_all(refusal(ids, {0, 2, 1, 3}, 3), {"history", "item", "decrease", "offsets[1] = 2", "1"}));
  CHECK(names_all(refusal(ids, {0, 1, 2}, 2), {"history", "item", "3", "got 2"}));
  CHECK(names_all(refusal(ids, {0, 1, 4}, 2), {"history", "item", "3", "got 4"}));
  CHECK(names_all(refusal(ids, {}, 2), {"history", "item", "2 samples", "3 ids"}));
  CHECK(names_all(refusal(ids, {0, -1, 3}, 2), {"history", "item", "decrease"}));
}

TEST(batches_without_ids_work) {
  const WithThreads with(2);
  for (const Mode mode : {Mode::pooled, Mode::cells, Mode::padded}) {
    for (const uint64_t samples : {0ull, 5ull}) {
      const auto table = std::make_shared<Table>(table_config(2));
      FeatureData feature;
      feature.spec = spec(mode);
      feature.samples = samples;
      feature.offsets.assign(samples + 1, 0);
      feature.length = 3;
      const auto specs = std::make_shared<std::vector<FeatureSpec>>(1, feature.spec);
      const auto plan = std::make_shared<Plan>(specs, std::vector<FeatureInput>{feature.input()}, 1);
      plan->run({table}, true, 1);
      CHECK(feature.out == std::vector<float>(feature.out_rows() * 2, 0.0f));
      const std::vector<float> gradient(feature.out_rows() * 2 + 1, 1.0f);
      Gradients gradients(plan, {{gradient.data(), 2}});
      const Rule rule{};
      gradients.apply({&rule}, {1});
      CHECK_EQ(table->rows(), 0u);
      CHECK_EQ(gradients.unique_in(0), 0u);
    }
  }
}
