// The keys removed from a table, by version, so that deltas can list them and late gradients can be recognised.
//
// The log is bounded: beyond `limit` keys the oldest are dropped, and `knows` is false for earlier versions.
#pragma once
#include <cstdint>
#include <deque>
#include <unordered_set>
#include <vector>

namespace karvan {

class EvictionLog {
 public:
  void add(uint64_t version, std::vector<uint64_t> hashes, size_t limit) {
    if (hashes.empty()) return;
    newest_ = version;
    total_ += hashes.size();
    log_.push_back({version, std::move(hashes)});
    while (total_ > limit && log_.size() > 1) {
      forgotten_ = log_.front().version;
      total_ -= log_.front().hashes.size();
      log_.pop_front();
    }
  }
  bool any_since(uint64_t version) const { return newest_ > version; }
  bool knows(uint64_t version) const { return version >= forgotten_; }
  uint64_t forgotten() const { return forgotten_; }

  template <class F>
  void each_since(uint64_t version, F&& f) const {
    for (const Evicted& e : log_)
      if (e.version > version)
        for (uint64_t hash : e.hashes) f(hash);
  }
  size_t bytes() const { return total_ * sizeof(uint64_t); }

 private:
  struct Evicted {
    uint64_t version;
    std::vector<uint64_t> hashes;
  };
  std::deque<Evicted> log_;
  size_t total_ = 0;
  uint64_t newest_ = 0, forgotten_ = 0;
};

}  // namespace karvan
