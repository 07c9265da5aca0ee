// The key mix: a bijection of 64-bit keys onto 64-bit hashes.
//
// Fixed as version 1: checkpoints and the choice of a key's shard depend on it, so it must not change.
// The index stores only the hash; unmix returns the key. `draw` makes many random numbers of one.
#pragma once
#include <cstdint>

namespace karvan {

inline constexpr int kMixVersion = 1;

inline uint64_t mix(uint64_t key) {
  key ^= key >> 32;
  key *= 0xd6e8feb86659fd93ULL;
  key ^= key >> 32;
  key *= 0xd6e8feb86659fd93ULL;
  key ^= key >> 32;
  return key;
}

inline uint64_t unmix(uint64_t hash) {
  hash ^= hash >> 32;
  hash *= 0xcfee444d8b59a89bULL;  // the multiplicative inverse of the constant above, modulo 2^64
  hash ^= hash >> 32;
  hash *= 0xcfee444d8b59a89bULL;
  hash ^= hash >> 32;
  return hash;
}

// Output p = 0, 1, ... of SplitMix64 started at `state` (Steele, Lea, Flood: Fast splittable pseudorandom number
// generators, 2014).
inline uint64_t draw(uint64_t state, uint64_t p) {
  uint64_t z = state + (p + 1) * 0x9e3779b97f4a7c15ULL;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

}  // namespace karvan
