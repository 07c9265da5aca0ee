#include "batch/plan.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "threads/pool.h"

namespace karvan {
namespace {

constexpr uint32_t kInsertAhead = 16, kFindGroup = 8, kFindTogether = 256;
constexpr uint64_t kPositionsPerTask = 2048;

[[noreturn]] void refuse(const FeatureSpec& spec, const std::string& what) {
  throw std::invalid_argument("Feature '" + spec.name + "' of table '" + spec.table_name + "': " + what);
}

uint32_t saturating_add(uint32_t a, uint32_t b) { return a > UINT32_MAX - b ? UINT32_MAX : a + b; }

}  // namespace

Plan::Plan(std::shared_ptr<const std::vector<FeatureSpec>> specs, std::vector<FeatureInput> inputs, uint32_t slots)
    : specs_(std::move(specs)), features_(specs_->size()), dims_(slots, 0), users_(slots) {
  if (features_.size() > UINT16_MAX) throw std::length_error("an engine holds at most 65535 features");
  bool ragged = false;
  for (size_t f = 0; f < features_.size(); ++f) {
    features_[f].spec = &(*specs_)[f];
    features_[f].in = inputs[f];
    dims_[features_[f].spec->slot] = features_[f].spec->dim;
    users_[features_[f].spec->slot].push_back(static_cast<uint32_t>(f));
    ragged |= inputs[f].offsets != nullptr;
  }
  const auto prepare = [&](uint32_t f) {
    check(features_[f]);
    cut(features_[f]);
    describe(features_[f]);
  };
  if (ragged) parallel(static_cast<uint32_t>(features_.size()), prepare);
  else for (uint32_t f = 0; f < features_.size(); ++f) prepare(f);

  std::vector<KeySource> sources;
  uint64_t base = 0;
  for (uint32_t s = 0; s < slots; ++s) {
    for (uint32_t f : users_[s]) {
      Feature& feature = features_[f];
      const uint64_t positions = feature.in.cells * feature.spec->stack;
      feature.base = base;
      // Of a position whose gradient is not scaled only the output row matters; it is stored while it is known.
      feature.labelled = users_[s].size() == 1 && feature.spec->stack == 1 && feature.out_row && !feature.scale &&
                         !feature.in.weights;
      const uint32_t* label = feature.labelled ? feature.out_row.data() : nullptr;
      sources.push_back({s, feature.in.values, positions, base, false, label});
      base += (positions + (1u << kFeatureShift) - 1) >> kFeatureShift << kFeatureShift;
      if (base > UINT32_MAX / 2) throw std::length_error("a batch holds at most 2^31 ids");
      feature_of_.resize(base >> kFeatureShift, static_cast<uint16_t>(f));
    }
  }
  groups_ = KeyGroups(slots, std::move(sources), base);
  if (std::any_of(features_.begin(), features_.end(), [](const Feature& f) { return f.in.uses != nullptr; }))
    uses_ = Array<uint32_t>(groups_.hash.size());
  row_ = Array<uint32_t>(groups_.hash.size());
  vectors_.resize(slots);
}

void Plan::group() {
  groups_.group_all();
  for (uint32_t s = 0; uses_ && s < slots(); ++s) count_uses(s);
  grouped_ = true;
}

void Plan::check(const Feature& feature) const {
  const FeatureInput& in = feature.in;
  if (!in.offsets) {
    if (in.cells != in.samples)
      refuse(*feature.spec, "expected one id for each of " + std::to_string(in.samples) + " samples, got " +
                               std::to_string(in.cells) + " ids.");
    return;
  }
  if (in.offsets[0] != 0) refuse(*feature.spec, "offsets must start at 0, got " + std::to_string(in.offsets[0]) + ".");
  bool falls = false;
  for (uint64_t i = 0; i < in.samples; ++i) falls |= in.offsets[i + 1] < in.offsets[i];
  if (falls) {
    uint64_t i = 0;
    while (in.offsets[i + 1] >= in.offsets[i]) ++i;
    refuse(*feature.spec, "offsets must not decrease, but offsets[" + std::to_string(i) + "] = " +
                             std::to_string(in.offsets[i]) + " is followed by " + std::to_string(in.offsets[i + 1]) +
                             ".");
  }
  if (static_cast<uint64_t>(in.offsets[in.samples]) != in.cells)
    refuse(*feature.spec, "offsets must end at the number of ids, " + std::to_string(in.cells) + ", got " +
                             std::to_string(in.offsets[in.samples]) + ".");
}

// Padded features use the first `length` ids of a sample; the others are neither looked up nor inserted.
void Plan::cut(Feature& feature) {
  FeatureInput& in = feature.in;
  if (feature.spec->mode != PoolArgs::Mode::padded || !in.offsets) return;
  int64_t longest = 0, kept = 0;
  for (uint64_t i = 0; i < in.samples; ++i) {
    const int64_t n = in.offsets[i + 1] - in.offsets[i];
    longest = std::max(longest, n);
    kept += std::min<int64_t>(n, in.length);
  }
  if (longest <= in.length) return;
  const uint32_t stack = feature.spec->stack;
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
  const bool pooled = feature.spec->mode == PoolArgs::Mode::pooled;
  if (in.offsets && feature.spec->mode != PoolArgs::Mode::cells) {
    feature.out_row = Array<uint32_t>(in.cells);
    for (uint64_t i = 0; i < in.samples; ++i)
      for (int64_t c = in.offsets[i]; c < in.offsets[i + 1]; ++c)
        feature.out_row[c] = static_cast<uint32_t>(pooled ? i : i * in.length + (c - in.offsets[i]));
  } else if (feature.spec->mode == PoolArgs::Mode::padded && in.length != 1) {
    feature.out_row = Array<uint32_t>(in.cells);
    for (uint64_t i = 0; i < in.cells; ++i) feature.out_row[i] = static_cast<uint32_t>(i * in.length);
  }
  if (!pooled || feature.spec->combiner == Combiner::sum) return;
  if (!in.offsets && !in.weights) return;  // one id: its mean is itself
  const Combiner combiner = feature.spec->combiner;
  const bool counts = combiner == Combiner::mean_by_count ||
                      (combiner == Combiner::mean_by_density && in.cells > kDensity * (in.samples + 1));
  feature.scale = Array<float>(in.samples);
  for (uint64_t i = 0; i < in.samples; ++i) {
    const uint64_t first = in.offsets ? in.offsets[i] : i, last = in.offsets ? in.offsets[i + 1] : i + 1;
    float size = static_cast<float>(last - first);
    if (in.weights && !counts) {
      size = 0;
      for (uint64_t c = first; c < last; ++c)
        size += combiner == Combiner::sqrtn ? in.weights[c] * in.weights[c] : in.weights[c];
    }
    if (combiner == Combiner::sqrtn) size = std::sqrt(size);
    feature.scale[i] = size == 0.0f ? 0.0f : 1.0f / size;
  }
}

std::vector<Plan::Unit> Plan::units(uint32_t s) const {
  const KeyGroups::Slot& slot = groups_.slots[s];
  const uint32_t count = std::min(slot.buckets, tables_[s]->shards()), width = slot.buckets / count;
  std::vector<Unit> all;
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t first = slot.first_bucket + i * width;
    all.push_back({s, first, first + width, {}});
  }
  return all;
}

