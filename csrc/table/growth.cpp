// How a table grows: its index moves to a larger array and its rows take fresh pages, a little in every batch.
//
// What growth adds to a batch is a fixed share of the batch's own work: so many moves for each key that it inserts or
// looks up. Tables of equal size, which would otherwise do the same thing in the same batch, differ by their phase.
#include <algorithm>
#include <atomic>

#include "table/table.h"
#include "threads/pool.h"

namespace karvan {
namespace {

// Loads of the index: growth starts at the soft one, less up to kSpread by the table's phase; a batch that would pass
// the hard one grows first. New arrays are a fifth larger, and a sixth more rows come in while entries move to them: a
// table that is being filled grows almost all the time, at an even pace.
constexpr double kSoftLoad = 0.72, kSpread = 0.04, kHardLoad = 0.85, kFreshLoad = 0.625;
// A batch's moves. One to a page that nothing has used costs more than others: the system has to clear the page.
constexpr uint64_t kMovesPerInsert = 10, kFreshMove = 4;
constexpr uint64_t kMovesPerKey = 1;  // so that growth ends even if nothing is inserted any more

}  // namespace

void Table::allocate(uint64_t rows_per_shard) {
  const auto wanted = static_cast<uint64_t>(static_cast<double>(rows_per_shard) / kFreshLoad / Bucket::kEntries) + 1;
  const auto homes = static_cast<uint32_t>(std::max<uint64_t>({wanted, homes_ + homes_ / 5 + 1, 2}));
  buckets_.grow(shard_bytes(homes) * shards());
  for (uint32_t s = 0; s < shards(); ++s) {
    if (homes_ == 0) shards_[s].index.attach(place_of(s, homes), homes);
    else shards_[s].index.rebase(place_of(s, homes_));
  }
  old_homes_ = homes_;
  unmoved_ = homes_ == 0 ? 0 : shards();
  homes_ = homes;
  moved_for_ = stats().inserted;
}

size_t Table::shard_bytes(uint32_t homes) { return (homes + ShardIndex::tail(homes)) * sizeof(Bucket); }

Bucket* Table::place_of(uint32_t shard, uint32_t homes) const {
  return reinterpret_cast<Bucket*>(buckets_.data() + shard * shard_bytes(homes));
}

uint64_t Table::bytes() const {
  size_t index = buckets_.size();
  if (unmoved_ > 0) {
    // What lies between the old arrays and the first shard that has begun to move is an address without memory.
    uint32_t first = 0;
    while (first < shards() && shards_[first].index.homes() != homes_) ++first;
    const size_t end_of_old = shards() * shard_bytes(old_homes_), begun = first * shard_bytes(homes_);
    index -= begun > end_of_old ? begun - end_of_old : 0;
  }
  return arena_->bytes() + index + filter_.bytes() + evictions_.bytes();
}

void Table::advance(uint64_t moves) {
  // What a shard moves to must not be in use: it may overlap its own old array, but none of another that moves as well
  // or has not moved yet. So, from the last shard down, all whose new arrays begin behind the last one's old array can
  // move at the same time.
  while (moves > 0 && unmoved_ > 0) {
    const size_t end_of_old = unmoved_ * shard_bytes(old_homes_);
    const auto clear = static_cast<uint32_t>((end_of_old + shard_bytes(homes_) - 1) / shard_bytes(homes_));
    const uint32_t count = std::clamp(unmoved_ - std::min(unmoved_, clear), 1u, parallel_width());
    const uint32_t first = unmoved_ - count;
    const uint64_t cost = unmoved_ * shard_bytes(homes_) > shards() * shard_bytes(old_homes_) ? kFreshMove : 1;
    const auto each = static_cast<uint32_t>(std::min<uint64_t>(moves / (count * cost) + 1, UINT32_MAX));
    std::atomic<uint64_t> done{0};
    parallel(count, [&](uint32_t i) {
      ShardIndex& index = shards_[first + i].index;
      if (index.homes() != homes_) index.start_growth(place_of(first + i, homes_), homes_);
      done.fetch_add(index.advance(each));
    });
    moved_ += done.load();
    moves -= std::min(moves, std::max<uint64_t>(1, done.load() * cost));
    while (unmoved_ > 0 && shards_[unmoved_ - 1].index.homes() == homes_ && !shards_[unmoved_ - 1].index.growing())
      --unmoved_;
  }
}

void Table::reserve(const std::vector<uint32_t>& new_keys_per_shard) {
  if (changes_) {
    uint64_t rows = taken_rows() + uint64_t{most_run()} * shards();
    for (uint32_t fresh : new_keys_per_shard) rows += fresh;
    changes_->make_room(static_cast<uint32_t>(std::min<uint64_t>(rows, UINT32_MAX)));
  }
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
  } else if (load > kSoftLoad - kSpread * phase_ && unmoved_ == 0) {
    allocate(0);
  }
}

void Table::end_batch(uint64_t keys) {
  arena_->touch_ahead(phase_);
  if (unmoved_ == 0) return;
  const uint64_t inserted = stats().inserted;
  advance(kMovesPerInsert * (inserted - moved_for_) + kMovesPerKey * keys);
  moved_for_ = inserted;
}

}  // namespace karvan
