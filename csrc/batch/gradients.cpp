#include "batch/gradients.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <unordered_set>

#include "threads/pool.h"

namespace karvan {

Gradients::Gradients(std::shared_ptr<const Plan> plan, const std::vector<OutputGradient>& of_features)
    : plan_(std::move(plan)),
      tables_(plan_->tables_),
      dims_(plan_->dims_),
      version_(plan_->version_),
      looked_up_(plan_->version_),
      row_epoch_(plan_->row_epoch_) {
  std::vector<GradientSource> sources;
  std::vector<KeySource> keys;
  for (size_t f = 0; f < of_features.size(); ++f) {
    const Plan::Feature& feature = plan_->features_[f];
    sources.push_back({of_features[f].values, of_features[f].stride, feature.base, feature.spec->stack,
                       feature.out_row ? feature.out_row.data() : nullptr, feature.in.weights,
                       feature.scale ? feature.scale.data() : nullptr});
    if (of_features[f].values)
      keys.push_back({feature.spec->slot, feature.in.values, feature.in.cells * feature.spec->stack, feature.base});
  }
  if (keys.size() == of_features.size()) {
    for (size_t f = 0; f < of_features.size(); ++f) {
      if (!plan_->features_[f].labelled) continue;
      sources[f].base = 0;
      sources[f].out_row = nullptr;
    }
  } else {  // keys of features without a gradient must not be touched: group again, without labels
    // A feature without ids has the base of the next one, which may be of another slot.
    std::stable_sort(keys.begin(), keys.end(), [](const auto& a, const auto& b) {
      return a.slot != b.slot ? a.slot < b.slot : a.base < b.base;
    });
    own_groups_ = std::make_unique<KeyGroups>(static_cast<uint32_t>(dims_.size()), std::move(keys),
                                              plan_->groups_.unique_of.size());
    own_groups_->group_all();
    const KeyGroups& g = *own_groups_;
    own_row_ = Array<uint32_t>(g.hash.size());
    parallel(g.buckets(), [&](uint32_t b) {
      const uint64_t first = plan_->groups_.first_index(g.slot_of[b]);
      const uint64_t own_first = g.first_index(g.slot_of[b]);
      for (uint32_t i = g.begin[b]; i < g.begin[b + 1]; ++i)
        own_row_[own_first + g.unique_at[i]] = plan_->row_[first + plan_->groups_.unique_of[g.position[i]]];
    });
  }
  reduce(sources, plan_->feature_of_);
}

float* Gradients::values(uint32_t bucket) const {
  const uint32_t slot = groups().slot_of[bucket];
  return values_[slot].data() + (groups().begin[bucket] - groups().first_index(slot)) * dims_[slot];
}

// A small slot's buckets are one task, like its lookup was: its gradients pass through one core's cache only.
void Gradients::each_bucket(const std::function<void(uint32_t)>& f) const {
  const KeyGroups& g = groups();
  std::vector<std::pair<uint32_t, uint32_t>> tasks;
  for (const KeyGroups::Slot& slot : g.slots) {
    const uint32_t width = slot.small ? slot.buckets : 1;
    for (uint32_t b = 0; b < slot.buckets; b += width) tasks.emplace_back(slot.first_bucket + b, width);
  }
  parallel(static_cast<uint32_t>(tasks.size()), [&](uint32_t t) {
    for (uint32_t b = tasks[t].first; b < tasks[t].first + tasks[t].second; ++b)
      if (g.unique[b] != 0) f(b);
  });
}

void Gradients::reduce(const std::vector<GradientSource>& sources, const std::vector<uint16_t>& feature_of) {
  const KeyGroups& g = groups();
  for (uint32_t s = 0; s < dims_.size(); ++s) values_.emplace_back(g.slots[s].positions * dims_[s]);
  std::vector<std::atomic<bool>> bad(dims_.size());
  std::vector<const GradientSource*> only(dims_.size(), nullptr);
  for (uint32_t s = 0; s < dims_.size(); ++s)
    if (g.slots[s].sources.size() == 1 && g.slots[s].positions > 0)
      only[s] = &sources[feature_of[g.slots[s].sources[0].base >> kFeatureShift]];
  each_bucket([&](uint32_t b) {
    const uint32_t slot = g.slot_of[b];
    const uint32_t first = g.begin[b], positions = g.begin[b + 1] - first;
    thread_local std::vector<uint32_t> scratch;
    scratch.resize(g.unique[b] + positions);
    const ReduceArgs args{.dim = dims_[slot],
                          .sources = sources.data(),
                          .feature_of = feature_of.data(),
                          .only_source = only[slot],
                          .position = g.position.data() + first,
                          .unique = g.unique_at.data() + first,
                          .positions = positions,
                          .first = first - static_cast<uint32_t>(g.first_index(slot)),
                          .count = g.unique[b],
                          .size = g.count.data() + first,
                          .out = values_[slot].data(),
                          .scratch = scratch.data()};
    if (!kernels().reduce(args)) bad[slot].store(true, std::memory_order_relaxed);
  });
  for (const auto& b : bad) finite_.push_back(!b.load());
}

std::vector<bool> Gradients::touched() const {
  std::vector<bool> any;
  for (uint32_t s = 0; s < slots(); ++s) any.push_back(groups().slots[s].positions > 0);
  return any;
}

void Gradients::resolve() {
  const KeyGroups& g = groups();
  for (uint32_t s = 0; s < tables_.size(); ++s) {
    Table& table = *tables_[s];
    const bool moved = table.row_epoch() != row_epoch_[s];
    if (!moved && !table.evictions().any_since(version_[s])) continue;
    std::unordered_set<uint64_t> gone;
    table.evictions().each_since(version_[s], [&](uint64_t hash) { gone.insert(hash); });
    uint64_t dropped = 0;
    const KeyGroups::Slot& slot = g.slots[s];
    for (uint32_t b = slot.first_bucket; b < slot.first_bucket + slot.buckets; ++b) {
      for (uint32_t i = g.begin[b]; i < g.begin[b] + g.unique[b]; ++i) {
        if (row()[i] == 0) continue;
        // A key that was removed and inserted again has a new row, which this gradient was not computed from.
        // If the log does not reach back that far, nothing is known of any key, and all are dropped.
        const bool left = !table.evictions().knows(version_[s]) || gone.contains(g.hash[i]);
        const Entry entry = left ? Entry{} : table.find(g.hash[i]);
        dropped += !entry;
        row()[i] = entry ? entry.row() : 0;
      }
    }
    table.dropped_gradients.fetch_add(dropped);
    version_[s] = table.version();
    row_epoch_[s] = table.row_epoch();
  }
}

void Gradients::apply(const std::vector<const Rule*>& rules, const std::vector<uint64_t>& steps) {
  resolve();
  for (uint32_t s = 0; s < tables_.size(); ++s)
    if (rules[s] && !finite_[s] && unique_in(s)) tables_[s]->skipped_updates.fetch_add(1);
  const KeyGroups& g = groups();
  for (uint32_t s = 0; s < tables_.size(); ++s) {
    if (!rules[s] || !finite_[s] || !tables_[s]->is_late(looked_up_[s])) continue;
    const KeyGroups::Slot& slot = g.slots[s];
    for (uint32_t b = slot.first_bucket; b < slot.first_bucket + slot.buckets; ++b)
      tables_[s]->before_late_change(g.hash.data() + g.begin[b], row() + g.begin[b], g.unique[b], looked_up_[s]);
  }
  each_bucket([&](uint32_t b) {
    const uint32_t s = g.slot_of[b];
    if (!rules[s] || !finite_[s]) return;
    const ApplyArgs args{tables_[s]->view(), tables_[s]->layout(), rules[s], row() + g.begin[b],
                         g.hash.data() + g.begin[b], values(b), g.unique[b], steps[s]};
    kernels().apply(args);
  });
  for (uint32_t s = 0; s < tables_.size(); ++s)
    if (rules[s] && finite_[s]) tables_[s]->next_version();
}

std::unique_ptr<Gradients> Gradients::merge(const std::vector<Gradients*>& parts) {
  if (parts.empty()) throw std::invalid_argument("Expected the gradients of some passes, got none.");
  for (const Gradients* part : parts)
    for (uint32_t s = 0; s < std::max(part->slots(), parts[0]->slots()); ++s)
      if (part->slots() != parts[0]->slots() || part->tables_ != parts[0]->tables_ ||
          (part->dims_[s] && parts[0]->dims_[s] && part->dims_[s] != parts[0]->dims_[s]))
        throw std::invalid_argument("Expected gradients of the same tables, got those of others.");
  std::unique_ptr<Gradients> sum(new Gradients);
  sum->tables_ = parts[0]->tables_;
  sum->dims_ = parts[0]->dims_;
  for (Gradients* part : parts) {
    part->resolve();
    for (uint32_t s = 0; s < sum->dims_.size(); ++s) sum->dims_[s] = std::max(sum->dims_[s], part->dims_[s]);
  }
  // Each (slot, part) is a source of hashes; a cell's output row is its index in the part's values.
  std::vector<GradientSource> sources;
  std::vector<KeySource> keys;
  std::vector<uint16_t> feature_of;
  std::vector<std::vector<uint64_t>> hashes;
  std::vector<std::vector<uint32_t>> out_rows;
  std::vector<uint32_t> rows;  // by position
  uint64_t base = 0;
  for (uint32_t s = 0; s < sum->dims_.size(); ++s) {
    for (Gradients* part : parts) {
      const KeyGroups& g = part->groups();
      hashes.emplace_back();
      out_rows.emplace_back();
      rows.resize(base);
      const KeyGroups::Slot& slot = g.slots[s];
      for (uint32_t b = slot.first_bucket; b < slot.first_bucket + slot.buckets; ++b) {
        for (uint32_t i = g.begin[b]; i < g.begin[b] + g.unique[b]; ++i) {
          if (!part->tables_.empty() && part->row()[i] == 0) continue;
          hashes.back().push_back(g.hash[i]);
          out_rows.back().push_back(static_cast<uint32_t>(i - g.first_index(s)));
          rows.push_back(part->row()[i]);
        }
      }
      sources.push_back({part->values_[s].data(), sum->dims_[s], base, 1, out_rows.back().data(), nullptr, nullptr});
      keys.push_back({s, hashes.back().data(), hashes.back().size(), base, true});
      base = (base + hashes.back().size() + (1u << kFeatureShift) - 1) >> kFeatureShift << kFeatureShift;
      feature_of.resize(base >> kFeatureShift, static_cast<uint16_t>(sources.size() - 1));
    }
  }
  sum->own_groups_ = std::make_unique<KeyGroups>(static_cast<uint32_t>(sum->dims_.size()), std::move(keys), base);
  sum->own_groups_->group_all();
  const KeyGroups& g = *sum->own_groups_;
  sum->own_row_ = Array<uint32_t>(g.hash.size());
  for (uint32_t b = 0; b < g.buckets(); ++b)
    for (uint32_t i = g.begin[b]; i < g.begin[b + 1]; ++i)
      sum->own_row_[g.first_index(g.slot_of[b]) + g.unique_at[i]] = rows[g.position[i]];
  sum->reduce(sources, feature_of);
  for (uint32_t s = 0; s < sum->dims_.size(); ++s)
    for (Gradients* part : parts) sum->finite_[s] &= part->finite_[s];
  for (uint32_t s = 0; s < sum->tables_.size(); ++s) {
    sum->version_.push_back(sum->tables_[s]->version());
    sum->row_epoch_.push_back(sum->tables_[s]->row_epoch());
    sum->looked_up_.push_back(UINT64_MAX);
    for (const Gradients* part : parts) sum->looked_up_[s] = std::min(sum->looked_up_[s], part->looked_up_[s]);
  }
  return sum;
}

void Gradients::average() {
  const KeyGroups& g = groups();
  each_bucket([&](uint32_t b) {
    float* value = values(b);
    const uint32_t* const counts = g.count.data() + g.begin[b];
    const uint32_t dim = dims_[g.slot_of[b]];
    for (uint32_t i = 0; i < g.unique[b]; ++i, value += dim) {
      if (counts[i] == 1) continue;
      const float size = static_cast<float>(counts[i]);
      for (uint32_t k = 0; k < dim; ++k) value[k] /= size;
    }
  });
}

void Gradients::copy(uint32_t slot, uint64_t* keys, float* gradients) const {
  const KeyGroups& g = groups();
  const KeyGroups::Slot& s = g.slots[slot];
  for (uint32_t b = s.first_bucket; b < s.first_bucket + s.buckets; ++b) {
    const float* from = values(b);
    for (uint32_t i = 0; i < g.unique[b]; ++i) *keys++ = unmix(g.hash[g.begin[b] + i]);
    gradients = std::copy_n(from, static_cast<size_t>(g.unique[b]) * dims_[slot], gradients);
  }
}

}  // namespace karvan
