// Rows in and out of a table: snapshots and loads.
#include <algorithm>
#include <cstring>

#include "table/row_io.h"
#include "table/table.h"
#include "threads/pool.h"

namespace karvan {
namespace {

struct Found {
  uint64_t hash;
  uint32_t row, count, last;
  bool operator<(const Found& other) const { return hash < other.hash; }
};

}  // namespace

RowSet::RowSet(size_t count, const RowLayout& layout)
    : rows(count),
      keys(count),
      vectors(count * layout.dim),
      state(count * layout.state),
      counts(count),
      last_steps(count) {}

void RowSet::make_room(size_t count, const RowLayout& layout) {
  if (count <= keys.size()) return;
  RowSet larger(std::max(count, keys.size() + keys.size() / 2), layout);
  std::copy_n(keys.data(), rows, larger.keys.data());
  std::copy_n(vectors.data(), rows * layout.dim, larger.vectors.data());
  std::copy_n(state.data(), rows * layout.state, larger.state.data());
  std::copy_n(counts.data(), rows, larger.counts.data());
  std::copy_n(last_steps.data(), rows, larger.last_steps.data());
  larger.rows = rows;
  *this = std::move(larger);
}

void RowSet::put(size_t at, uint64_t hash, uint32_t uses, uint32_t last, const char* row, const RowLayout& layout) {
  keys[at] = unmix(hash);
  counts[at] = uses;
  last_steps[at] = last;
  read_vector(row, layout, vectors.data() + at * layout.dim);
  if (layout.state) std::memcpy(state.data() + at * layout.state, row + layout.vector_bytes(), 4 * layout.state);
}

RowSet Table::snapshot(uint32_t part, uint32_t parts) {
  std::vector<std::vector<Found>> found(shards());
  parallel(shards(), [&](uint32_t s) {
    shards_[s].index.each([&](Entry e) {
      if (parts == 1 || static_cast<unsigned __int128>(e.hash()) * parts >> 64 == part)
        found[s].push_back({e.hash(), e.row(), e.count(), e.last()});
    });
    std::sort(found[s].begin(), found[s].end());
  });
  std::vector<size_t> start(shards() + 1, 0);
  for (uint32_t s = 0; s < shards(); ++s) start[s + 1] = start[s] + found[s].size();

  RowSet set(start.back(), layout_);
  const RowsView view = arena_->view();
  parallel(shards(), [&](uint32_t s) {
    constexpr size_t kAhead = 16;
    for (size_t i = 0; i < found[s].size(); ++i) {
      if (i + kAhead < found[s].size()) __builtin_prefetch(view.at(found[s][i + kAhead].row));
      const Found& f = found[s][i];
      set.put(start[s] + i, f.hash, f.count, f.last, view.at(f.row), layout_);
    }
  });
  return set;
}

void Table::load(const uint64_t* keys, size_t count, const float* vectors, const float* state,
                 const uint32_t* counts, const uint32_t* last_steps) {
  next_version();
  const auto mine = by_shard(keys, count);
  std::vector<uint32_t> fresh(shards());
  parallel(shards(), [&](uint32_t s) {
    for (uint32_t i : mine[s]) fresh[s] += !find(mix(keys[i]));
  });
  reserve(fresh);
  parallel(shards(), [&](uint32_t s) {
    for (uint32_t i : mine[s]) {
      const uint64_t hash = mix(keys[i]);
      Entry entry = find(hash);
      uint32_t row;
      if (entry) {
        if (capture_) capture_->before_change(entry);
        row = entry.row();
        note_changes(&row, 1);
        entry.count() = counts[i];
        entry.last() = last_steps[i];
      } else {
        row = insert(hash, counts[i], last_steps[i]);
      }
      write_row(arena_->view().at(row), vectors + static_cast<size_t>(i) * layout_.dim,
                state ? state + static_cast<size_t>(i) * layout_.state : initial_state_.data());
    }
  });
  end_batch(count);
}

}  // namespace karvan
