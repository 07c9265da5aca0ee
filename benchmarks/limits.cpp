// How many random rows per second this machine's memory can serve: the ceiling of any sparse step.
//
// An array of 2 MiB pages, indices drawn beforehand, and a loop that prefetches the row 16 places ahead.
// Every pass shifts all indices by another offset, so that no pass finds the last one's rows in a cache.

#include <sys/mman.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

namespace {

constexpr std::size_t kRow = 128;
constexpr std::size_t kPage = std::size_t{2} << 20;
constexpr std::size_t kAhead = 16;
constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15ull;

// Four floats: one register of the least capable machine (SSE2, NEON), so no flags are needed.
typedef float Four __attribute__((vector_size(16)));

std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

struct Probe {
  void* mapping = nullptr;
  std::size_t mapped = 0;
  char* rows = nullptr;
  std::uint64_t mask = 0;  // row count - 1
  std::uint64_t passes = 0;
  std::vector<std::vector<std::uint32_t>> indices;  // one list per thread
};

void update128(char* rows, const std::uint32_t* index, std::size_t count, std::uint64_t shift, std::uint64_t mask) {
  const Four one = {1, 1, 1, 1};
  for (std::size_t i = 0; i < count; ++i) {
    char* ahead = rows + ((index[i + kAhead] + shift) & mask) * kRow;
    __builtin_prefetch(ahead, 1);
    __builtin_prefetch(ahead + 64, 1);
    Four* row = reinterpret_cast<Four*>(rows + ((index[i] + shift) & mask) * kRow);
    for (int j = 0; j < 8; ++j) row[j] += one;
  }
}

float read64(char* rows, const std::uint32_t* index, std::size_t count, std::uint64_t shift, std::uint64_t mask) {
  // One accumulator per register of the row: the additions of one row do not wait for each other.
  Four a{}, b{}, c{}, d{};
  for (std::size_t i = 0; i < count; ++i) {
    __builtin_prefetch(rows + ((index[i + kAhead] + shift) & mask) * kRow);
    const Four* row = reinterpret_cast<const Four*>(rows + ((index[i] + shift) & mask) * kRow);
    a += row[0];
    b += row[1];
    c += row[2];
    d += row[3];
  }
  const Four sum = a + b + c + d;
  return sum[0] + sum[1] + sum[2] + sum[3];
}

}  // namespace

extern "C" {

// bytes must be a power of two; count is the number of rows each thread visits in a pass.
Probe* probe_open(std::size_t bytes, std::size_t count, int threads) {
  Probe* probe = new (std::nothrow) Probe;
  if (!probe) return nullptr;
  probe->mapped = bytes + kPage;
  probe->mapping = mmap(nullptr, probe->mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (probe->mapping == MAP_FAILED) {
    delete probe;
    return nullptr;
  }
  const auto start = reinterpret_cast<std::uintptr_t>(probe->mapping);
  probe->rows = reinterpret_cast<char*>((start + kPage - 1) & ~(kPage - 1));
  probe->mask = bytes / kRow - 1;
#ifdef MADV_HUGEPAGE
  madvise(probe->rows, bytes, MADV_HUGEPAGE);
#endif
  std::memset(probe->rows, 0, bytes);
  probe->indices.resize(threads);
  for (int t = 0; t < threads; ++t) {
    probe->indices[t].resize(count + kAhead);
    for (std::size_t i = 0; i < count + kAhead; ++i) {
      probe->indices[t][i] = static_cast<std::uint32_t>(mix(i + (std::uint64_t(t) << 40) + kGolden) & probe->mask);
    }
  }
  return probe;
}

// Visits count rows on each of the threads and returns the seconds it took.
// write: 1 = add to all 128 bytes of a row, 0 = read the first 64.
double probe_pass(Probe* probe, int threads, int write) {
  const std::uint64_t shift = mix(++probe->passes * kGolden) & probe->mask;
  std::vector<float> sums(threads * 16);  // a cache line apart
  auto work = [&](int t) {
    const auto& index = probe->indices[t];
    const std::size_t count = index.size() - kAhead;
    if (write) {
      update128(probe->rows, index.data(), count, shift, probe->mask);
    } else {
      sums[t * 16] = read64(probe->rows, index.data(), count, shift, probe->mask);
    }
  };
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(work, t);
  work(0);
  for (auto& other : others) other.join();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  volatile float keep = 0;  // the compiler must not drop the sums
  for (float sum : sums) keep = keep + sum;
  return seconds;
}

void probe_close(Probe* probe) {
  munmap(probe->mapping, probe->mapped);
  delete probe;
}

}
