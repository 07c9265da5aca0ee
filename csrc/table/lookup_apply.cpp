// Distinct keys of one table: lookups and updates for callers that are not in this process.
#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "kernels/kernels.h"
#include "table/row_io.h"
#include "table/table.h"
#include "threads/pool.h"

namespace karvan {
namespace {

constexpr size_t kPerTask = 512;  // keys

}  // namespace

std::vector<std::vector<uint32_t>> Table::by_shard(const uint64_t* keys, size_t count) const {
  std::vector<std::vector<uint32_t>> places(shards());
  for (size_t i = 0; i < count; ++i) places[shard_of(mix(keys[i]))].push_back(static_cast<uint32_t>(i));
  return places;
}

void Table::lookup(const uint64_t* keys, const uint32_t* counts, size_t count, bool training, uint32_t step,
                   float* vectors) {
  const auto mine = by_shard(keys, count);
  std::vector<uint32_t> row(count), fresh(shards());
  constexpr uint32_t kNew = UINT32_MAX;  // admitted, but not inserted yet
  parallel(shards(), [&](uint32_t s) {
    for (uint32_t i : mine[s]) {
      const uint64_t hash = mix(keys[i]);
      const Entry entry = find(hash);
      row[i] = entry ? entry.row() : 0;
      if (!training) continue;
      if (entry) {
        if (capture_) capture_->before_change(entry);
        note_changes(&row[i], 1);
        entry.count() = entry.count() > UINT32_MAX - counts[i] ? UINT32_MAX : entry.count() + counts[i];
        entry.last() = step;
      } else if (admit(hash, counts[i], step)) {
        row[i] = kNew;
        ++fresh[s];
      } else {
        rejected.fetch_add(1, std::memory_order_relaxed);
      }
    }
  });
  if (training) reserve(fresh);
  parallel(shards(), [&](uint32_t s) {
    for (uint32_t i : mine[s]) {
      if (row[i] == kNew) row[i] = insert(mix(keys[i]), counts[i], step);
      read_vector(view().at(row[i]), layout_, vectors + static_cast<size_t>(i) * layout_.dim);
    }
  });
  if (training) {
    end_batch(count);
    next_version();
  }
}

std::vector<uint32_t> Table::rows_of(const Push& push, std::vector<uint64_t>& hashes) {
  std::unordered_set<uint64_t> gone;
  evictions_.each_since(push.version, [&](uint64_t hash) { gone.insert(hash); });
  std::vector<uint32_t> rows(push.count);
  hashes.resize(push.count);
  parallel(static_cast<uint32_t>((push.count + kPerTask - 1) / kPerTask), [&](uint32_t task) {
    const size_t last = std::min<size_t>(push.count, (task + 1) * kPerTask);
    for (size_t i = task * kPerTask; i < last; ++i) {
      hashes[i] = mix(push.keys[i]);
      const bool left = !evictions_.knows(push.version) || gone.contains(hashes[i]);
      const Entry entry = left ? Entry{} : find(hashes[i]);
      rows[i] = entry ? entry.row() : 0;
      if (!entry) dropped_gradients.fetch_add(1, std::memory_order_relaxed);
    }
  });
  return rows;
}

void Table::apply(const std::vector<Push>& pushes, const Rule& rule, uint64_t step) {
  std::vector<uint64_t> hashes;
  std::vector<uint32_t> rows;
  std::vector<float> sums;
  const float* gradients = nullptr;
  if (pushes.size() == 1) {
    rows = rows_of(pushes[0], hashes);
    gradients = pushes[0].gradients;
  } else {
    std::unordered_map<uint64_t, size_t> place;
    for (const Push& push : pushes) {
      std::vector<uint64_t> its_hashes;
      const std::vector<uint32_t> its_rows = rows_of(push, its_hashes);
      for (size_t i = 0; i < push.count; ++i) {
        if (its_rows[i] == 0) continue;
        const auto [at, is_new] = place.try_emplace(its_hashes[i], rows.size());
        if (is_new) {
          hashes.push_back(its_hashes[i]);
          rows.push_back(its_rows[i]);
          sums.resize(sums.size() + layout_.dim, 0.0f);
        }
        for (uint32_t c = 0; c < layout_.dim; ++c)
          sums[at->second * layout_.dim + c] += push.gradients[i * layout_.dim + c];
      }
    }
    gradients = sums.data();
  }
  for (const Push& push : pushes)
    if (is_late(push.version)) before_late_change(hashes.data(), rows.data(), rows.size(), push.version);
  parallel(static_cast<uint32_t>((rows.size() + kPerTask - 1) / kPerTask), [&](uint32_t task) {
    const size_t first = task * kPerTask, last = std::min(rows.size(), first + kPerTask);
    kernels().apply({view(), layout_, &rule, rows.data() + first, hashes.data() + first, gradients + first * layout_.dim,
                     static_cast<uint32_t>(last - first), step});
  });
  next_version();
}

}  // namespace karvan
