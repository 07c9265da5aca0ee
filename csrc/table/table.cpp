#include "table/table.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>

#include "table/row_io.h"
#include "threads/pool.h"

namespace karvan {
namespace {

constexpr size_t kRunBytes = size_t{64} << 10;

TableConfig checked(TableConfig config) {
  if (!std::has_single_bit(config.shards) || config.shards > 256)
    throw std::invalid_argument("shards must be a power of two up to 256, got " + std::to_string(config.shards));
  if (config.dim == 0) throw std::invalid_argument("dim must be at least 1, got 0");
  if (config.evict.every == 0) throw std::invalid_argument("a policy must be checked every 1 or more steps, got 0");
  return config;
}

// Whether a random number falls into a share of all of them.
bool chosen(uint64_t drawn, double share) { return static_cast<double>(drawn >> 11) * 0x1p-53 < share; }

}  // namespace

Table::Table(TableConfig config)
    : config_(checked(std::move(config))),
      layout_{config_.type, config_.dim, 0},
      stream_(table_stream(config_.seed, config_.name)),
      shard_bits_(std::countr_zero(config_.shards)),
      phase_(0x1p-64 * static_cast<double>(mix(stream_))),
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

TableStats Table::stats() const {
  TableStats s;
  s.rows = rows();
  s.bytes = bytes();
  for (const Shard& shard : shards_) s.inserted += shard.inserted;
  s.evicted = evicted_;
  s.moved = moved_;
  s.rejected = rejected.load();
  s.dropped_gradients = dropped_gradients.load();
  s.skipped_updates = skipped_updates.load();
  return s;
}

bool Table::admit(uint64_t hash, uint32_t times, uint32_t step) {
  return would_admit(hash, counts_before_admission() ? filter_.add(hash, times) : 0, step);
}

bool Table::would_admit(uint64_t hash, uint32_t uses, uint32_t step) const {
  const Admission& rule = config_.admit;
  switch (rule.kind) {
    case Admission::Kind::always: return true;
    case Admission::Kind::read_only: return false;
    case Admission::Kind::probability:
      // The hash alone would tie the choice to the shard, so it is mixed with the table's stream once more.
      return chosen(mix(hash ^ stream_), rule.probability);
    case Admission::Kind::probability_each:
      // Another stream than that of the initial vectors: else its draws for the first steps were their first columns.
      return chosen(draw(mix(hash ^ mix(stream_)), step), rule.probability);
    case Admission::Kind::min_count: return uses >= rule.min_count;
  }
  return true;
}

void Table::set_use(uint64_t hash, uint32_t count, uint32_t last) {
  const Entry entry = find(hash);
  if (!entry) return;
  if (capture_) capture_->before_change(entry);
  const uint32_t row = entry.row();
  note_changes(&row, 1);
  entry.count() = count;
  entry.last() = last;
}

uint32_t Table::most_run() const { return static_cast<uint32_t>(kRunBytes / layout_.stride() + 1); }

uint32_t Table::take_row(Shard& shard) {
  if (!shard.free.empty()) {
    const uint32_t row = shard.free.back();
    shard.free.pop_back();
    return row;
  }
  if (shard.block == shard.block_end) {
    // Runs keep the rows of a shard together, which means fewer pages to translate while its keys are worked on. Their
    // sizes vary, because shards fill at the same pace and would all take their next runs, and pages, in the same batch.
    const uint64_t most = std::clamp<uint64_t>(shard.rows / 64, 1, most_run());
    const auto size = static_cast<uint32_t>(most - mix(shard.rows) % (most / 2 + 1));
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
  if (capture_) [[unlikely]] capture_->is_new(row);
  note_changes(&row, 1);
  shard.index.insert(hash, row, times, step);
  ++shard.rows;
  ++shard.inserted;
  return row;
}

void Table::set_state(const std::vector<float>& initial, bool fresh) {
  if (initial.size() == layout_.state && !fresh) {
    initial_state_ = initial;
    return;
  }
  if (capture_) capture_->keep_all();
  changes_.reset();  // rows get other numbers: the next capture is a full one
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
  if (capture_) capture_->keep_all();
  std::vector<uint64_t> hashes;
  for (const Shard& shard : shards_) shard.index.each([&](Entry entry) { hashes.push_back(entry.hash()); });
  evicted_ += hashes.size();
  evictions_.add(next_version(), std::move(hashes), SIZE_MAX);
  ++row_epoch_;
  ++cleared_;
  buckets_ = Pages();
  homes_ = 0;
  arena_ = std::make_unique<RowArena>(layout_.stride());
  if (changes_) {  // all keys are in the log of removed ones
    changes_ = std::make_unique<RowBits>();
    changes_->make_room(taken_rows());
  }
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
