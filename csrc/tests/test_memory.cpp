#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "memory/arena.h"
#include "memory/buffer.h"
#include "memory/pages.h"
#include "tests/check.h"
#include "tests/tools.h"

using namespace karvan;
using namespace karvan::test;

namespace {

bool all_zero(const char* data, size_t size) {
  return std::all_of(data, data + size, [](char c) { return c == 0; });
}

}  // namespace

TEST(pages_are_zeroed_and_aligned) {
  for (size_t bytes : {size_t{1}, size_t{4095}, kHugePage - 1, kHugePage, kHugePage + 1, 3 * kHugePage}) {
    for (bool small_head : {false, true}) {
      const Pages pages(bytes, small_head);
      CHECK_EQ(pages.size(), bytes);
      CHECK(all_zero(pages.data(), bytes));
      const auto at = reinterpret_cast<uintptr_t>(pages.data());
      CHECK_EQ(at % (bytes >= kHugePage ? kHugePage : 4096), 0u);
      std::memset(pages.data(), 1, bytes);  // all of it is ours to write
    }
  }
  const Pages none, nothing(0);
  CHECK(none.data() == nullptr && nothing.data() == nullptr);
  CHECK_EQ(nothing.size(), 0u);
}

TEST(pages_move_without_copying) {
  Pages a(5000);
  char* const address = a.data();
  address[7] = 42;
  Pages b(std::move(a));
  CHECK(a.data() == nullptr && a.size() == 0);
  CHECK(b.data() == address && b.size() == 5000);
  Pages c(3 * kHugePage);
  c = std::move(b);
  CHECK(c.data() == address && c.size() == 5000);
  CHECK(b.data() == nullptr);
  CHECK_EQ(address[7], 42);
  Pages d(1);
  c.swap(d);
  CHECK(d.data() == address && c.size() == 1);
}

TEST(pages_grow_and_keep_what_they_hold) {
  Pages pages;
  pages.grow(100);
  CHECK_EQ(pages.size(), 100u);
  std::vector<char> want(100, 1);
  std::memset(pages.data(), 1, 100);
  for (const size_t bytes : {size_t{90}, size_t{4096}, size_t{5000}, kHugePage, kHugePage + 1, 5 * kHugePage - 1}) {
    pages.grow(bytes);
    CHECK_EQ(pages.size(), std::max(bytes, want.size()));
    if (bytes >= kHugePage) CHECK_EQ(reinterpret_cast<uintptr_t>(pages.data()) % kHugePage, 0u);
    CHECK(std::equal(want.begin(), want.end(), pages.data()));
    CHECK(all_zero(pages.data() + want.size(), pages.size() - want.size()));
    want.resize(pages.size(), static_cast<char>(bytes % 101));
    std::memcpy(pages.data(), want.data(), want.size());
  }
}

TEST(a_dropped_buffer_comes_back) {
  release_pooled_bytes();
  CHECK_EQ(pooled_bytes(), 0u);
  char* address = nullptr;
  size_t size = 0;
  {
    const Buffer buffer(10000);
    address = buffer.data();
    size = buffer.size();
    CHECK(size >= 10000);
    CHECK_EQ(pooled_bytes(), 0u);
    std::memset(address, 1, size);
  }
  CHECK_EQ(pooled_bytes(), size);
  {
    const Buffer same(9800);  // of the same size class
    CHECK(same.data() == address);
    CHECK_EQ(same.size(), size);
    CHECK_EQ(pooled_bytes(), 0u);
    const Buffer other(9800);
    CHECK(other.data() != address);
  }
  CHECK_EQ(pooled_bytes(), 2 * size);
  release_pooled_bytes();
  CHECK_EQ(pooled_bytes(), 0u);
}

TEST(buffers_are_little_larger_than_asked_for) {
  release_pooled_bytes();
  Random random(1);
  for (size_t bytes = 1; bytes < 3000000; bytes += 1 + bytes / 3 + below(random, 100)) {
    const Buffer buffer(bytes);
    CHECK(buffer.size() >= bytes);
    CHECK(buffer.size() <= std::max<size_t>(4096, bytes + bytes / 4 + 1));
    buffer.data()[0] = buffer.data()[buffer.size() - 1] = 1;
  }
  const Buffer nothing(0);
  CHECK(nothing.data() == nullptr);
  release_pooled_bytes();
}

TEST(a_moved_buffer_returns_to_the_pool_once) {
  release_pooled_bytes();
  size_t size = 0;
  {
    Buffer a(20000);
    size = a.size();
    char* const address = a.data();
    Buffer b(std::move(a));
    CHECK(a.data() == nullptr);
    CHECK(b.data() == address);
    Buffer c;
    c = std::move(b);
    CHECK(c.data() == address && b.data() == nullptr);
  }
  CHECK_EQ(pooled_bytes(), size);
  {
    Array<double> array(100);
    CHECK_EQ(array.size(), 100u);
    CHECK(array && !Array<double>());
    array[99] = 1.5;
    const Array<double> moved(std::move(array));
    CHECK_EQ(moved[99], 1.5);
  }
  release_pooled_bytes();
}

