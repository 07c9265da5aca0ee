// A table as it was at one moment, read part by part while training continues.
//
// Parts are equal ranges of the key hash, read in ascending order, a slice of some thousand rows at a time; between two
// slices batch operations run. One that is about to change, overwrite or remove a row that has not been read yet copies
// the row first. A bit for each row says that it has been copied, or that it did not exist at that moment; so a row is
// copied once at most, and memory grows only with the rows that training touches before they are read.
//
// A capture of changes returns only rows that changed since the previous capture. The table records these in a set of rows
// (`RowBits`), which the capture takes over.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "table/index.h"
#include "table/layout.h"

namespace karvan {

class Table;
struct RowSet;

// A set of row numbers. Threads may add at the same time; it is made larger by one thread alone.
class RowBits {
 public:
  void make_room(uint32_t rows);  // for numbers below it; those that are new to it are not in the set
  uint32_t room() const { return static_cast<uint32_t>(words_ * 64); }
  bool has(uint32_t row) const { return word(row).load(std::memory_order_relaxed) >> (row & 63) & 1; }
  void add(uint32_t row) {
    // Mostly it is there already, and reading is cheaper than an atomic write.
    if (!has(row)) word(row).fetch_or(uint64_t{1} << (row & 63), std::memory_order_relaxed);
  }

 private:
  std::atomic<uint64_t>& word(uint32_t row) const { return bits_[row >> 6]; }
  std::unique_ptr<std::atomic<uint64_t>[]> bits_;
  size_t words_ = 0;
};

// A key's uses as a capture must return them, or that it must omit the key; see batch/lookup_log.h.
struct Correction {
  uint64_t hash;
  uint32_t count, last;
  bool present;
};

class Capture {
 public:
  // Inside of a batch operation. `parts` is a power of two. With `changes` only rows in it are returned. Corrections are in
  // the order of their hashes.
  Capture(std::shared_ptr<Table> table, uint32_t parts, std::unique_ptr<RowBits> changes, std::vector<uint64_t> erased,
          std::vector<Correction> corrections);
  ~Capture() { close(); }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  // Outside of batch operations. Each part once, in ascending order; std::invalid_argument otherwise.
  RowSet part(uint32_t part);
  void close();  // releases what has not been read

  uint32_t parts() const { return parts_; }
  const RowLayout& layout() const { return layout_; }
  uint64_t version() const { return version_; }
  const std::vector<uint64_t>& erased() const { return erased_; }  // hashes of keys removed since the previous capture
  uint64_t kept() const { return kept_.load(std::memory_order_relaxed); }  // rows that were copied before a change

  // For the table, inside of a batch operation and for the owner of the key's shard: before a row changes or is removed,
  // and when a new key has got the row's number.
  void before_change(const Entry& entry);
  void is_new(uint32_t row) {
    if (row < limit_) seen_.add(row);
  }
  // Copies all that has not been read: the table is about to change the layout of its rows.
  void keep_all();

 private:
  struct Found {
    uint64_t hash;
    uint32_t row, count, last;
  };
  struct Kept {  // copies of rows, as they are in the table
    std::vector<Found> entries;  // in each, row is the index of its copy
    std::vector<char> rows;
  };
  void read_slice(uint32_t slice, RowSet& out);
  void put(const Found& found, const char* row, RowSet& out);  // in ascending order of hashes

  std::shared_ptr<Table> table_;
  RowLayout layout_;
  uint32_t parts_, next_ = 0;
  int slice_shift_;        // a hash's slice, by its top bits; a slice belongs to one part and to one shard
  uint32_t limit_;         // rows from this number on are new
  uint64_t version_, rows_;
  std::unique_ptr<RowBits> changes_;
  std::vector<uint64_t> erased_;
  std::vector<Correction> corrections_;
  size_t next_correction_ = 0;
  RowBits seen_;
  uint64_t read_below_ = 0;  // hashes below it have been read
  std::vector<Kept> slices_;
  std::atomic<uint64_t> kept_{0};
  bool all_kept_ = false;
};

}  // namespace karvan
