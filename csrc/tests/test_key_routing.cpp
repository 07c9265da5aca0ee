#include "batch/key_routing.h"

#include <map>
#include <set>

#include "hash/mix.h"
#include "tests/check.h"
#include "tests/plan_reference.h"

using namespace karvan;
using namespace karvan::test;

namespace {

const std::vector<uint32_t> kDims{3, 8, 1};

// Where each key is in the order of travel, told by the message alone: by slot, key → (its place, its vector's place).
std::vector<std::map<uint64_t, std::pair<uint64_t, uint64_t>>> places(const Route& route, uint32_t ranks,
                                                                       const std::vector<uint64_t>& message) {
  std::vector<std::map<uint64_t, std::pair<uint64_t, uint64_t>>> all(kDims.size());
  uint64_t key = 0, at = 0, word = 0;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    uint64_t of_rank = 0;
    for (uint32_t slot = 0; slot < kDims.size(); ++slot) {
      for (uint64_t i = 0; i < route.counts()[rank * kDims.size() + slot]; ++i, ++key, ++of_rank, at += kDims[slot]) {
        const uint64_t value = message[word + of_rank];
        CHECK_EQ(owner_of(mix(value), ranks), rank);
        CHECK(all[slot].emplace(value, std::pair{key, at}).second);  // each once
      }
    }
    word += Route::words(of_rank);
  }
  CHECK_EQ(key, route.keys());
  CHECK_EQ(at, route.floats());
  CHECK_EQ(word, message.size());
  return all;
}

std::vector<uint64_t> packed(const Route& route, uint32_t ranks) {
  uint64_t words = 0;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    uint64_t keys = 0;
    for (uint32_t slot = 0; slot < kDims.size(); ++slot) keys += route.counts()[rank * kDims.size() + slot];
    words += Route::words(keys);
  }
  std::vector<uint64_t> message(words, 77);
  route.pack_keys(message.data());
  return message;
}

}  // namespace

TEST(owners_have_ranges_of_hashes_that_grow_with_the_rank) {
  for (const uint32_t ranks : {1u, 2u, 3u, 7u, 1000u}) {
    CHECK_EQ(owner_of(0, ranks), 0u);
    CHECK_EQ(owner_of(UINT64_MAX, ranks), ranks - 1);
    Random random(ranks);
    for (int i = 0; i < 1000; ++i) {
      const uint64_t a = random(), b = random();
      CHECK((a < b) == (owner_of(a, ranks) < owner_of(b, ranks)) || owner_of(a, ranks) == owner_of(b, ranks));
    }
  }
}

TEST(a_route_has_every_key_once_with_its_owner_and_its_uses) {
  for (const uint64_t samples : {0u, 1u, 60u, 3000u}) {
    for (const uint32_t ranks : {1u, 2u, 3u, 5u}) {
      const WithThreads with(2);
      Batch batch(samples + ranks, kDims, samples, samples + 5);
      const auto plan = batch.plan();
      plan->group();
      const Route route(plan, ranks);
      const auto message = packed(route, ranks);
      const auto found = places(route, ranks, message);
      uint64_t word = 0;
      std::vector<std::map<uint64_t, uint32_t>> uses(kDims.size());
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        uint64_t keys = 0;
        for (uint32_t slot = 0; slot < kDims.size(); ++slot) keys += route.counts()[rank * kDims.size() + slot];
        const auto* counted = reinterpret_cast<const uint32_t*>(message.data() + word + keys);
        uint64_t i = 0;
        for (uint32_t slot = 0; slot < kDims.size(); ++slot)
          for (uint64_t n = 0; n < route.counts()[rank * kDims.size() + slot]; ++n, ++i)
            uses[slot][message[word + i]] = counted[i];
        if (keys % 2) CHECK_EQ(counted[keys], 0u);
        word += Route::words(keys);
      }
      for (uint32_t slot = 0; slot < kDims.size(); ++slot) CHECK(uses[slot] == batch.counts(slot));
    }
  }
}

