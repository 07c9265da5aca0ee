#include "batch/plan.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "threads/pool.h"

namespace karvan {
namespace {

constexpr uint32_t kFindAhead = 16;
constexpr uint64_t kCellsPerTask = 2048;

[[noreturn]] void refuse(const FeatureSpec& spec, const std::string& what) {
  throw std::invalid_argument("Feature '" + spec.name + "' of table '" + spec.table_name + "': " + what);
}

uint32_t saturating_add(uint32_t a, uint32_t b) { return a > UINT32_MAX - b ? UINT32_MAX : a + b; }

}  // namespace

Plan::Plan(std::vector<FeatureSpec> specs, std::vector<FeatureInput> inputs, uint32_t slots)
    : dims_(slots, 0), users_(slots, 0) {
  if (specs.size() > UINT16_MAX) throw std::length_error("an engine holds at most 65535 features");
  features_.resize(specs.size());
  for (size_t f = 0; f < specs.size(); ++f) {
    features_[f].spec = std::move(specs[f]);
    features_[f].in = inputs[f];
  }
  parallel(static_cast<uint32_t>(features_.size()), [&](uint32_t f) {
    check(features_[f]);
    cut(features_[f]);
    describe(features_[f]);
  });

  std::vector<uint32_t> order(features_.size());  // sources of one slot must stand together
  for (uint32_t f = 0; f < order.size(); ++f) order[f] = f;
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return features_[a].spec.slot < features_[b].spec.slot; });
  std::vector<KeySource> sources;
  uint64_t base = 0;
  for (uint32_t f : order) {
    Feature& feature = features_[f];
    const uint64_t positions = feature.in.cells * feature.spec.stack;
    feature.base = base;
    dims_[feature.spec.slot] = feature.spec.dim;
    ++users_[feature.spec.slot];
    sources.push_back({feature.spec.slot, feature.in.values, positions, base});
    base += (positions + (1u << kFeatureShift) - 1) >> kFeatureShift << kFeatureShift;
    if (base > UINT32_MAX / 2) throw std::length_error("a batch holds at most 2^31 ids");
    feature_of_.resize(base >> kFeatureShift, static_cast<uint16_t>(f));
  }
  groups_ = KeyGroups(slots, sources, base);
  row_ = Array<uint32_t>(groups_.hash.size());
}

void Plan::check(const Feature& feature) const {
  const FeatureInput& in = feature.in;
  if (!in.offsets) {
    if (in.cells != in.samples)
      refuse(feature.spec, "expected one id for each of " + std::to_string(in.samples) + " samples, got " +
                               std::to_string(in.cells) + " ids.");
    return;
  }
  if (in.offsets[0] != 0) refuse(feature.spec, "offsets must start at 0, got " + std::to_string(in.offsets[0]) + ".");
  bool falls = false;
  for (uint64_t i = 0; i < in.samples; ++i) falls |= in.offsets[i + 1] < in.offsets[i];
  if (falls) {
    uint64_t i = 0;
    while (in.offsets[i + 1] >= in.offsets[i]) ++i;
    refuse(feature.spec, "offsets must not decrease, but offsets[" + std::to_string(i) + "] = " +
                             std::to_string(in.offsets[i]) + " is followed by " + std::to_string(in.offsets[i + 1]) +
                             ".");
  }
  if (static_cast<uint64_t>(in.offsets[in.samples]) != in.cells)
    refuse(feature.spec, "offsets must end at the number of ids, " + std::to_string(in.cells) + ", got " +
                             std::to_string(in.offsets[in.samples]) + ".");
}

// Padded features keep the first `length` ids of a sample; the others are neither looked up nor inserted.
void Plan::cut(Feature& feature) {
  FeatureInput& in = feature.in;
  if (feature.spec.mode != PoolArgs::Mode::padded || !in.offsets) return;
  int64_t longest = 0, kept = 0;
  for (uint64_t i = 0; i < in.samples; ++i) {
    const int64_t n = in.offsets[i + 1] - in.offsets[i];
    longest = std::max(longest, n);
    kept += std::min<int64_t>(n, in.length);
  }
  if (longest <= in.length) return;
  const uint32_t stack = feature.spec.stack;
  feature.kept_values = Array<uint64_t>(kept * stack);
  feature.kept_offsets = Array<int64_t>(in.samples + 1);
  if (in.weights) feature.kept_weights = Array<float>(kept);
  int64_t at = 0;
  for (uint64_t i = 0; i < in.samples; ++i) {
    const int64_t n = std::min<int64_t>(in.offsets[i + 1] - in.offsets[i], in.length);
    feature.kept_offsets[i] = at;
    std::copy_n(in.values + in.offsets[i] * stack, n * stack, feature.kept_values.data() + at * stack);
    if (in.weights) std::copy_n(in.weights + in.offsets[i], n, feature.kept_weights.data() + at);
    at += n;
  }
  feature.kept_offsets[in.samples] = at;
  in.values = feature.kept_values.data();
  in.offsets = feature.kept_offsets.data();
  in.cells = kept;
  if (in.weights) in.weights = feature.kept_weights.data();
}

