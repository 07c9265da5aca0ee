// A table: 64-bit keys -> rows [vector | optimizer state], each with a count of uses and the step of its last use.
//
// Keys are split by the top bits of their hash into shards; in a batch operation one thread works on a shard at a time,
// so nothing is locked. All methods except the per-shard ones are for the thread that runs the operation.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "hash/mix.h"
#include "memory/arena.h"
#include "memory/buffer.h"
#include "table/admission_filter.h"
#include "table/capture.h"
#include "table/eviction_log.h"
#include "table/index.h"
#include "table/layout.h"

namespace karvan {

struct Rule;

struct TableStats {
  uint64_t rows = 0, bytes = 0, inserted = 0, evicted = 0, rejected = 0, dropped_gradients = 0, skipped_updates = 0;
  uint64_t moved = 0;  // entries, in all growth of the index
};

// Rows in order of their hash, one array for each part of them.
struct RowSet {
  RowSet(size_t count, const RowLayout& layout);
  void make_room(size_t count, const RowLayout& layout);  // for so many; those that are there stay
  void put(size_t at, uint64_t hash, uint32_t uses, uint32_t last, const char* row, const RowLayout& layout);
  size_t rows = 0;
  Array<uint64_t> keys;
  Array<float> vectors, state;
  Array<uint32_t> counts, last_steps;
};

class Table {
 public:
  explicit Table(TableConfig config);

  const TableConfig& config() const { return config_; }
  const RowLayout& layout() const { return layout_; }
  RowsView view() const { return arena_->view(); }
  uint64_t rows() const;
  uint64_t bytes() const;
  uint64_t version() const { return version_; }
  uint64_t row_epoch() const { return row_epoch_; }
  TableStats stats() const;

  // The optimizer's part of a row: its size and a new row's values. Existing rows keep their vectors; their state
  // is reset when its size changes or when `fresh`.
  void set_state(const std::vector<float>& initial, bool fresh = false);

  // For the owner of a shard, from inside parallel().
  uint32_t shards() const { return config_.shards; }
  int shard_bits() const { return shard_bits_; }
  uint32_t shard_of(uint64_t hash) const {
    return shard_bits_ ? static_cast<uint32_t>(hash >> (64 - shard_bits_)) : 0;
  }
  __attribute__((always_inline)) void prefetch(uint64_t hash) const { shards_[shard_of(hash)].index.prefetch(hash); }
  __attribute__((always_inline)) Bucket* first_bucket(uint64_t hash) const {
    return shards_[shard_of(hash)].index.first_bucket(hash);
  }
  Entry find(uint64_t hash) const { return shards_[shard_of(hash)].index.find(hash); }
  bool admit(uint64_t hash, uint32_t times, uint32_t step);               // may a key without a row have one now?
  uint32_t insert(uint64_t hash, uint32_t times, uint32_t step);          // a new, initialised row; returns its number

  // For LookupLog: the admission filter's count of a key; whether a key would be admitted at a step, after so many uses; counters
  // of the filter, or of a copy of them, with more or fewer uses; the uses of a key that has a row.
  bool counts_before_admission() const { return config_.admit.kind == Admission::Kind::min_count; }
  uint32_t filter_count(uint64_t hash) const { return filter_.count(hash); }
  bool would_admit(uint64_t hash, uint32_t uses, uint32_t step) const;
  void change_filter(uint8_t* counters, uint64_t hash, int64_t times) const {
    filter_.change(counters ? counters : reinterpret_cast<uint8_t*>(filter_.data()), hash, times);
  }
  void set_use(uint64_t hash, uint32_t count, uint32_t last);
  uint64_t cleared() const { return cleared_.load(); }  // how often all rows were removed; from any thread

  // Distinct keys in, vectors out, gradients back: what a store behind a wire does. Gradients of several lookups are
  // summed by key, without those of rows that were removed since their lookup.
  struct Push {
    const uint64_t* keys;
    size_t count;
    const float* gradients;
    uint64_t version;  // of the table, at the lookup
  };
  void lookup(const uint64_t* keys, const uint32_t* counts, size_t count, bool training, uint32_t step, float* vectors);
  void apply(const std::vector<Push>& pushes, const Rule& rule, uint64_t step);

  // Around the insertions of a batch: room for so many new keys in each shard, then the end of a batch of so many keys.
  void reserve(const std::vector<uint32_t>& new_keys_per_shard);
  void end_batch(uint64_t keys);
  uint64_t next_version() { return ++version_; }

  // Removing rows. `now` is wall-clock time in seconds.
  uint64_t maintain(uint64_t step, double now);  // what the policy asks for at this step
  uint64_t evict(uint64_t step, double now);     // applies the policy now
  uint64_t erase_keys(const uint64_t* keys, size_t count);
  // If tables have more rows than this together: removes those used least recently, whatever their table.
  static uint64_t shrink(const std::vector<Table*>& tables, uint64_t capacity);
  void clear();
  const EvictionLog& evictions() const { return evictions_; }