TEST(a_route_brings_vectors_to_the_plan_and_gradients_to_their_owners) {
  for (const uint64_t samples : {1u, 60u, 3000u}) {
    for (const uint32_t ranks : {1u, 3u}) {
      const WithThreads with(2);
      Batch batch(samples * ranks, kDims, samples, samples + 5), other = batch;
      const auto plan = batch.plan(), reference = other.plan();
      plan->group(), reference->group();
      Route route(plan, ranks);
      const auto found = places(route, ranks, packed(route, ranks));
      // A vector's elements follow from its key, so that each can be told from all others.
      const auto element = [](uint64_t key, uint32_t k) { return static_cast<float>(mix(key + k) >> 40); };
      std::vector<float> wire(route.floats(), NAN);
      std::vector<std::vector<float>> vectors(kDims.size());
      std::vector<const float*> pointers;
      for (uint32_t slot = 0; slot < kDims.size(); ++slot) {
        for (const auto& [key, place] : found[slot])
          for (uint32_t k = 0; k < kDims[slot]; ++k) wire[place.second + k] = element(key, k);
        std::vector<uint64_t> keys(reference->unique_in(slot));
        std::vector<uint32_t> counts(keys.size());
        reference->unique_keys(slot, keys.data(), counts.data());
        for (const uint64_t key : keys)
          for (uint32_t k = 0; k < kDims[slot]; ++k) vectors[slot].push_back(element(key, k));
      }
      for (const auto& each : vectors) pointers.push_back(each.data());
      route.pool(wire.data());
      reference->run(pointers);
      for (size_t f = 0; f < batch.features.size(); ++f)
        CHECK(same_bits(batch.features[f].out, other.features[f].out));

      Gradients gradients(plan, batch.gradients());
      CHECK(Route::complete(gradients));
      std::vector<float> sent(route.floats(), NAN);
      route.pack_gradients(gradients, 0.25f, sent.data());
      for (uint32_t slot = 0; slot < kDims.size(); ++slot) {
        std::vector<uint64_t> keys(gradients.unique_in(slot));
        std::vector<float> values(keys.size() * kDims[slot]);
        gradients.copy(slot, keys.data(), values.data());
        for (size_t i = 0; i < keys.size(); ++i)
          for (uint32_t k = 0; k < kDims[slot]; ++k)
            CHECK_EQ(sent[found[slot].at(keys[i]).second + k], 0.25f * values[i * kDims[slot] + k]);
      }
      batch.features[0].has_gradient = false;
      CHECK(!Route::complete(Gradients(plan, batch.gradients())));
    }
  }
}

TEST(positions_that_stand_for_several_uses_are_counted_as_such) {
  const WithThreads with(2);
  for (const bool ahead : {false, true}) {
    const std::vector<uint64_t> keys{5, 6, 5, 7};
    const std::vector<uint32_t> uses{2, 1, 10, 3};
    std::vector<float> out(4, NAN);
    FeatureSpec spec;
    spec.mode = Mode::cells;
    spec.dim = 1;
    const FeatureInput input{keys.data(), 4, nullptr, 4, nullptr, 1, out.data(), uses.data()};
    const auto plan = std::make_shared<Plan>(std::make_shared<std::vector<FeatureSpec>>(1, spec),
                                             std::vector<FeatureInput>{input}, 1);
    const auto table = std::make_shared<Table>(table_config(1));
    if (ahead) plan->group();
    plan->run({table}, true, 1);
    const Rows rows = contents(*table);
    CHECK_EQ(rows.at(5).count, 12u);
    CHECK_EQ(rows.at(6).count, 1u);
    CHECK_EQ(rows.at(7).count, 3u);
  }
}

TEST(an_average_is_by_the_positions_of_a_key) {
  const WithThreads with(2);
  Batch batch(4, kDims, 500, 90);
  const auto plan = batch.plan();
  plan->group();
  Gradients gradients(plan, batch.gradients());
  const size_t count = gradients.unique_in(0), dim = kDims[0];
  std::vector<uint64_t> keys(count);
  std::vector<float> sums(count * dim), means(count * dim);
  gradients.copy(0, keys.data(), sums.data());
  gradients.average();
  gradients.copy(0, keys.data(), means.data());
  const auto counts = batch.counts(0);
  for (size_t i = 0; i < count; ++i)
    for (size_t k = 0; k < dim; ++k)
      CHECK_EQ(means[i * dim + k], sums[i * dim + k] / static_cast<float>(counts.at(keys[i])));
}