TEST(buffers_are_shared_safely_between_threads) {
  release_pooled_bytes();
  std::vector<std::thread> threads;
  std::atomic<int> torn{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t, &torn] {
      for (int i = 0; i < 300; ++i) {
        const Buffer buffer(5000);
        std::memset(buffer.data(), t, buffer.size());
        torn.fetch_add(std::count(buffer.data(), buffer.data() + buffer.size(), t) !=
                       static_cast<ptrdiff_t>(buffer.size()));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(torn.load(), 0);
  CHECK(pooled_bytes() <= 4 * 6144);
  release_pooled_bytes();
}

TEST(rows_are_distinct_zeroed_and_never_move) {
  // Strides that make a chunk hold many and few rows, down to one row that is larger than a chunk, whose
  // directory is too much address space for TSan.
  for (uint32_t stride : {16u, 48u, 4u << 20, 40u << 20}) {
    if (KARVAN_TSAN && stride > 100) continue;
    RowArena arena(stride);
    CHECK_EQ(arena.taken(), 1u);  // row 0
    const uint32_t chunk = arena.view().mask + 1;
    const uint32_t rows = stride < 100 ? chunk + 1000 : 12;  // so that a second chunk is needed
    std::vector<char*> address{arena.view().at(0)};
    Random random(stride);
    while (arena.taken() < rows) {
      const auto count = static_cast<uint32_t>(1 + below(random, stride < 100 ? chunk / 16 : 2));
      const uint32_t first = arena.take(count);
      CHECK_EQ(first, address.size());
      for (uint32_t row = first; row < first + count; ++row) address.push_back(arena.view().at(row));
    }
    CHECK_EQ(arena.taken(), address.size());
    CHECK_EQ(arena.bytes(), address.size() * stride);
    bool moved = false, dirty = false;
    const size_t every = stride < 100 ? 997 : 1;
    for (size_t row = 0; row < address.size(); row += every) {
      moved |= arena.view().at(static_cast<uint32_t>(row)) != address[row];
      const size_t bytes = std::min<size_t>(stride, 4096);
      dirty |= !all_zero(address[row], bytes);
      std::memset(address[row], 0xff, bytes);
    }
    CHECK(!moved && !dirty);
    std::sort(address.begin(), address.end());
    bool overlap = false;
    for (size_t i = 1; i < address.size(); ++i)
      overlap |= address[i] - address[i - 1] < static_cast<ptrdiff_t>(stride);
    CHECK(!overlap);
  }
}

TEST(threads_take_rows_at_the_same_time) {
  RowArena arena(4096);  // 8192 rows a chunk
  constexpr int kThreads = 4;
  std::vector<std::vector<uint32_t>> taken(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      Random random(static_cast<uint64_t>(t));
      while (taken[t].size() < 6000) {
        const auto count = static_cast<uint32_t>(1 + below(random, 100));
        const uint32_t first = arena.take(count);
        for (uint32_t row = first; row < first + count; ++row) {
          *reinterpret_cast<uint32_t*>(arena.view().at(row)) = row;
          taken[t].push_back(row);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<uint32_t> all;
  for (const auto& mine : taken) all.insert(all.end(), mine.begin(), mine.end());
  std::sort(all.begin(), all.end());
  CHECK_EQ(all.size() + 1, arena.taken());
  bool wrong = false;
  for (size_t i = 0; i < all.size(); ++i)
    wrong |= all[i] != i + 1 || *reinterpret_cast<uint32_t*>(arena.view().at(all[i])) != all[i];
  CHECK(!wrong);
}

TEST(an_arena_is_the_same_with_pages_touched_ahead) {
  for (const uint32_t stride : {72u, 128u, 1000u}) {
    RowArena arena(stride);
    bool zero = true;
    for (uint32_t taken = 1; taken < (40u << 20) / stride;) {
      const uint32_t row = arena.take(997);
      CHECK_EQ(row, taken);
      taken += 997;
      zero &= all_zero(arena.view().at(row), stride) && all_zero(arena.view().at(row + 996), stride);
      std::memset(arena.view().at(row), 1, stride);
      std::memset(arena.view().at(row + 996), 1, stride);
      arena.touch_ahead(0x1p-4 * (taken % 16));
      zero &= arena.view().at(row)[0] == 1 && arena.view().at(row + 996)[stride - 1] == 1;
    }
    CHECK(zero);
    CHECK_EQ(arena.bytes(), static_cast<size_t>(arena.taken()) * stride);
  }
}
