#include "hash/murmur.h"

#include <bit>
#include <cstring>

namespace karvan {
namespace {

static_assert(std::endian::native == std::endian::little, "the hash reads words in little-endian order");

constexpr uint64_t kMultiplier = 0xc6a4a7935bd1e995ULL;

uint64_t fold(uint64_t x) { return x ^ (x >> 47); }

}  // namespace

uint64_t murmur_hash64a(const void* data, size_t size, uint64_t seed) {
  const auto* at = static_cast<const uint8_t*>(data);
  uint64_t hash = seed ^ (size * kMultiplier);
  uint64_t word = 0;
  size_t left = size;
  for (; left >= 8; left -= 8, at += 8) {
    std::memcpy(&word, at, 8);
    hash = (hash ^ fold(word * kMultiplier) * kMultiplier) * kMultiplier;
  }
  // A tail goes in as one zero-padded word without the inner scrambling of the whole words.
  if (left > 0) {
    word = 0;
    std::memcpy(&word, at, left);
    hash = (hash ^ word) * kMultiplier;
  }
  return fold(fold(hash) * kMultiplier);
}

}  // namespace karvan
