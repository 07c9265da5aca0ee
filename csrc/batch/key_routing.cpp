#include "batch/key_routing.h"

#include <algorithm>
#include <stdexcept>

#include "hash/mix.h"
#include "threads/pool.h"

namespace karvan {

template <class F>
void Route::each_slot(F&& f) const {
  const KeyGroups& g = plan_->groups_;
  parallel(plan_->slots(), [&](uint32_t s) {
    const KeyGroups::Slot& slot = g.slots[s];
    uint64_t number = 0;
    for (uint32_t b = slot.first_bucket; b < slot.first_bucket + slot.buckets; ++b)
      for (uint32_t i = 0; i < g.unique[b]; ++i) f(s, b, g.begin[b] + i, number++);
  });
}

Route::Route(std::shared_ptr<Plan> plan, uint32_t ranks)
    : plan_(std::move(plan)),
      ranks_(ranks),
      counts_(size_t{ranks} * plan_->slots(), 0),
      key_at_(plan_->slots()),
      float_at_(plan_->slots()) {
  if (!plan_->grouped_) throw std::logic_error("a plan is grouped before its route is made");
  const KeyGroups& g = plan_->groups_;
  const uint32_t slots = plan_->slots();
  each_slot([&](uint32_t s, uint32_t, uint32_t at, uint64_t) { ++counts_[owner_of(g.hash[at], ranks_) * slots + s]; });
  std::vector<uint64_t> key(counts_.size()), value(counts_.size());
  for (size_t block = 0; block < counts_.size(); ++block) {
    key[block] = keys_;
    value[block] = floats_;
    keys_ += counts_[block];
    floats_ += counts_[block] * plan_->dims_[block % slots];
  }
  for (uint32_t s = 0; s < slots; ++s) {
    key_at_[s] = Array<uint32_t>(g.unique_in(s));
    float_at_[s] = Array<uint64_t>(g.unique_in(s));
  }
  each_slot([&](uint32_t s, uint32_t, uint32_t at, uint64_t number) {
    const size_t block = owner_of(g.hash[at], ranks_) * slots + s;
    key_at_[s][number] = static_cast<uint32_t>(key[block]++);
    float_at_[s][number] = value[block];
    value[block] += plan_->dims_[s];
  });
}

void Route::pack_keys(uint64_t* message) const {
  const KeyGroups& g = plan_->groups_;
  const uint32_t slots = plan_->slots();
  std::vector<uint64_t> first(ranks_), keys(ranks_);
  std::vector<uint64_t*> begin(ranks_);
  uint64_t before = 0;
  for (uint32_t r = 0; r < ranks_; ++r) {
    first[r] = before;
    for (uint32_t s = 0; s < slots; ++s) keys[r] += counts_[r * slots + s];
    begin[r] = message;
    if (keys[r] % 2) message[words(keys[r]) - 1] = 0;
    message += words(keys[r]);
    before += keys[r];
  }
  each_slot([&](uint32_t s, uint32_t, uint32_t at, uint64_t number) {
    const uint32_t r = owner_of(g.hash[at], ranks_);
    const uint64_t place = key_at_[s][number] - first[r];
    begin[r][place] = unmix(g.hash[at]);
    reinterpret_cast<uint32_t*>(begin[r] + keys[r])[place] = plan_->uses()[at];
  });
}

void Route::pool(const float* vectors) {
  const KeyGroups& g = plan_->groups_;
  for (uint32_t s = 0; s < plan_->slots(); ++s)
    plan_->vectors_[s] = Array<float>(g.slots[s].positions * plan_->dims_[s]);
  each_slot([&](uint32_t s, uint32_t bucket, uint32_t at, uint64_t number) {
    std::copy_n(vectors + float_at_[s][number], plan_->dims_[s],
                plan_->vectors(bucket) + size_t{at - g.begin[bucket]} * plan_->dims_[s]);
  });
  for (uint32_t s = 0; s < plan_->slots(); ++s) plan_->pool_slot(s);
}

void Route::pack_gradients(const Gradients& gradients, float scale, float* out) const {
  if (!complete(gradients)) throw std::logic_error("some features had no gradient");
  each_slot([&](uint32_t s, uint32_t bucket, uint32_t at, uint64_t number) {
    const uint32_t dim = plan_->dims_[s];
    const float* const value = gradients.values(bucket) + size_t{at - plan_->groups_.begin[bucket]} * dim;
    float* const to = out + float_at_[s][number];
    for (uint32_t k = 0; k < dim; ++k) to[k] = value[k] * scale;
  });
}

}  // namespace karvan
