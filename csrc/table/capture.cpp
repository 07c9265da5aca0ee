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
constexpr auto kPause = std::chrono::microseconds(50);  // for threads that wait, which would otherwise seldom get the lock

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
                 std::vector<uint64_t> erased, std::vector<Correction> corrections)
    : table_(std::move(table)),
      layout_(table_->layout()),
      parts_(parts),
      limit_(table_->taken_rows()),
      version_(table_->version()),
      rows_(table_->rows()),
      changes_(std::move(changes)),
      erased_(std::move(erased)),
      corrections_(std::move(corrections)) {
  const uint64_t slices = std::bit_ceil(std::max({rows_ / kSliceRows, uint64_t{parts}, uint64_t{table_->shards()}}));
  slice_shift_ = 64 - std::countr_zero(slices);
  slices_.resize(slices);
  seen_.make_room(limit_);
  table_->set_capture(this);
}

void Capture::close() {
  if (!table_) return;
  Exclusive exclusive;
  table_->set_capture(nullptr);
  table_.reset();
  slices_.clear();
}

void Capture::before_change(const Entry& entry) {
  const uint32_t row = entry.row();
  if (all_kept_ || row >= limit_ || entry.hash() < read_below_ || seen_.has(row)) return;
  seen_.add(row);
  if (next_ == parts_ || (changes_ && !changes_->has(row))) return;
  Kept& kept = slices_[slice_shift_ == 64 ? 0 : entry.hash() >> slice_shift_];
  kept.entries.push_back({entry.hash(), static_cast<uint32_t>(kept.entries.size()), entry.count(), entry.last()});
  const char* bytes = table_->view().at(row);
  kept.rows.insert(kept.rows.end(), bytes, bytes + layout_.stride());
  kept_.fetch_add(1, std::memory_order_relaxed);
}

void Capture::keep_all() {
  table_->each_entry([&](const Entry& entry) { before_change(entry); });
  all_kept_ = true;
}

void Capture::put(const Found& found, const char* row, RowSet& out) {
  uint32_t count = found.count, last = found.last;
  while (next_correction_ < corrections_.size() && corrections_[next_correction_].hash < found.hash) ++next_correction_;
  if (next_correction_ < corrections_.size() && corrections_[next_correction_].hash == found.hash) {
    const Correction& correction = corrections_[next_correction_];
    if (!correction.present) return;
    count = correction.count;
    last = correction.last;
  }
  out.put(out.rows++, found.hash, count, last, row, layout_);
}

void Capture::read_slice(uint32_t slice, RowSet& out) {
  const uint64_t from = slice_shift_ == 64 ? 0 : static_cast<uint64_t>(slice) << slice_shift_;
  const uint64_t to = from + (slice_shift_ == 64 ? UINT64_MAX : (uint64_t{1} << slice_shift_) - 1);
  std::vector<Found> found;
  if (!all_kept_) {
    found.reserve(2 * kSliceRows);
    table_->each_between(from, to, [&](const Entry& e) {
      const uint32_t row = e.row();
      if (row >= limit_ || seen_.has(row) || (changes_ && !changes_->has(row))) return;
      // Entries come almost in order: few are not in their home.
      found.push_back({e.hash(), row, e.count(), e.last()});
      for (size_t i = found.size() - 1; i > 0 && found[i].hash < found[i - 1].hash; --i) std::swap(found[i], found[i - 1]);
    });
  }
  Kept kept = std::move(slices_[slice]);
  slices_[slice] = Kept();
  std::sort(kept.entries.begin(), kept.entries.end(), [](const Found& a, const Found& b) { return a.hash < b.hash; });
  const RowsView view = table_->view();
  constexpr size_t kAhead = 16;
  out.make_room(out.rows + found.size() + kept.entries.size(), layout_);
  size_t k = 0;
  const auto put_kept = [&](uint64_t below) {
    for (; k < kept.entries.size() && kept.entries[k].hash < below; ++k) {
      const Found& f = kept.entries[k];
      put(f, kept.rows.data() + size_t{f.row} * layout_.stride(), out);
    }
  };
  for (size_t i = 0; i < found.size(); ++i) {
    if (i + kAhead < found.size()) {
      const char* row = view.at(found[i + kAhead].row);
      for (uint32_t line = 0; line < layout_.stride(); line += 64) __builtin_prefetch(row + line);
    }
    put_kept(found[i].hash);
    put(found[i], view.at(found[i].row), out);
  }
  put_kept(UINT64_MAX);
  if (k < kept.entries.size()) {  // the one whose hash is the largest there is
    const Found& f = kept.entries[k];
    put(f, kept.rows.data() + size_t{f.row} * layout_.stride(), out);
  }
  if (to != UINT64_MAX) read_below_ = to + 1;
}

RowSet Capture::part(uint32_t part) {
  if (!table_) throw std::invalid_argument("The capture has been closed.");
  if (part != next_ || part >= parts_)
    throw std::invalid_argument("Table '" + table_->config().name + "': parts are read in order; expected part " +
                                std::to_string(next_) + " of " + std::to_string(parts_) + ", got " + std::to_string(part) +
                                ".");
  const auto slices = static_cast<uint32_t>(slices_.size()) / parts_;
  const uint64_t usual = changes_ ? 0 : rows_ / parts_;
  RowSet set(0, layout_);
  set.make_room(usual + usual / 64 + 64, layout_);
  for (uint32_t s = 0; s < slices; ++s) {
    {
      Exclusive exclusive;
      if (!table_) throw std::invalid_argument("The capture has been closed.");
      read_slice(part * slices + s, set);
      if (s + 1 == slices) ++next_;
    }
    if (operation_waits()) std::this_thread::sleep_for(kPause);
  }
  return set;
}

std::unique_ptr<Capture> Table::capture(const std::shared_ptr<Table>& table, uint32_t parts, bool track,
                                        std::optional<uint64_t> since, std::vector<Correction> corrections) {
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
                                  ": make a full capture.");
    t.evictions_.each_since(*since, [&](uint64_t hash) { erased.push_back(hash); });
    std::sort(erased.begin(), erased.end());
    erased.erase(std::unique(erased.begin(), erased.end()), erased.end());
    changes = std::move(t.changes_);
    changes->make_room(t.taken_rows());
  }
  t.changes_.reset();
  if (track) {
    t.changes_ = std::make_unique<RowBits>();
    t.changes_->make_room(t.taken_rows());
    t.changes_since_ = t.version_;
    // Rows that were returned with corrections: the next capture has to include them, even without changes.
    for (const Correction& correction : corrections)
      if (const Entry entry = t.find(correction.hash)) t.changes_->add(entry.row());
  }
  auto made = std::make_unique<Capture>(table, parts, std::move(changes), std::move(erased), std::move(corrections));
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

}  // namespace karvan
