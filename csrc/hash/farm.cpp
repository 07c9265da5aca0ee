#include "hash/farm.h"

#include <bit>
#include <cstring>
#include <utility>

namespace karvan {
namespace {

static_assert(std::endian::native == std::endian::little, "the hash reads words in little-endian order");

constexpr uint64_t kPrime0 = 0xc3a5c85c97cb3127ULL;
constexpr uint64_t kPrime1 = 0xb492b66fbe98f273ULL;
constexpr uint64_t kPrime2 = 0x9ae16a3b2f90404fULL;

struct Pair {
  uint64_t first = 0, second = 0;
};

uint64_t word64(const uint8_t* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

uint64_t word32(const uint8_t* at) {
  uint32_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

uint64_t fold(uint64_t x) { return x ^ (x >> 47); }

uint64_t join(uint64_t u, uint64_t v, uint64_t multiplier) {
  const uint64_t inner = fold((u ^ v) * multiplier);
  return fold((v ^ inner) * multiplier) * multiplier;
}

Pair absorb32(const uint8_t* at, uint64_t a, uint64_t b) {
  const uint64_t last = word64(at + 24);
  const uint64_t start = a + word64(at);
  const uint64_t sum = start + word64(at + 8) + word64(at + 16);
  return {sum + last, std::rotr(b + start + last, 21) + std::rotr(sum, 44) + start};
}

// The running state of inputs longer than 64 bytes.
struct Blocks {
  uint64_t x, y, z;
  Pair v, w;

  // The last block is the same step with another multiplier and with two terms scaled by nine.
  void absorb64(const uint8_t* at, uint64_t multiplier, uint64_t scale) {
    x = std::rotr(x + y + v.first + word64(at + 8), 37) * multiplier;
    y = std::rotr(y + v.second + word64(at + 48), 42) * multiplier;
    x ^= w.second * scale;
    y += v.first * scale + word64(at + 40);
    z = std::rotr(z + w.first, 33) * multiplier;
    v = absorb32(at, v.second * multiplier, x + w.first);
    w = absorb32(at + 32, z + w.second, y + word64(at + 16));
    std::swap(z, x);
  }
};

uint64_t hash_to_16(const uint8_t* s, size_t size) {
  if (size == 0) return kPrime2;
  const uint64_t multiplier = kPrime2 + 2 * size;
  if (size >= 8) {
    const uint64_t a = word64(s) + kPrime2, b = word64(s + size - 8);
    return join(std::rotr(b, 37) * multiplier + a, (std::rotr(a, 25) + b) * multiplier, multiplier);
  }
  if (size >= 4) return join(size + (word32(s) << 3), word32(s + size - 4), multiplier);
  const uint64_t y = s[0] + (uint64_t{s[size / 2]} << 8);
  const uint64_t z = size + (uint64_t{s[size - 1]} << 2);
  return fold(y * kPrime2 ^ z * kPrime0) * kPrime2;
}

uint64_t hash_17_to_32(const uint8_t* s, size_t size) {
  const uint64_t multiplier = kPrime2 + 2 * size;
  const uint64_t a = word64(s) * kPrime1, b = word64(s + 8);
  const uint64_t c = word64(s + size - 8) * multiplier, d = word64(s + size - 16) * kPrime2;
  return join(std::rotr(a + b, 43) + std::rotr(c, 30) + d, a + std::rotr(b + kPrime2, 18) + c, multiplier);
}

uint64_t hash_33_to_64(const uint8_t* s, size_t size) {
  const uint64_t multiplier = kPrime2 + 2 * size;
  const uint64_t a = word64(s) * kPrime2, b = word64(s + 8);
  const uint64_t c = word64(s + size - 8) * multiplier, d = word64(s + size - 16) * kPrime2;
  const uint64_t y = std::rotr(a + b, 43) + std::rotr(c, 30) + d;
  const uint64_t z = join(y, a + std::rotr(b + kPrime2, 18) + c, multiplier);
  const uint64_t e = word64(s + 16) * multiplier, f = word64(s + 24);
  const uint64_t g = (y + word64(s + size - 32)) * multiplier, h = (z + word64(s + size - 24)) * multiplier;
  return join(std::rotr(e + f, 43) + std::rotr(g, 30) + h, e + std::rotr(f + a, 18) + g, multiplier);
}

uint64_t hash_long(const uint8_t* s, size_t size) {
  constexpr uint64_t seed = 81;
  Blocks state{};
  state.y = seed * kPrime1 + 113;
  state.z = fold(state.y * kPrime2 + 113) * kPrime2;
  state.x = seed * kPrime2 + word64(s);
  // The last block always ends at the input's end, so it overlaps the one before unless size divides by 64.
  const size_t whole = (size - 1) / 64;
  for (size_t block = 0; block < whole; ++block) state.absorb64(s + 64 * block, kPrime1, 1);

  const uint64_t multiplier = kPrime1 + ((state.z & 0xff) << 1);
  Pair &v = state.v, &w = state.w;
  w.first += (size - 1) % 64;
  v.first += w.first;
  w.first += v.first;
  state.absorb64(s + size - 64, multiplier, 9);
  return join(join(v.first, w.first, multiplier) + fold(state.y) * kPrime0 + state.z,
              join(v.second, w.second, multiplier) + state.x, multiplier);
}

}  // namespace

uint64_t farm_fingerprint64(const void* data, size_t size) {
  const auto* s = static_cast<const uint8_t*>(data);
  if (size <= 16) return hash_to_16(s, size);
  if (size <= 32) return hash_17_to_32(s, size);
  if (size <= 64) return hash_33_to_64(s, size);
  return hash_long(s, size);
}

void farm_hash_stack(uint64_t key, int rounds, uint64_t size, int64_t* out) {
  for (int round = 0; round < rounds; ++round) {
    key = farm_fingerprint64(&key, sizeof key);
    out[round] = static_cast<int64_t>(key % size + static_cast<uint64_t>(round) * size);
  }
}

}  // namespace karvan