  // Rows whose hash lies in part `part` of `parts` equal ranges.
  RowSet snapshot(uint32_t part = 0, uint32_t parts = 1);
  // Inserts or overwrites; keys are distinct. `state` may be null: fresh optimizer state.
  void load(const uint64_t* keys, size_t count, const float* vectors, const float* state, const uint32_t* counts,
            const uint32_t* last_steps);
  CountingFilter& filter() { return filter_; }
  std::vector<std::pair<uint64_t, double>>& clock() { return clock_; }  // for TTL: (step, time) now and then

  // All rows as they are now, or those that changed since `since`, the version of the previous capture; see Capture. With
  // `track`, changes from now on are recorded for the next one. One capture at a time.
  static std::unique_ptr<Capture> capture(const std::shared_ptr<Table>& table, uint32_t parts, bool track,
                                          std::optional<uint64_t> since, std::vector<Correction> corrections = {});
  // Before the rows of these keys, found for training, change. For the owner of their shards.
  __attribute__((always_inline)) void before_use(const uint64_t* hashes, size_t count) {
    if (capture_) [[unlikely]] keep_before_use(hashes, count);
  }
  // Rows that are used in training, in order to be changed.
  __attribute__((always_inline)) void note_changes(const uint32_t* rows, size_t count) {
    if (changes_) [[unlikely]]
      for (size_t i = 0; i < count; ++i) changes_->add(rows[i]);
  }
  // Whether a lookup at `version` was before the capture, or before changes were noted; its gradients are then a change
  // that the lookup did not announce. For one thread alone.
  bool is_late(uint64_t version) const {
    return (capture_ && version <= capture_->version()) || (changes_ && version <= changes_since_);
  }
  void before_late_change(const uint64_t* hashes, const uint32_t* rows, size_t count, uint64_t version);
  void set_capture(Capture* capture) { capture_ = capture; }
  uint32_t taken_rows() const { return arena_->taken(); }
  template <class F>
  void each_entry(F&& f) const {
    for (const Shard& shard : shards_) shard.index.each(f);
  }
  template <class F>
  void each_between(uint64_t from, uint64_t to, F&& f) const {  // keys with from <= hash <= to, in no order
    for (uint32_t s = shard_of(from); s <= shard_of(to); ++s) {
      const uint64_t first = shard_bits_ ? static_cast<uint64_t>(s) << (64 - shard_bits_) : 0;
      const uint64_t last = first + (UINT64_MAX >> shard_bits_);
      shards_[s].index.each_between(std::max(from, first), std::min(to, last), f);
    }
  }

  std::atomic<uint64_t> rejected{0}, dropped_gradients{0}, skipped_updates{0};

 private:
  struct alignas(64) Shard {
    ShardIndex index;
    uint64_t rows = 0, inserted = 0;
    uint32_t block = 0, block_end = 0;  // fresh rows taken from the arena but not used yet
    std::vector<uint32_t> free;
  };

  void allocate(uint64_t rows_per_shard);  // larger arrays; entries are then moved shard by shard
  static size_t shard_bytes(uint32_t homes);
  Bucket* place_of(uint32_t shard, uint32_t homes) const;  // its array when each has so many homes
  void advance(uint64_t moves);            // growth, by about that many entries
  void settle() { advance(UINT64_MAX); }   // finishes growth
  std::vector<std::vector<uint32_t>> by_shard(const uint64_t* keys, size_t count) const;  // places in keys
  uint32_t take_row(Shard& shard);
  uint32_t most_run() const;               // rows that a shard takes at once, at most
  void write_row(char* row, const float* vector, const float* state);
  template <class F>
  uint64_t erase_where(F&& doomed);        // doomed(Entry) -> bool
  std::vector<uint32_t> rows_of(const Push& push, std::vector<uint64_t>& hashes);  // 0: removed since the lookup
  uint64_t evict_expired(double time);
  double advance_time(double now);         // the table's own time, which never runs backwards
  static uint64_t evict_least(const std::vector<Table*>& tables, uint64_t count, bool by_use_count);
  uint64_t note_evicted(std::vector<uint64_t> hashes);  // returns how many
  void keep_before_use(const uint64_t* hashes, size_t count);

  TableConfig config_;
  RowLayout layout_;
  std::vector<float> initial_state_;
  uint64_t stream_;
  int shard_bits_;
  double phase_;  // 0 to 1, by the table's name
  std::unique_ptr<RowArena> arena_;
  std::vector<Shard> shards_;
  Pages buckets_;
  uint32_t homes_ = 0;  // of each shard
  // While growing: homes before it; shards that have not moved, which are all before the others; inserted rows whose
  // share of moves has been made. And entries moved in all growth.
  uint32_t old_homes_ = 0, unmoved_ = 0;
  uint64_t moved_for_ = 0, moved_ = 0;
  CountingFilter filter_;
  EvictionLog evictions_;
  std::vector<std::pair<uint64_t, double>> clock_;  // (step, time) now and then: turns a TTL into a step
  double time_ = -std::numeric_limits<double>::infinity();  // the table's own, and what the clock showed then
  double shown_ = std::numeric_limits<double>::infinity();
  uint64_t version_ = 0, row_epoch_ = 0, evicted_ = 0;
  std::atomic<uint64_t> cleared_{0};
  Capture* capture_ = nullptr;            // the one that is being read
  std::unique_ptr<RowBits> changes_;      // rows used since changes_since_; null: not tracked
  uint64_t changes_since_ = 0;
};

}  // namespace karvan
