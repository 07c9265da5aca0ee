// Which rows are removed, and how. All choices are made over entire tables, so they do not depend on their shards.
#include <algorithm>

#include "table/row_io.h"
#include "table/table.h"
#include "threads/pool.h"

namespace karvan {
namespace {

// What makes a row expendable, least first: (last use, uses) or (uses, last use), then the hash, which no two of a table
// share, then the table.
struct Rank {
  uint32_t first, second;
  uint64_t hash;
  size_t table;
  bool operator<(const Rank& o) const {
    if (first != o.first) return first < o.first;
    if (second != o.second) return second < o.second;
    return hash != o.hash ? hash < o.hash : table < o.table;
  }
  uint32_t digit(int d) const {  // 16 bits at a time, most significant first
    if (d < 2) return first >> (16 - 16 * d) & 0xffff;
    if (d < 4) return second >> (48 - 16 * d) & 0xffff;
    return static_cast<uint32_t>(hash >> (112 - 16 * d)) & 0xffff;
  }
};

Rank rank_of(Entry e, size_t table, bool by_use_count) {
  return by_use_count ? Rank{e.count(), e.last(), e.hash(), table} : Rank{e.last(), e.count(), e.hash(), table};
}

// How many of these rows have to go. Large tables lose a sixteenth at once, so that a search serves many insertions.
uint64_t surplus(uint64_t rows, uint64_t capacity) {
  if (rows <= capacity) return 0;
  return rows - capacity + (capacity >= 65536 ? capacity / 16 : 0);
}

bool same_digits(const Rank& a, const Rank& b, int digits) {
  for (int d = 0; d < digits; ++d)
    if (a.digit(d) != b.digit(d)) return false;
  return true;
}

double squared_norm(const char* row, const RowLayout& layout) {
  thread_local std::vector<float> vector;
  vector.resize(layout.dim);
  read_vector(row, layout, vector.data());
  double sum = 0;
  for (float x : vector) sum += static_cast<double>(x) * x;
  return sum;
}

}  // namespace

template <class F>
uint64_t Table::erase_where(F&& doomed) {
  settle();
  std::vector<std::vector<uint64_t>> gone(shards());
  parallel(shards(), [&](uint32_t s) {
    Shard& shard = shards_[s];
    shard.index.erase_if([&](Entry e) {
      if (!doomed(e)) return false;
      if (capture_) capture_->before_change(e);
      gone[s].push_back(e.hash());
      shard.free.push_back(e.row());
      return true;
    });
    shard.rows -= gone[s].size();
  });
  std::vector<uint64_t> all;
  for (auto& part : gone) all.insert(all.end(), part.begin(), part.end());
  return note_evicted(std::move(all));
}

uint64_t Table::evict_least(const std::vector<Table*>& tables, uint64_t count, bool by_use_count) {
  if (count == 0) return 0;
  // Narrow down to the rank of the last row to go, sixteen bits a pass, until few enough rows are left to sort.
  constexpr uint64_t kFew = 1 << 20;
  Rank limit{0, 0, 0, 0};
  uint64_t wanted = count, candidates = 0;
  for (const Table* table : tables) candidates += table->rows();
  int digits = 0;
  auto set_digit = [&](int d, uint32_t value) {
    if (d < 2) limit.first |= value << (16 - 16 * d);
    else if (d < 4) limit.second |= value << (48 - 16 * d);
    else limit.hash |= static_cast<uint64_t>(value) << (112 - 16 * d);
  };
  auto each_candidate = [&](const Table& table, size_t number, uint32_t s, auto&& f) {
    table.shards_[s].index.each([&](Entry e) {
      const Rank r = rank_of(e, number, by_use_count);
      if (same_digits(r, limit, digits)) f(r);
    });
  };
  for (; digits < 8 && candidates > kFew; ++digits) {
    std::vector<uint64_t> rows(65536);
    for (size_t t = 0; t < tables.size(); ++t) {
      std::vector<std::vector<uint64_t>> parts(tables[t]->shards());
      parallel(tables[t]->shards(), [&](uint32_t s) {
        parts[s].resize(65536);
        each_candidate(*tables[t], t, s, [&](const Rank& r) { ++parts[s][r.digit(digits)]; });
      });
      for (const auto& part : parts)
        for (uint32_t value = 0; value < 65536; ++value) rows[value] += part[value];
    }
    uint64_t below = 0;
    for (uint32_t value = 0; value < 65536; ++value) {
      if (below + rows[value] >= wanted) {
        wanted -= below;
        candidates = rows[value];
        set_digit(digits, value);
        break;
      }
      below += rows[value];
    }
  }
  std::vector<Rank> rest;
  for (size_t t = 0; t < tables.size(); ++t) {
    std::vector<std::vector<Rank>> parts(tables[t]->shards());
    parallel(tables[t]->shards(), [&](uint32_t s) {
      each_candidate(*tables[t], t, s, [&](const Rank& r) { parts[s].push_back(r); });
    });
    for (auto& part : parts) rest.insert(rest.end(), part.begin(), part.end());
  }
  std::nth_element(rest.begin(), rest.begin() + static_cast<ptrdiff_t>(wanted - 1), rest.end());
  limit = rest[wanted - 1];
  uint64_t gone = 0;
  for (size_t t = 0; t < tables.size(); ++t)
    gone += tables[t]->erase_where([&](Entry e) { return !(limit < rank_of(e, t, by_use_count)); });
  return gone;
}

uint64_t Table::shrink(const std::vector<Table*>& tables, uint64_t capacity) {
  uint64_t present = 0;
  for (const Table* table : tables) present += table->rows();
  return evict_least(tables, surplus(present, capacity), false);
}

double Table::advance_time(double now) {
  const double latest = clock_.empty() ? time_ : std::max(time_, clock_.back().second);
  // A clock that was set back still says how much time passes, until it has caught up.
  time_ = now >= latest ? now : latest + std::max(0.0, now - shown_);
  shown_ = now;
  return time_;
}

uint64_t Table::evict_expired(double time) {
  uint64_t expired = 0;  // one past the newest step that is too old
  for (const auto& [at, noted] : clock_)
    if (noted <= time - config_.evict.seconds) expired = at + 1;
  if (expired == 0) return 0;
  return erase_where([&](Entry e) { return e.last() < expired; });
}

uint64_t Table::evict(uint64_t step, double now) {
  const Eviction& rule = config_.evict;
  switch (rule.kind) {
    case Eviction::Kind::never: return 0;
    case Eviction::Kind::lru:
    case Eviction::Kind::lfu:
      return evict_least({this}, surplus(rows(), rule.capacity), rule.kind == Eviction::Kind::lfu);
    case Eviction::Kind::age:
      if (step <= rule.steps) return 0;
      return erase_where([&](Entry e) { return e.last() < step - rule.steps; });
    case Eviction::Kind::ttl: return evict_expired(advance_time(now));
    case Eviction::Kind::norm: {
      const RowsView view = arena_->view();
      const double limit = static_cast<double>(rule.below) * rule.below;
      return erase_where([&](Entry e) { return squared_norm(view.at(e.row()), layout_) < limit; });
    }
  }
  return 0;
}

uint64_t Table::maintain(uint64_t step, double now) {
  const Eviction& rule = config_.evict;
  switch (rule.kind) {
    case Eviction::Kind::never: return 0;
    case Eviction::Kind::lru:
    case Eviction::Kind::lfu: return evict(step, now);
    case Eviction::Kind::ttl: {
      now = advance_time(now);
      const double apart = rule.seconds / 64;
      const uint64_t gone = step % rule.every == 0 ? evict_expired(now) : 0;
      // Drop what the cutoff has passed, keeping one. The last note moves along until it is far enough from the one
      // before, so that it represents all steps since.
      while (clock_.size() > 1 && clock_[1].second <= now - rule.seconds) clock_.erase(clock_.begin());
      const size_t notes = clock_.size();
      if (notes > 1 && now - clock_[notes - 2].second < apart) clock_.back() = {step, now};
      else clock_.emplace_back(step, now);
      return gone;
    }
    case Eviction::Kind::age:
    case Eviction::Kind::norm: return step % rule.every == 0 ? evict(step, now) : 0;
  }
  return 0;
}

uint64_t Table::erase_keys(const uint64_t* keys, size_t count) {
  settle();
  std::vector<uint64_t> gone;
  for (size_t i = 0; i < count; ++i) {
    const uint64_t hash = mix(keys[i]);
    Shard& shard = shards_[shard_of(hash)];
    const Entry entry = shard.index.find(hash);
    if (!entry) continue;
    if (capture_) capture_->before_change(entry);
    shard.free.push_back(entry.row());
    shard.index.erase(entry);
    --shard.rows;
    gone.push_back(hash);
  }
  return note_evicted(std::move(gone));
}

uint64_t Table::note_evicted(std::vector<uint64_t> hashes) {
  std::sort(hashes.begin(), hashes.end());
  const uint64_t count = hashes.size();
  evicted_ += count;
  evictions_.add(next_version(), std::move(hashes), std::max<size_t>(size_t{1} << 20, rows()));
  return count;
}

}  // namespace karvan