float* Plan::vectors(uint32_t bucket) const {
  const uint32_t slot = groups_.slot_of[bucket];
  return vectors_[slot].data() + (groups_.begin[bucket] - groups_.first_index(slot)) * dims_[slot];
}

void Plan::gather(uint32_t bucket) {
  const uint32_t slot = groups_.slot_of[bucket];
  kernels().gather({tables_[slot]->view(), tables_[slot]->layout().type, dims_[slot],
                    row_.data() + groups_.begin[bucket], groups_.unique[bucket], vectors(bucket)});
}

void Plan::find(Unit& unit, bool training, uint32_t step) {
  for (uint32_t bucket = unit.first; bucket < unit.last; ++bucket) {
    const uint32_t count = groups_.unique[bucket];
    for (uint32_t i = 0; i < count; i += kFindTogether)
      find_some(unit, bucket, i, std::min(kFindTogether, count - i), training, step);
    if (unit.missing.empty()) gather(bucket);  // while its keys are in cache; otherwise after the insertions
  }
}

// First only the bucket where each key's search starts is read, without a branch: most keys are there, but which of its
// three entries has a key, or none, is unpredictable. Then the other keys, whose next lines are being prefetched.
void Plan::find_some(Unit& unit, uint32_t bucket, uint32_t from, uint32_t count, bool training, uint32_t step) {
  Table& table = *tables_[unit.slot];
  const uint32_t first = groups_.begin[bucket] + from;
  const uint64_t* const hashes = groups_.hash.data() + first;
  const uint32_t* const counts = uses() + first;
  uint32_t* const rows = row_.data() + first;
  uint32_t* const count_before = count_before_ ? count_before_.data() + first : nullptr;
  uint32_t* const last_before = count_before_ ? last_before_.data() + first : nullptr;
  if (training) table.before_use(hashes, count);
  Bucket* home[kFindTogether];
  uint32_t further[kFindTogether], left = 0;
  Bucket nowhere{};  // takes the writes of keys that are not at home
  const auto start = [&](uint32_t from) __attribute__((always_inline)) {
    const uint32_t end = std::min(from + kFindGroup, count);
    for (uint32_t i = from; i < end; ++i) home[i] = table.first_bucket(hashes[i]);
    for (uint32_t i = from; i < end; ++i) __builtin_prefetch(home[i], 1);
  };
  for (uint32_t i = 0; i < 16; i += kFindGroup) start(i);
  for (uint32_t i = 0; i < count; ++i) {
    if (i % kFindGroup == 0) start(i + 16);
    Bucket* const at = home[i];
    const uint32_t match = at->match(hashes[i]), slot = match >> 1, missed = match == 0;  // slot: of 1, 2, 4
    rows[i] = match ? at->row[slot] : 0;
    further[left] = i;
    left += missed;
    __builtin_prefetch(at + missed);
    __builtin_prefetch(at + 2 * missed);
    if (!training) continue;
    Bucket* const to = match ? at : &nowhere;
    if (count_before) {
      count_before[i] = to->count[slot];
      last_before[i] = to->last[slot];
    }
    to->count[slot] = saturating_add(to->count[slot], counts[i]);
    to->last[slot] = step;
  }
  for (uint32_t k = 0; k < left; ++k) {
    const uint32_t i = further[k];
    const Entry entry = ShardIndex::find_from(home[i], hashes[i]);
    if (entry) rows[i] = entry.row();
    if (!training) continue;
    if (count_before) {
      count_before[i] = entry ? entry.count() : table.filter_count(hashes[i]);
      last_before[i] = entry ? entry.last() : kAbsent;
    }
    if (entry) {
      entry.count() = saturating_add(entry.count(), counts[i]);
      entry.last() = step;
    } else if (table.admit(hashes[i], counts[i], step)) {
      unit.missing.emplace_back(bucket, from + i);
    } else {
      table.rejected.fetch_add(1, std::memory_order_relaxed);
    }
  }
  if (training) table.note_changes(rows, count);
}