// Where a cell's gradient will be found, and by what a sample is scaled.
void Plan::describe(Feature& feature) {
  const FeatureInput& in = feature.in;
  const bool pooled = feature.spec.mode == PoolArgs::Mode::pooled;
  if (in.offsets && feature.spec.mode != PoolArgs::Mode::cells) {
    feature.out_row = Array<uint32_t>(in.cells);
    for (uint64_t i = 0; i < in.samples; ++i)
      for (int64_t c = in.offsets[i]; c < in.offsets[i + 1]; ++c)
        feature.out_row[c] = static_cast<uint32_t>(pooled ? i : i * in.length + (c - in.offsets[i]));
  } else if (feature.spec.mode == PoolArgs::Mode::padded && in.length != 1) {
    feature.out_row = Array<uint32_t>(in.cells);
    for (uint64_t i = 0; i < in.cells; ++i) feature.out_row[i] = static_cast<uint32_t>(i * in.length);
  }
  if (!pooled || feature.spec.combiner == Combiner::sum) return;
  if (!in.offsets && !in.weights) return;  // one id: its mean is itself
  feature.scale = Array<float>(in.samples);
  for (uint64_t i = 0; i < in.samples; ++i) {
    const uint64_t first = in.offsets ? in.offsets[i] : i, last = in.offsets ? in.offsets[i + 1] : i + 1;
    float size = static_cast<float>(last - first);
    if (in.weights) {
      size = 0;
      for (uint64_t c = first; c < last; ++c)
        size += feature.spec.combiner == Combiner::mean ? in.weights[c] : in.weights[c] * in.weights[c];
    }
    if (feature.spec.combiner == Combiner::sqrtn) size = std::sqrt(size);
    feature.scale[i] = size == 0.0f ? 0.0f : 1.0f / size;
  }
}

std::vector<Plan::Unit> Plan::units() const {
  std::vector<Unit> all;
  for (uint32_t s = 0; s < groups_.slots.size(); ++s) {
    const KeyGroups::Slot& slot = groups_.slots[s];
    const uint32_t count = std::min(slot.buckets, tables_[s]->shards()), width = slot.buckets / count;
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t first = slot.first_bucket + i * width;
      if (groups_.begin[first + width] > groups_.begin[first]) all.push_back({s, first, first + width});
    }
  }
  return all;
}

float* Plan::vectors(uint32_t bucket) const {
  const uint32_t slot = groups_.slot_of[bucket];
  return vectors_[slot].data() + (groups_.begin[bucket] - groups_.first_index(slot)) * dims_[slot];
}

void Plan::make_room() {
  for (uint32_t s = 0; s < dims_.size(); ++s) vectors_.emplace_back(groups_.slots[s].positions * dims_[s]);
}

void Plan::gather(uint32_t bucket) {
  const uint32_t slot = groups_.slot_of[bucket];
  kernels().gather({tables_[slot]->view(), tables_[slot]->layout().type, dims_[slot],
                    row_.data() + groups_.begin[bucket], groups_.unique[bucket], vectors(bucket)});
}

void Plan::find(const Unit& unit, bool training, uint32_t step, std::vector<uint32_t>& missing) {
  Table& table = *tables_[unit.slot];
  const uint64_t* hashes = groups_.hash.data();
  for (uint32_t bucket = unit.first; bucket < unit.last; ++bucket) {
    const uint32_t first = groups_.begin[bucket], count = groups_.unique[bucket];
    const uint32_t* start = groups_.start(bucket);
    for (uint32_t i = 0; i < std::min(kFindAhead, count); ++i) table.prefetch(hashes[first + i]);
    for (uint32_t i = 0; i < count; ++i) {
      if (i + kFindAhead < count) table.prefetch(hashes[first + i + kFindAhead]);
      const uint64_t hash = hashes[first + i];
      const Entry entry = table.find(hash);
      row_[first + i] = entry ? entry.row() : 0;
      if (!training) continue;
      const uint32_t times = start[i + 1] - start[i];
      if (entry) {
        entry.count() = saturating_add(entry.count(), times);
        entry.last() = step;
      } else if (table.admit(hash, times)) {
        missing.push_back(bucket);
        missing.push_back(i);
      } else {
        table.rejected.fetch_add(1, std::memory_order_relaxed);
      }
    }
    if (missing.empty()) gather(bucket);
  }
}

