#include "table/index.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

namespace karvan {
namespace {

constexpr uint32_t kTogether = 64;  // buckets moved at a time

Entry append(Bucket* b, const Bucket* end, uint64_t hash, uint32_t row, uint32_t count, uint32_t last) {
  while (b->fill == Bucket::kEntries) ++b;
  if (b + 1 == end) throw std::runtime_error("a shard's index overflowed its tail");
  const uint32_t slot = b->fill++;
  b->hash[slot] = hash;
  b->row[slot] = row;
  b->count[slot] = count;
  b->last[slot] = last;
  return {b, slot};
}

void move_entry(Bucket* to, uint32_t to_slot, const Bucket* from, uint32_t from_slot) {
  to->hash[to_slot] = from->hash[from_slot];
  to->row[to_slot] = from->row[from_slot];
  to->count[to_slot] = from->count[from_slot];
  to->last[to_slot] = from->last[from_slot];
}

}  // namespace

void ShardIndex::attach(Bucket* buckets, uint32_t homes) {
  now_ = buckets;
  homes_ = homes;
  old_ = nullptr;
}

void ShardIndex::start_growth(Bucket* buckets, uint32_t homes) {
  old_ = now_;
  old_homes_ = homes_;
  sweep_ = old_homes_ + tail(old_homes_);
  now_ = buckets;
  homes_ = homes;
}

uint32_t ShardIndex::advance(uint32_t entries) {
  thread_local std::vector<Bucket> held;
  const Bucket* const end = now_ + homes_ + tail(homes_);
  uint32_t moved = 0;
  while (old_ && moved < std::max(entries, 1u)) {
    // Down to a bucket behind one that is not full: all entries from there on have their homes there as well, so none
    // moves to a place before it, and no search that starts before it has to continue after it.
    const uint32_t last = sweep_;
    do moved += old_[--sweep_].fill;
    while (sweep_ > 0 && (old_[sweep_ - 1].fill == Bucket::kEntries || (moved < entries && last - sweep_ < kTogether)));
    held.assign(old_ + sweep_, old_ + last);
    for (Bucket* b = old_ + sweep_; b < old_ + last; ++b) b->fill = 0;
    for (const Bucket& from : held) {
      for (uint32_t slot = 0; slot < from.fill; ++slot) {
        append(now_ + scale(from.hash[slot] << shift_, homes_), end, from.hash[slot], from.row[slot], from.count[slot],
               from.last[slot]);
      }
    }
    if (sweep_ == 0) old_ = nullptr;
  }
  return moved;
}

Entry ShardIndex::insert(uint64_t hash, uint32_t row, uint32_t count, uint32_t last) {
  Bucket* b = first_bucket(hash);
  if (old_ && b < old_ + sweep_ && b >= old_) {
    while (b < old_ + sweep_ && b->fill == Bucket::kEntries) ++b;
    if (b < old_ + sweep_) return append(b, b + 2, hash, row, count, last);
    advance(1);  // it has no place before the homes that have moved: its own moves now
    b = first_bucket(hash);
  }
  return append(b, now_ + homes_ + tail(homes_), hash, row, count, last);
}

void ShardIndex::erase(Entry entry) {
  Bucket* b = entry.bucket;
  uint32_t slot = entry.slot;
  for (;;) {
    const bool was_full = b->fill == Bucket::kEntries;
    const uint32_t last = --b->fill;
    if (slot != last) move_entry(b, slot, b, last);
    if (!was_full) return;
    // The gap may have cut off entries that were pushed past this bucket: pull the first such one back.
    const auto here = static_cast<uint32_t>(b - now_);
    Bucket* from = nullptr;
    uint32_t from_slot = 0;
    for (Bucket* c = b + 1; !from; ++c) {
      for (uint32_t i = 0; i < c->fill && !from; ++i) {
        if (scale(c->hash[i] << shift_, homes_) <= here) {
          from = c;
          from_slot = i;
        }
      }
      if (!from && c->fill < Bucket::kEntries) return;
    }
    move_entry(b, b->fill++, from, from_slot);
    b = from;
    slot = from_slot;
  }
}

}  // namespace karvan