void Plan::count_uses(uint32_t slot) {
  uint32_t* const of_unique = uses_.data() + groups_.first_index(slot);
  std::fill_n(of_unique, groups_.slots[slot].positions, 0u);
  for (const uint32_t f : users_[slot]) {
    const FeatureInput& in = features_[f].in;
    const uint32_t* const unique_of = groups_.unique_of.data() + features_[f].base;
    const uint64_t positions = in.cells * features_[f].spec->stack;
    for (uint64_t i = 0; i < positions; ++i) {
      uint32_t& sum = of_unique[unique_of[i]];
      sum = saturating_add(sum, in.uses ? in.uses[i / features_[f].spec->stack] : 1);
    }
  }
}

void Plan::reserve(uint32_t slot, const std::vector<Unit>& units) {
  Table& table = *tables_[slot];
  std::vector<uint32_t> fresh(table.shards(), 0);
  bool any = false;
  for (const Unit& unit : units) {
    for (const auto& [bucket, i] : unit.missing) ++fresh[table.shard_of(groups_.hash[groups_.begin[bucket] + i])];
    any |= !unit.missing.empty();
  }
  if (any) table.reserve(fresh);
}

void Plan::insert(const Unit& unit, uint32_t step) {
  if (unit.missing.empty()) return;
  Table& table = *tables_[unit.slot];
  const auto at = [&](size_t i) { return groups_.begin[unit.missing[i].first] + unit.missing[i].second; };
  for (size_t i = 0; i < unit.missing.size(); ++i) {
    if (i + kInsertAhead < unit.missing.size()) table.prefetch(groups_.hash[at(i + kInsertAhead)]);
    row_[at(i)] = table.insert(groups_.hash[at(i)], uses()[at(i)], step);
  }
  for (uint32_t bucket = unit.missing[0].first; bucket < unit.last; ++bucket) gather(bucket);
}

