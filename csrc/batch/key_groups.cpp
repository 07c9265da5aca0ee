#include "batch/key_groups.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <utility>

#include "hash/mix.h"
#include "threads/pool.h"

namespace karvan {
namespace {

constexpr uint64_t kPositionsPerBucket = 1024, kOneBucket = 4096, kPositionsPerTask = 8192, kSmallSlot = 8192;
constexpr int kMostBits = 12;

inline uint64_t hash_of(const KeySource& source, size_t i) {
  return source.hashed ? source.keys[i] : mix(source.keys[i]);
}

inline uint32_t top(uint64_t hash, int bits) { return bits ? static_cast<uint32_t>(hash >> (64 - bits)) : 0; }

}  // namespace

KeyGroups::KeyGroups(uint32_t slot_count, std::vector<KeySource> sources, uint64_t positions_end)
    : slots(slot_count), unique_of(positions_end), sources_(std::move(sources)) {
  uint64_t total = 0;
  for (size_t i = 0; i < sources_.size();) {
    Slot& slot = slots[sources_[i].slot];
    const size_t first = i;
    for (; i < sources_.size() && sources_[i].slot == sources_[first].slot; ++i) slot.positions += sources_[i].count;
    slot.sources = std::span(sources_).subspan(first, i - first);
    total += slot.positions;
  }
  if (total >= UINT32_MAX / 2) throw std::length_error("a batch holds at most 2^31 ids");
  uint64_t at = 0;
  for (uint32_t s = 0; s < slot_count; ++s) {
    Slot& slot = slots[s];
    slot.bits = slot.positions <= kOneBucket
                    ? 0
                    : std::min<int>(kMostBits, std::bit_width(slot.positions / kPositionsPerBucket));
    slot.small = slot.positions <= kSmallSlot;
    slot.first_bucket = static_cast<uint32_t>(slot_of.size());
    slot.buckets = 1u << slot.bits;
    slot_of.insert(slot_of.end(), slot.buckets, s);
    begin.insert(begin.end(), slot.buckets, static_cast<uint32_t>(at));
    at += slot.positions;
  }
  begin.push_back(static_cast<uint32_t>(at));
  unique.assign(slot_of.size(), 0);
  hash = Array<uint64_t>(total);
  count = Array<uint32_t>(total);
  position = Array<uint32_t>(total);
  unique_at = Array<uint32_t>(total);
}

void KeyGroups::group_all() {
  group_large();
  parallel(static_cast<uint32_t>(slots.size()), [&](uint32_t s) {
    if (slots[s].small) group_small(s);
  });
}

void KeyGroups::group_large() {
  for (const Slot& slot : slots)
    if (!slot.small) group(slot, false);
}

void KeyGroups::group_small(uint32_t slot) { group(slots[slot], true); }

void KeyGroups::group(const Slot& slot, bool alone) {
  partition(slot, alone);
  parallel(slot.buckets, [&](uint32_t b) { dedupe(slot.first_bucket + b); });
  spread(slot);
}

void KeyGroups::partition(const Slot& slot, bool alone) {
  struct Task {
    const KeySource* source;
    size_t first, last;
    std::vector<uint32_t> place;  // by bucket: how many of its keys, then where the next one goes
  };
  const size_t per_task = alone ? SIZE_MAX / 2 : kPositionsPerTask;
  const int bits = slot.bits;
  std::vector<Task> tasks;
  for (const KeySource& source : slot.sources)
    for (size_t first = 0; first < source.count; first += per_task)
      tasks.push_back({&source, first, std::min(source.count, first + per_task), std::vector<uint32_t>(slot.buckets)});
  parallel(static_cast<uint32_t>(tasks.size()), [&](uint32_t t) {
    Task& task = tasks[t];
    if (slot.buckets == 1) task.place[0] = static_cast<uint32_t>(task.last - task.first);
    else for (size_t i = task.first; i < task.last; ++i) ++task.place[top(hash_of(*task.source, i), bits)];
  });
  // Counts to positions: bucket by bucket, and inside a bucket task by task, which keeps positions in order.
  uint32_t at = begin[slot.first_bucket];
  for (uint32_t b = 0; b < slot.buckets; ++b) {
    // The first is known already, and another thread may be reading it as the end of the slot before.
    if (b > 0) begin[slot.first_bucket + b] = at;
    for (Task& task : tasks) at += std::exchange(task.place[b], at);
  }
  parallel(static_cast<uint32_t>(tasks.size()), [&](uint32_t t) {
    Task& task = tasks[t];
    uint64_t* const hashes = hash.data();
    uint32_t *const to_position = position.data(), *const place_of = unique_of.data() + task.source->base;
    uint32_t* const place = task.place.data();
    const auto base = static_cast<uint32_t>(task.source->base);
    const uint32_t* const label = task.source->label;
    for (size_t i = task.first; i < task.last; ++i) {
      const uint64_t h = hash_of(*task.source, i);
      const uint32_t to = place[top(h, bits)]++;
      hashes[to] = h;
      to_position[to] = label ? label[i] : base + static_cast<uint32_t>(i);
      place_of[i] = to;  // until spread() puts the key's number there
    }
  });
}

void KeyGroups::dedupe(uint32_t bucket) {
  const uint32_t first = begin[bucket], size = begin[bucket + 1] - first;
  if (size == 0) return;
  // A small open-addressed map from hash to its number in this bucket, plus one. Whether a key is new is a coin toss to
  // the branch predictor, so nothing branches on it: new or not, the same stores are made.
  thread_local std::vector<uint32_t> map_memory;
  const uint32_t map_size = std::bit_ceil(2 * size), mask = map_size - 1;
  map_memory.assign(map_size, 0);
  uint32_t* const map = map_memory.data();
  uint64_t* const hashes = hash.data() + first;  // compacted in place: a key's place never lies after its first position
  uint32_t* const counts = count.data() + first;
  uint32_t* const numbers = unique_at.data() + first;
  const uint32_t offset = first - static_cast<uint32_t>(first_index(slot_of[bucket]));
  uint32_t uniques = 0;
  for (uint32_t i = 0; i < size; ++i) {
    const uint64_t h = hashes[i];
    uint32_t at = static_cast<uint32_t>(h) & mask;
    while (map[at] != 0 && hashes[map[at] - 1] != h) at = (at + 1) & mask;
    const uint32_t found = map[at], is_new = found == 0;
    const uint32_t number = is_new ? uniques : found - 1;
    const uint32_t before = counts[number] & (is_new - 1);
    hashes[number] = h;
    map[at] = number + 1;
    counts[number] = before + 1;
    numbers[i] = offset + number;
    uniques += is_new;
  }
  unique[bucket] = uniques;
}

// The way back from buckets to positions, in the order of positions: threads write to places of their own.
void KeyGroups::spread(const Slot& slot) {
  for (const KeySource& source : slot.sources) {
    parallel(static_cast<uint32_t>((source.count + kPositionsPerTask - 1) / kPositionsPerTask), [&](uint32_t task) {
      const size_t last = std::min(source.count, (task + 1) * kPositionsPerTask);
      uint32_t* const of = unique_of.data() + source.base;
      const uint32_t* const at = unique_at.data();
      for (size_t i = task * kPositionsPerTask; i < last; ++i) of[i] = at[of[i]];
    });
  }
}

uint64_t KeyGroups::unique_in(uint32_t slot) const {
  uint64_t total = 0;
  const Slot& s = slots[slot];
  for (uint32_t b = s.first_bucket; b < s.first_bucket + s.buckets; ++b) total += unique[b];
  return total;
}

}  // namespace karvan