void Plan::insert_missing(uint32_t step, const std::vector<Unit>& units, std::vector<std::vector<uint32_t>>& missing) {
  for (uint32_t s = 0; s < tables_.size(); ++s) {
    std::vector<uint32_t> fresh(tables_[s]->shards(), 0);
    bool any = false;
    for (size_t u = 0; u < units.size(); ++u) {
      if (units[u].slot != s) continue;
      for (size_t i = 0; i < missing[u].size(); i += 2, any = true)
        ++fresh[tables_[s]->shard_of(groups_.hash[groups_.begin[missing[u][i]] + missing[u][i + 1]])];
    }
    if (any) tables_[s]->reserve(fresh);
  }
  parallel(static_cast<uint32_t>(units.size()), [&](uint32_t u) {
    if (missing[u].empty()) return;
    Table& table = *tables_[units[u].slot];
    constexpr size_t kAhead = 2 * kFindAhead;
    const std::vector<uint32_t>& list = missing[u];
    for (size_t i = 0; i < list.size(); i += 2) {
      if (i + kAhead < list.size()) table.prefetch(groups_.hash[groups_.begin[list[i + kAhead]] + list[i + kAhead + 1]]);
      const uint32_t bucket = list[i], at = groups_.begin[bucket] + list[i + 1];
      const uint32_t* start = groups_.start(bucket) + list[i + 1];
      row_[at] = table.insert(groups_.hash[at], start[1] - start[0], step);
    }
    // Buckets before the first missing key were gathered when they were searched.
    for (uint32_t bucket = list[0]; bucket < units[u].last; ++bucket) gather(bucket);
  });
}

void Plan::lookup(std::vector<std::shared_ptr<Table>> tables, bool training, uint32_t step) {
  tables_ = std::move(tables);
  make_room();
  const std::vector<Unit> all = units();
  std::vector<std::vector<uint32_t>> missing(all.size());  // pairs (bucket, index)
  parallel(static_cast<uint32_t>(all.size()), [&](uint32_t u) { find(all[u], training, step, missing[u]); });
  if (std::any_of(missing.begin(), missing.end(), [](const auto& m) { return !m.empty(); }))
    insert_missing(step, all, missing);
  for (const auto& table : tables_) {
    if (training) {
      table->end_batch();
      table->next_version();
    }
    version_.push_back(table->version());
    row_epoch_.push_back(table->row_epoch());
  }
}

void Plan::lookup(const std::vector<const float*>& found) {
  make_room();
  for (uint32_t s = 0; s < found.size(); ++s) {
    const KeyGroups::Slot& slot = groups_.slots[s];
    const float* from = found[s];
    for (uint32_t b = slot.first_bucket; b < slot.first_bucket + slot.buckets; ++b) {
      const size_t count = static_cast<size_t>(groups_.unique[b]) * dims_[s];
      std::copy_n(from, count, vectors(b));
      from += count;
    }
  }
}

void Plan::pool() const {
  struct Task {
    const Feature* feature;
    uint64_t begin, end;
  };
  std::vector<Task> tasks;
  for (const Feature& f : features_) {
    const bool by_cell = f.spec.mode == PoolArgs::Mode::cells;
    const uint64_t count = by_cell ? f.in.cells : f.in.samples;
    const uint64_t cells = std::max<uint64_t>(1, f.in.cells * f.spec.stack);
    const uint64_t step = std::max<uint64_t>(1, kCellsPerTask * count / cells);
    for (uint64_t at = 0; at < count; at += step) tasks.push_back({&f, at, std::min(count, at + step)});
  }
  parallel(static_cast<uint32_t>(tasks.size()), [&](uint32_t t) {
    const Feature& f = *tasks[t].feature;
    PoolArgs args{};
    args.vectors = vectors_[f.spec.slot].data();
    args.dim = f.spec.dim;
    args.mode = f.spec.mode;
    args.stack = f.spec.stack;
    args.unique_of = groups_.unique_of.data() + f.base;
    args.offsets = f.in.offsets;
    args.weights = f.in.weights;
    args.scale = f.scale ? f.scale.data() : nullptr;
    args.length = f.in.length;
    args.out = f.in.out;
    args.begin = tasks[t].begin;
    args.end = tasks[t].end;
    kernels().pool(args);
  });
}

void Plan::unique_keys(uint32_t slot, uint64_t* keys, uint32_t* counts) const {
  const KeyGroups::Slot& s = groups_.slots[slot];
  for (uint32_t b = s.first_bucket; b < s.first_bucket + s.buckets; ++b) {
    const uint32_t* start = groups_.start(b);
    for (uint32_t i = 0; i < groups_.unique[b]; ++i) {
      *keys++ = unmix(groups_.hash[groups_.begin[b] + i]);
      *counts++ = start[i + 1] - start[i];
    }
  }
}

}  // namespace karvan