void Plan::run_slot(uint32_t slot, bool training, uint32_t step) {
  if (uses_ && !grouped_) count_uses(slot);
  vectors_[slot] = Array<float>(groups_.slots[slot].positions * dims_[slot]);
  std::vector<Unit> all = units(slot);
  parallel(static_cast<uint32_t>(all.size()), [&](uint32_t u) { find(all[u], training, step); });
  if (training) {
    reserve(slot, all);
    parallel(static_cast<uint32_t>(all.size()), [&](uint32_t u) { insert(all[u], step); });
    tables_[slot]->end_batch(groups_.unique_in(slot));
    tables_[slot]->next_version();
  }
  version_[slot] = tables_[slot]->version();
  row_epoch_[slot] = tables_[slot]->row_epoch();
  pool_slot(slot);
}

// A slot with few positions is one thread's work from its keys to its outputs: everything stays in that core's cache.
// A larger one is the work of all threads, step by step. Slots have separate tables, so threads never conflict.
void Plan::run(std::vector<std::shared_ptr<Table>> tables, bool training, uint32_t step, bool remember) {
  if (!tables_.empty()) throw std::logic_error("a plan is run once");
  if (training && remember) {
    count_before_ = Array<uint32_t>(groups_.hash.size());
    last_before_ = Array<uint32_t>(groups_.hash.size());
  }
  step_ = step;
  tables_ = std::move(tables);
  version_.resize(tables_.size());
  row_epoch_.resize(tables_.size());
  if (!grouped_) groups_.group_large();
  for (uint32_t s = 0; s < tables_.size(); ++s)
    if (!groups_.slots[s].small) run_slot(s, training, step);
  parallel(static_cast<uint32_t>(tables_.size()), [&](uint32_t s) {
    if (!groups_.slots[s].small) return;
    if (!grouped_) groups_.group_small(s);
    run_slot(s, training, step);
  });
}

void Plan::run(const std::vector<const float*>& found) {
  for (uint32_t s = 0; s < found.size(); ++s) {
    const KeyGroups::Slot& slot = groups_.slots[s];
    const float* from = found[s];
    vectors_[s] = Array<float>(slot.positions * dims_[s]);
    for (uint32_t b = slot.first_bucket; b < slot.first_bucket + slot.buckets; ++b) {
      const size_t count = static_cast<size_t>(groups_.unique[b]) * dims_[s];
      std::copy_n(from, count, vectors(b));
      from += count;
    }
    pool_slot(s);
  }
}

void Plan::pool_slot(uint32_t slot) {
  for (uint32_t index : users_[slot]) {
    const Feature& f = features_[index];
    PoolArgs args{};
    args.vectors = vectors_[slot].data();
    args.dim = f.spec->dim;
    args.mode = f.spec->mode;
    args.stack = f.spec->stack;
    args.unique_of = groups_.unique_of.data() + f.base;
    args.offsets = f.in.offsets;
    args.weights = f.in.weights;
    args.scale = f.scale ? f.scale.data() : nullptr;
    args.length = f.in.length;
    args.out = f.in.out;
    const uint64_t count = f.spec->mode == PoolArgs::Mode::cells ? f.in.cells : f.in.samples;
    const uint64_t positions = std::max<uint64_t>(1, f.in.cells * f.spec->stack);
    const uint64_t per_task = std::max<uint64_t>(1, kPositionsPerTask * count / positions);
    parallel(static_cast<uint32_t>((count + per_task - 1) / per_task), [&](uint32_t task) {
      PoolArgs mine = args;
      mine.begin = task * per_task;
      mine.end = std::min(count, mine.begin + per_task);
      kernels().pool(mine);
    });
  }
  vectors_[slot] = Array<float>();  // warm in a cache, it is the best memory for the next slot
}

void Plan::unique_keys(uint32_t slot, uint64_t* keys, uint32_t* counts) const {
  const KeyGroups::Slot& s = groups_.slots[slot];
  for (uint32_t b = s.first_bucket; b < s.first_bucket + s.buckets; ++b) {
    for (uint32_t i = groups_.begin[b]; i < groups_.begin[b] + groups_.unique[b]; ++i) {
      *keys++ = unmix(groups_.hash[i]);
      *counts++ = uses()[i];
    }
  }
}

}  // namespace karvan
