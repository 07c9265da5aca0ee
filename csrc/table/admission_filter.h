// A counting filter: how often has a key without a row been seen? Never less than the truth, sometimes more.
//
// Blocked count-min with saturating 8-bit counters: a key has one 64-byte block and four counters in it. A block belongs
// to a range of hashes, hence to one shard, so shards count without locks and the result does not depend on their number.
#pragma once
#include <algorithm>
#include <cstdint>

#include "memory/pages.h"

namespace karvan {

class CountingFilter {
 public:
  CountingFilter() = default;
  explicit CountingFilter(uint64_t slots)
      : blocks_((std::max<uint64_t>(slots, 1) + 64 * 256 - 1) / (64 * 256) * 256), pages_(blocks_ * 64) {}

  // Adds `times` occurrences and returns the count so far, at most 255.
  uint32_t add(uint64_t hash, uint32_t times) {
    auto* counters = reinterpret_cast<uint8_t*>(pages_.data()) + block_of(hash) * 64;
    uint32_t least = 255;
    uint32_t places[4];
    for (int i = 0; i < 4; ++i) {
      places[i] = hash >> (6 * i) & 63;
      bool again = false;  // two of the four places may coincide: count once
      for (int j = 0; j < i; ++j) again |= places[j] == places[i];
      if (!again) counters[places[i]] = static_cast<uint8_t>(std::min<uint64_t>(255, uint64_t{counters[places[i]]} + times));
    }
    for (uint32_t place : places) least = std::min<uint32_t>(least, counters[place]);
    return least;
  }

  // The count so far.
  uint32_t count(uint64_t hash) const {
    if (blocks_ == 0) return 0;
    const auto* counters = reinterpret_cast<const uint8_t*>(pages_.data()) + block_of(hash) * 64;
    uint32_t least = 255;
    for (int i = 0; i < 4; ++i) least = std::min<uint32_t>(least, counters[hash >> (6 * i) & 63]);
    return least;
  }

  // Adds occurrences to a copy of the counters, or subtracts them. A saturated one may represent more, and stays.
  void change(uint8_t* all, uint64_t hash, int64_t times) const {
    if (times == 0) return;
    uint8_t* const counters = all + block_of(hash) * 64;
    uint64_t done = 0;  // places, of which two may coincide
    for (int i = 0; i < 4; ++i) {
      const uint64_t place = hash >> (6 * i) & 63;
      if (done >> place & 1 || counters[place] == 255) continue;
      done |= uint64_t{1} << place;
      counters[place] = static_cast<uint8_t>(std::clamp<int64_t>(counters[place] + times, 0, 255));
    }
  }

  char* data() const { return pages_.data(); }
  size_t bytes() const { return pages_.size(); }

 private:
  uint64_t block_of(uint64_t hash) const {
    return static_cast<uint64_t>(static_cast<unsigned __int128>(hash) * blocks_ >> 64);
  }
  uint64_t blocks_ = 0;
  Pages pages_;
};

}  // namespace karvan
