// Positions of a batch grouped by key: the dedupe before every lookup and the order of every gradient sum.
//
// Keys are first spread over buckets by the top bits of their hash (a stable radix partition), small enough that the
// uniques of a bucket are found in near cache. Order is fixed by the batch alone: buckets by hash, uniques by first
// position, positions of a bucket ascending. Neither threads nor shards change it.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "memory/buffer.h"

namespace karvan {

// Some positions of a batch: keys[i] is at position base + i. A slot is a table's index in this batch.
struct KeySource {
  uint32_t slot;
  const uint64_t* keys;
  size_t count;
  uint64_t base;
  bool hashed = false;               // keys are hashes already
  const uint32_t* label = nullptr;   // by key: what KeyGroups::position holds instead of the position
};

class KeyGroups {
 public:
  struct Slot {
    int bits = 0;                            // a bucket is the top `bits` of the hash
    uint32_t first_bucket = 0, buckets = 0;
    uint64_t positions = 0;
    std::span<const KeySource> sources;
    bool small = false;                      // one thread groups it alone, in its own cache
  };

  KeyGroups() = default;
  KeyGroups(KeyGroups&&) = default;
  KeyGroups& operator=(KeyGroups&&) = default;
  // Arranges the arrays; no key is read yet. Sources of one slot are adjacent and in the order of their base; all
  // positions are below `positions_end`.
  KeyGroups(uint32_t slots, std::vector<KeySource> sources, uint64_t positions_end);

  void group_large();               // all slots that are not small, each on all threads
  void group_small(uint32_t slot);  // for one thread
  void group_all();

  std::vector<Slot> slots;
  std::vector<uint32_t> begin;     // by bucket, and one more: where its part of the arrays starts
  std::vector<uint32_t> unique;    // by bucket: how many distinct keys
  std::vector<uint32_t> slot_of;   // by bucket
  // A bucket's part of these begins with its distinct keys:
  Array<uint64_t> hash;
  Array<uint32_t> count;           // how many positions have the key
  // … and of these is filled with its positions, ascending:
  Array<uint32_t> position;        // or their labels
  Array<uint32_t> unique_at;       // the key's index in the slot, counted from first_index(slot)
  // The same by position:
  Array<uint32_t> unique_of;

  uint32_t buckets() const { return static_cast<uint32_t>(unique.size()); }
  uint64_t unique_in(uint32_t slot) const;
  uint64_t first_index(uint32_t slot) const { return begin[slots[slot].first_bucket]; }

 private:
  void partition(const Slot& slot, bool alone);
  void dedupe(uint32_t bucket);
  void spread(const Slot& slot);
  void group(const Slot& slot, bool alone);

  std::vector<KeySource> sources_;
};

}  // namespace karvan
