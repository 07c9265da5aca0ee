// Distinct keys of one table: lookups and updates for callers that are not in this process.
#include <unordered_set>

#include "kernels/kernels.h"
#include "table/row_io.h"
#include "table/table.h"
#include "threads/pool.h"

namespace karvan {

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
        entry.count() = entry.count() > UINT32_MAX - counts[i] ? UINT32_MAX : entry.count() + counts[i];
        entry.last() = step;
      } else if (admit(hash, counts[i])) {
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
    end_batch();
    next_version();
  }
}

void Table::apply(const uint64_t* keys, size_t count, const float* gradients, uint64_t version, const Rule& rule,
                  uint64_t step) {
  std::unordered_set<uint64_t> gone;
  evictions_.each_since(version, [&](uint64_t hash) { gone.insert(hash); });
  constexpr size_t kPerTask = 512;
  std::vector<uint64_t> hash(count);
  std::vector<uint32_t> row(count);
  parallel(static_cast<uint32_t>((count + kPerTask - 1) / kPerTask), [&](uint32_t task) {
    const size_t first = task * kPerTask, last = std::min(count, first + kPerTask);
    for (size_t i = first; i < last; ++i) {
      hash[i] = mix(keys[i]);
      const Entry entry = gone.contains(hash[i]) ? Entry{} : find(hash[i]);
      row[i] = entry ? entry.row() : 0;
      if (!entry) dropped_gradients.fetch_add(1, std::memory_order_relaxed);
    }
    kernels().apply({view(), layout_, &rule, row.data() + first, hash.data() + first, gradients + first * layout_.dim,
                     static_cast<uint32_t>(last - first), step});
  });
  next_version();
}

}  // namespace karvan
