// Sends the distinct keys of a plan to the ranks that own them, and takes their answers.
//
// A rank owns a range of hashes of every table. Keys are sent by rank, then by slot, then in the plan's order; vectors
// and gradients are in the same order.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "batch/gradients.h"
#include "batch/plan.h"

namespace karvan {

// The rank that owns a hash. Ranges grow with the rank, and none is larger than another by more than one 2^32nd.
inline uint32_t owner_of(uint64_t hash, uint32_t ranks) {
  return static_cast<uint32_t>(((hash >> 32) * ranks) >> 32);
}

class Route {
 public:
  Route(std::shared_ptr<Plan> plan, uint32_t ranks);  // after the plan's group()
  Route(const Route&) = delete;
  Route& operator=(const Route&) = delete;

  const std::vector<uint64_t>& counts() const { return counts_; }  // keys by (rank, slot)
  uint64_t keys() const { return keys_; }
  uint64_t floats() const { return floats_; }

  // For each rank its keys, and how often each is used: 64 and then 32 bits, padded to a multiple of 64.
  static uint64_t words(uint64_t keys) { return keys + (keys + 1) / 2; }
  void pack_keys(uint64_t* message) const;
  void pool(const float* vectors);  // runs the plan with vectors in the order in which keys are sent

  // Gradients can be sent without their keys if they were summed by the plan's groups: every feature had one.
  static bool complete(const Gradients& gradients) { return !gradients.own_groups_; }
  void pack_gradients(const Gradients& gradients, float scale, float* out) const;

 private:
  template <class F>
  void each_slot(F&& f) const;  // f(slot, bucket, unique key's index in the groups, its number in the slot), on all threads

  std::shared_ptr<Plan> plan_;
  uint32_t ranks_;
  std::vector<uint64_t> counts_;
  uint64_t keys_ = 0, floats_ = 0;
  std::vector<Array<uint32_t>> key_at_;    // by slot, by unique key in the plan's order: its index among all keys
  std::vector<Array<uint64_t>> float_at_;  // … and that of its vector among all floats
};

}  // namespace karvan
