// One shard's index: hash -> row number, count of uses, step of the last use.
//
// Open addressing over buckets of one cache line with three entries each. A key's home is its hash scaled to the number
// of buckets, so homes grow with hashes; an entry lies in its home or in the next bucket that was not full. No bucket
// before it on that way is ever left with a gap, hence a search stops at the first bucket that is not full.
//
// Growing: the array becomes larger, in place. A shard's new part of it begins where its old part did or further on, and
// so does each home in it; entries therefore move from the last home to the first, some after each batch, and what they
// leave is free for those that follow. Homes from `sweep` on have moved, so each key has one home. Moving is a walk
// backwards through the array, not a random scatter, and takes no more memory than the larger array has.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

namespace karvan {

struct alignas(64) Bucket {
  static constexpr uint32_t kEntries = 3;
  uint64_t hash[kEntries];
  uint32_t row[kEntries];
  uint32_t count[kEntries];
  uint32_t last[kEntries];
  uint32_t fill;  // entries in use, from the front

  // A bit for the entry that has the hash, if one has.
  __attribute__((always_inline)) uint32_t match(uint64_t wanted) const {
    const uint32_t equal = static_cast<uint32_t>(hash[0] == wanted) | static_cast<uint32_t>(hash[1] == wanted) << 1 |
                           static_cast<uint32_t>(hash[2] == wanted) << 2;
    return equal & ((1u << fill) - 1);
  }
};
static_assert(sizeof(Bucket) == 64);

struct Entry {
  Bucket* bucket = nullptr;
  uint32_t slot = 0;
  explicit operator bool() const { return bucket != nullptr; }
  uint64_t hash() const { return bucket->hash[slot]; }
  uint32_t row() const { return bucket->row[slot]; }
  uint32_t& count() const { return bucket->count[slot]; }
  uint32_t& last() const { return bucket->last[slot]; }
};

class ShardIndex {
 public:
  // Buckets past the homes, so that entries pushed over the end have a place; the last one stays empty as a guard.
  // At the loads the table keeps to, more than 40 overflowing buckets have a chance below 1e-17.
  static uint32_t tail(uint32_t homes) { return (homes < 40 ? homes : 40) + 1; }

  void set_shift(int shard_bits) { shift_ = shard_bits; }
  void attach(Bucket* buckets, uint32_t homes);          // an empty array, for an empty shard
  void rebase(Bucket* buckets) { now_ = buckets; }       // the same array at another address; not while growing
  // More homes, in an array that starts at the old one or after it. It may overlap the old one, but nothing else that
  // is in use, and is empty outside of the old one.
  void start_growth(Bucket* buckets, uint32_t homes);
  bool growing() const { return old_ != nullptr; }
  uint64_t capacity() const { return uint64_t{old_ ? old_homes_ : homes_} * Bucket::kEntries; }  // the old one until moved
  uint32_t homes() const { return homes_; }
  uint32_t advance(uint32_t entries);                    // moves at least that many entries, if there are as many
  void finish_growth() { advance(UINT32_MAX); }

  // Where a search for the hash begins.
  __attribute__((always_inline)) Bucket* first_bucket(uint64_t hash) const {
    const uint64_t x = hash << shift_;
    if (old_) [[unlikely]] {
      const uint32_t home = scale(x, old_homes_);
      if (home < sweep_) return old_ + home;
    }
    return now_ + scale(x, homes_);
  }

  // Always inlined: GCC takes a function that only prefetches for one without effect and drops the call.
  __attribute__((always_inline)) void prefetch(uint64_t hash) const { __builtin_prefetch(first_bucket(hash), 0); }

  Entry find(uint64_t hash) const { return find_from(first_bucket(hash), hash); }
  static Entry find_from(Bucket* b, uint64_t hash) {
    for (;; ++b) {
      if (const uint32_t match = b->match(hash)) return {b, static_cast<uint32_t>(__builtin_ctz(match))};
      if (b->fill < Bucket::kEntries) return {};
    }
  }

  Entry insert(uint64_t hash, uint32_t row, uint32_t count, uint32_t last);  // the key must be absent
  void erase(Entry entry);                                                   // not while growing

  // Calls f(Entry) for every entry, in order of the buckets. f may change count and last.
  template <class F>
  void each(F&& f) const {
    if (old_) each_in(old_, 0, sweep_, f);
    each_in(now_, old_ ? moved_to(sweep_) : 0, homes_ ? homes_ + tail(homes_) : 0, f);
  }

  // The same for entries with from <= hash <= to, both of this shard.
  template <class F>
  void each_between(uint64_t from, uint64_t to, F&& f) const {
    const auto within = [&](Entry e) {
      if (from <= e.hash() && e.hash() <= to) f(e);
    };
    const uint64_t low = from << shift_, high = to << shift_;
    if (old_) walk(old_, scale(low, old_homes_), scale(high, old_homes_), sweep_, within);
    const uint32_t first = old_ ? moved_to(sweep_) : 0, last = scale(high, homes_);
    if (last >= first) walk(now_, std::max(first, scale(low, homes_)), last, homes_ + tail(homes_), within);
  }

  // Erases the entries for which f(Entry) is true. Not while growing.
  template <class F>
  void erase_if(F&& f) {
    const uint32_t buckets = homes_ + tail(homes_);
    for (uint32_t b = 0; b < buckets; ++b) {
      // An erasure can pull a later entry into this bucket, so the same slot is looked at again.
      for (uint32_t slot = 0; slot < now_[b].fill;) {
        const Entry entry{now_ + b, slot};
        if (f(entry)) erase(entry);
        else ++slot;
      }
    }
  }

 private:
  static uint32_t scale(uint64_t x, uint32_t n) {
    return static_cast<uint32_t>(static_cast<unsigned __int128>(x) * n >> 64);
  }
  // The first home, among the new ones, of those that were at or behind an old one.
  uint32_t moved_to(uint32_t home) const {
    return home < old_homes_ ? static_cast<uint32_t>(uint64_t{home} * homes_ / old_homes_) : homes_;
  }
  template <class F>
  static void each_in(Bucket* buckets, uint32_t begin, uint32_t end, F& f) {
    for (uint32_t b = begin; b < end; ++b)
      for (uint32_t slot = 0; slot < buckets[b].fill; ++slot) f(Entry{buckets + b, slot});
  }

  // Entries with homes from first to last: where they end up is a bucket that no full ones lead to.
  template <class F>
  static void walk(Bucket* buckets, uint32_t first, uint32_t last, uint32_t end, F& f) {
    for (uint32_t b = first; b < end && (b <= last || buckets[b - 1].fill == Bucket::kEntries); ++b)
      for (uint32_t slot = 0; slot < buckets[b].fill; ++slot) f(Entry{buckets + b, slot});
  }

  Bucket* now_ = nullptr;
  Bucket* old_ = nullptr;
  uint32_t homes_ = 0, old_homes_ = 0;
  uint32_t sweep_ = 0;
  int shift_ = 0;
};

}  // namespace karvan
