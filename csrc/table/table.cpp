#include "table/table.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>

#include "table/row_io.h"
#include "threads/pool.h"

namespace karvan {
namespace {

// Loads of the index: growth starts at the soft one and goes on after each batch; a batch that would pass the hard one
// grows first. New arrays are a fifth larger, so a row's share of the index is 28 to 36 bytes. Tables of the same size,
// which would otherwise all grow in the same batch, differ by up to kSpread in their soft load.
constexpr double kSoftLoad = 0.75, kSpread = 0.04, kHardLoad = 0.85, kFreshLoad = 0.625;
// Entries moved after a batch: enough for each insertion that growth ends well before the hard load, and some more, so
// that it ends soon even if nothing is inserted any more. A few shards at a time: every fresh page is cleared by the
// system when it is first touched, and a batch shall touch few of them.
constexpr uint64_t kMovesPerInsert = 12, kBatchesToMove = 32, kLeastMoves = 4096, kMostMoves = 131072;
constexpr uint32_t kShardsTogether = 4;
constexpr size_t kRunBytes = size_t{64} << 10;
constexpr size_t kReleasedPerBatch = size_t{32} << 20;  // giving back gigabytes takes the system a while

TableConfig checked(TableConfig config) {
  if (!std::has_single_bit(config.shards) || config.shards > 256)
    throw std::invalid_argument("shards must be a power of two up to 256, got " + std::to_string(config.shards));
  if (config.dim == 0) throw std::invalid_argument("dim must be at least 1, got 0");
  if (config.evict.every == 0) throw std::invalid_argument("a policy must look every 1 or more steps, got 0");
  return config;
}

}  // namespace

Table::Table(TableConfig config)
    : config_(checked(std::move(config))),
      layout_{config_.type, config_.dim, 0},
      stream_(table_stream(config_.seed, config_.name)),
      shard_bits_(std::countr_zero(config_.shards)),
      soft_load_(kSoftLoad - kSpread * 0x1p-64 * static_cast<double>(mix(stream_))),
      arena_(std::make_unique<RowArena>(layout_.stride())),
      shards_(config_.shards) {
  if (config_.admit.kind == Admission::Kind::min_count) filter_ = CountingFilter(config_.admit.slots);
  for (Shard& shard : shards_) shard.index.set_shift(shard_bits_);
  allocate(1);
}

uint64_t Table::rows() const {
  uint64_t total = 0;
  for (const Shard& shard : shards_) total += shard.rows;
  return total;
}

uint64_t Table::bytes() const {
  return arena_->bytes() + buckets_.size() + old_buckets_.size() + filter_.bytes() + evictions_.bytes();
}

TableStats Table::stats() const {
  TableStats s;
  s.rows = rows();
  s.bytes = bytes();
  for (const Shard& shard : shards_) s.inserted += shard.inserted;
  s.evicted = evicted_;
  s.rejected = rejected.load();
  s.dropped_gradients = dropped_gradients.load();
  s.skipped_updates = skipped_updates.load();
  return s;
}

bool Table::admit(uint64_t hash, uint32_t times) {
  const Admission& rule = config_.admit;
  switch (rule.kind) {
    case Admission::Kind::always: return true;
    case Admission::Kind::read_only: return false;
    case Admission::Kind::probability:
      // The hash alone would tie the choice to the shard, so it is mixed with the table's stream once more.
      return static_cast<double>(mix(hash ^ stream_) >> 11) * 0x1p-53 < rule.probability;
    case Admission::Kind::min_count: return filter_.add(hash, times) >= rule.min_count;
  }
  return true;
}

uint32_t Table::take_row(Shard& shard) {
  if (!shard.free.empty()) {
    const uint32_t row = shard.free.back();
    shard.free.pop_back();
    return row;
  }
  if (shard.block == shard.block_end) {
    // Runs keep the rows of a shard together, which means fewer pages to translate while its keys are worked on. Shards
    // fill at the same pace and take their next runs in the same batch, so long ones would make it slow.
    const uint64_t most = kRunBytes / layout_.stride() + 1;
    const auto size = static_cast<uint32_t>(std::clamp<uint64_t>(shard.rows / 64, 1, most));
    shard.block = arena_->take(size);
    shard.block_end = shard.block + size;
  }
  return shard.block++;
}

void Table::write_row(char* row, const float* vector, const float* state) {
  write_vector(row, layout_, vector);
  if (layout_.state) std::memcpy(row + layout_.vector_bytes(), state, 4 * layout_.state);
}

uint32_t Table::insert(uint64_t hash, uint32_t times, uint32_t step) {
  Shard& shard = shards_[shard_of(hash)];
  const uint32_t row = take_row(shard);
  char* place = arena_->view().at(row);
  if (layout_.type == VectorType::f32) {
    initialise(config_.init, stream_, hash, reinterpret_cast<float*>(place), static_cast<int>(layout_.dim));
    if (layout_.state) std::memcpy(place + layout_.vector_bytes(), initial_state_.data(), 4 * layout_.state);
  } else {
    thread_local std::vector<float> vector;
    vector.resize(layout_.dim);
    initialise(config_.init, stream_, hash, vector.data(), static_cast<int>(layout_.dim));
    write_row(place, vector.data(), initial_state_.data());
  }
  shard.index.insert(hash, row, times, step);
  ++shard.rows;
  ++shard.inserted;
  return row;
}

void Table::allocate(uint64_t rows_per_shard) {
  const auto wanted = static_cast<uint64_t>(static_cast<double>(rows_per_shard) / kFreshLoad / Bucket::kEntries) + 1;
  homes_ = static_cast<uint32_t>(std::max<uint64_t>({wanted, homes_ + homes_ / 5 + 1, 2}));
  old_buckets_ = std::move(buckets_);
  buckets_ = Pages((homes_ + ShardIndex::tail(homes_)) * shards_.size() * sizeof(Bucket));
  moving_ = 0;
  settled_rows_ = stats().inserted;
  if (old_buckets_.data()) return;
  for (size_t s = 0; s < shards_.size(); ++s) shards_[s].index.attach(place_of(s), homes_);
}

Bucket* Table::place_of(size_t shard) const {
  return reinterpret_cast<Bucket*>(buckets_.data()) + shard * (homes_ + ShardIndex::tail(homes_));
}

uint32_t Table::move(Shard& shard, uint32_t entries) {
  if (shard.index.homes() != homes_) shard.index.start_growth(place_of(&shard - shards_.data()), homes_);
  return shard.index.advance(entries);
}

void Table::settle() {
  if (!old_buckets_.data()) return;
  parallel(shards(), [&](uint32_t s) { move(shards_[s], UINT32_MAX); });
  old_buckets_ = Pages();
}

void Table::reserve(const std::vector<uint32_t>& new_keys_per_shard) {
  uint64_t fullest = 0;
  double load = 0;
  const auto look = [&] {
    fullest = 0;
    load = 0;
    for (size_t s = 0; s < shards_.size(); ++s) {
      const uint64_t rows = shards_[s].rows + new_keys_per_shard[s];
      fullest = std::max(fullest, rows);
      load = std::max(load, static_cast<double>(rows) / static_cast<double>(shards_[s].index.capacity()));
    }
  };
  look();
  if (load > kHardLoad) {
    settle();
    look();
  }
  if (load > kHardLoad) {
    allocate(fullest);
    settle();
  } else if (load > soft_load_ && !old_buckets_.data()) {
    allocate(0);
  }
}

void Table::end_batch() {
  if (!old_buckets_.data()) return;
  if (moving_ == shards()) {
    old_buckets_.shrink(kReleasedPerBatch);
    return;
  }
  const uint64_t inserted = stats().inserted;
  int64_t moves = static_cast<int64_t>(std::clamp(rows() / kBatchesToMove, kLeastMoves, kMostMoves) +
                                       kMovesPerInsert * (inserted - settled_rows_));
  settled_rows_ = inserted;
  while (moves > 0 && moving_ < shards()) {
    const uint32_t together = std::min(kShardsTogether, shards() - moving_);
    const auto each = static_cast<uint32_t>(std::min<int64_t>(moves / together + 1, UINT32_MAX / 2));
    std::atomic<uint64_t> done{0};
    parallel(together, [&](uint32_t i) { done.fetch_add(move(shards_[moving_ + i], each)); });
    moves -= std::max<int64_t>(1, static_cast<int64_t>(done.load()));
    while (moving_ < shards() && moved(shards_[moving_])) ++moving_;
  }
}

void Table::set_state(const std::vector<float>& initial, bool fresh) {
  if (initial.size() == layout_.state && !fresh) {
    initial_state_ = initial;
    return;
  }
  const RowLayout before = layout_;
  std::unique_ptr<RowArena> old = std::move(arena_);
  layout_.state = static_cast<uint32_t>(initial.size());
  initial_state_ = initial;
  arena_ = std::make_unique<RowArena>(layout_.stride());
  ++row_epoch_;
  parallel(shards(), [&](uint32_t s) {
    Shard& shard = shards_[s];
    shard.free.clear();
    shard.block = shard.block_end = 0;
    shard.index.each([&](Entry entry) {
      const uint32_t row = take_row(shard);
      char* place = arena_->view().at(row);
      std::memcpy(place, old->view().at(entry.row()), before.vector_bytes());
      std::copy(initial_state_.begin(), initial_state_.end(), reinterpret_cast<float*>(place + layout_.vector_bytes()));
      entry.bucket->row[entry.slot] = row;
    });
  });
}

void Table::clear() {
  std::vector<uint64_t> hashes;
  for (const Shard& shard : shards_) shard.index.each([&](Entry entry) { hashes.push_back(entry.hash()); });
  evicted_ += hashes.size();
  evictions_.add(next_version(), std::move(hashes), SIZE_MAX);
  ++row_epoch_;
  buckets_ = Pages();
  old_buckets_ = Pages();
  homes_ = 0;
  arena_ = std::make_unique<RowArena>(layout_.stride());
  if (filter_.bytes()) filter_ = CountingFilter(config_.admit.slots);
  for (Shard& shard : shards_) {
    const uint64_t inserted = shard.inserted;
    shard = Shard();
    shard.inserted = inserted;
    shard.index.set_shift(shard_bits_);
  }
  allocate(1);
}

}  // namespace karvan
