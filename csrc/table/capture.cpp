#include "table/capture.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "table/row_io.h"
#include "table/table.h"
#include "threads/pool.h"

namespace karvan {
namespace {

constexpr uint64_t kSliceRows = 4096;  // some tenths of a millisecond, which is how long a batch may have to wait
constexpr auto kPause = std::chrono::microseconds(20);  // between slices, so that whoever waits gets its turn

}  // namespace

void RowBits::make_room(uint32_t rows) {
  const size_t wanted = (static_cast<size_t>(rows) + 63) / 64;
  if (wanted <= words_) return;
  const size_t words = std::max(wanted, words_ + words_ / 2);
  auto larger = std::make_unique<std::atomic<uint64_t>[]>(words);
  for (size_t i = 0; i < words; ++i) larger[i].store(i < words_ ? bits_[i].load() : 0, std::memory_order_relaxed);
  bits_ = std::move(larger);
  words_ = words;
}

Capture::Capture(std::shared_ptr<Table> table, uint32_t parts, std::unique_ptr<RowBits> changes,
                 std::vector<uint64_t> erased)
    : table_(std::move(table)),
      layout_(table_->layout()),
      parts_(parts),
      limit_(table_->taken_rows()),
      version_(table_->version()),
      rows_(table_->rows()),
      changes_(std::move(changes)),
      erased_(std::move(erased)) {
  const uint32_t lists = std::max(parts, table_->shards());
  list_shift_ = 64 - std::countr_zero(lists);
  kept_lists_.resize(lists);
  seen_.make_room(limit_);
  table_->set_capture(this);
}

void Capture::close() {
  if (!table_) return;
  Exclusive exclusive;
  table_->set_capture(nullptr);
  table_.reset();
  kept_lists_.clear();
}

void Capture::copy(const Found& found, Copies& to) const {
  to.entries.push_back(found);
  const char* row = table_->view().at(found.row);
  to.rows.insert(to.rows.end(), row, row + layout_.stride());
}

void Capture::before_change(const Entry& entry) {
  const uint32_t row = entry.row();
  if (all_kept_ || row >= limit_ || entry.hash() < read_below_ || seen_.has(row)) return;
  seen_.add(row);
  if (next_ == parts_ || (changes_ && !changes_->has(row))) return;
  const uint64_t list = list_shift_ == 64 ? 0 : entry.hash() >> list_shift_;
  copy({entry.hash(), row, entry.count(), entry.last()}, kept_lists_[list]);
  kept_.fetch_add(1, std::memory_order_relaxed);
}

void Capture::keep_all() {
  table_->each_entry([&](const Entry& entry) { before_change(entry); });
  all_kept_ = true;
}

void Capture::read_slice(uint64_t from, uint64_t to, Copies& out) {
  if (all_kept_) return;
  const size_t first = out.entries.size();
  table_->each_between(from, to, [&](const Entry& e) {
    const uint32_t row = e.row();
    if (row < limit_ && !seen_.has(row) && (!changes_ || changes_->has(row)))
      out.entries.push_back({e.hash(), row, e.count(), e.last()});
  });
  const RowsView view = table_->view();
  const size_t stride = layout_.stride();
  out.rows.resize(out.entries.size() * stride);
  constexpr size_t kAhead = 16;
  for (size_t i = first; i < out.entries.size(); ++i) {
    if (i + kAhead < out.entries.size()) __builtin_prefetch(view.at(out.entries[i + kAhead].row));
    std::memcpy(out.rows.data() + i * stride, view.at(out.entries[i].row), stride);
  }
}

RowSet Capture::part(uint32_t part) {
  if (!table_) throw std::invalid_argument("The capture has been closed.");
  if (part != next_ || part >= parts_)
    throw std::invalid_argument("Table '" + table_->config().name + "': parts are read in order; expected part " +
                                std::to_string(next_) + " of " + std::to_string(parts_) + ", got " + std::to_string(part) +
                                ".");
  const int bits = std::countr_zero(parts_);
  const uint64_t first = bits ? static_cast<uint64_t>(part) << (64 - bits) : 0;
  const uint64_t last = first + (bits ? (uint64_t{1} << (64 - bits)) - 1 : UINT64_MAX);
  const uint64_t slices = std::bit_ceil(rows_ / parts_ / kSliceRows + 1);
  const uint64_t width = slices == 1 ? 0 : (last - first) / slices + 1;  // both are powers of two; 0: the whole part
  Copies all;
  for (uint64_t s = 0; s < slices; ++s) {
    const uint64_t from = first + s * width, to = slices == 1 ? last : from + width - 1;
    {
      Exclusive exclusive;
      if (!table_) throw std::invalid_argument("The capture has been closed.");
      read_slice(from, to, all);
      if (to != UINT64_MAX) read_below_ = to + 1;
      if (s + 1 == slices) {
        ++next_;
        const uint32_t per_part = static_cast<uint32_t>(kept_lists_.size()) / parts_;
        for (uint32_t l = part * per_part; l < (part + 1) * per_part; ++l) {
          Copies& kept = kept_lists_[l];
          all.entries.insert(all.entries.end(), kept.entries.begin(), kept.entries.end());
          all.rows.insert(all.rows.end(), kept.rows.begin(), kept.rows.end());
          kept = Copies();
        }
      }
    }
    std::this_thread::sleep_for(kPause);
  }
  return laid_out(all);
}

std::unique_ptr<Capture> Table::capture(const std::shared_ptr<Table>& table, uint32_t parts, bool track,
                                        std::optional<uint64_t> since) {
  Table& t = *table;
  const std::string name = "Table '" + t.config_.name + "'";
  if (t.capture_) throw std::invalid_argument(name + " is being captured already; one capture is read at a time.");
  if (!std::has_single_bit(parts))
    throw std::invalid_argument(name + ": parts must be a power of two, got " + std::to_string(parts) + ".");
  std::unique_ptr<RowBits> changes;
  std::vector<uint64_t> erased;
  if (since) {
    if (!t.changes_ || t.changes_since_ != *since || !t.evictions_.knows(*since))
      throw std::invalid_argument(name + " does not know all changes since version " + std::to_string(*since) +
                                  (t.changes_ ? ", only those since " + std::to_string(t.changes_since_) : "") +
                                  ": capture it whole.");
    t.evictions_.each_since(*since, [&](uint64_t hash) { erased.push_back(hash); });
    std::sort(erased.begin(), erased.end());
    erased.erase(std::unique(erased.begin(), erased.end()), erased.end());
    changes = std::move(t.changes_);
    changes->make_room(t.taken_rows());
  }
  auto made = std::make_unique<Capture>(table, parts, std::move(changes), std::move(erased));
  t.changes_.reset();
  if (track) {
    t.changes_ = std::make_unique<RowBits>();
    t.changes_->make_room(t.taken_rows());
    t.changes_since_ = t.version_;
  }
  return made;
}

void Table::keep_before_use(const uint64_t* hashes, size_t count) {
  constexpr size_t kAhead = 16;
  for (size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) prefetch(hashes[i + kAhead]);
    if (const Entry entry = find(hashes[i])) capture_->before_change(entry);
  }
}

void Table::before_late_change(const uint64_t* hashes, const uint32_t* rows, size_t count, uint64_t version) {
  if (capture_ && version <= capture_->version()) keep_before_use(hashes, count);
  if (changes_ && version <= changes_since_) note_changes(rows, count);
}

RowSet Capture::laid_out(const Copies& copies) const {
  struct Place {
    uint64_t hash;
    uint32_t at;
  };
  std::vector<Place> order(copies.entries.size());
  for (uint32_t i = 0; i < order.size(); ++i) order[i] = {copies.entries[i].hash, i};
  std::sort(order.begin(), order.end(), [](const Place& a, const Place& b) { return a.hash < b.hash; });
  RowSet set(order.size(), layout_);
  for (size_t i = 0; i < order.size(); ++i) {
    const Found& found = copies.entries[order[i].at];
    set.put(i, found.hash, found.count, found.last, copies.rows.data() + static_cast<size_t>(order[i].at) * layout_.stride(),
            layout_);
  }
  return set;
}

}  // namespace karvan
