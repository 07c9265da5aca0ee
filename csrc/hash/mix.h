// The key mix: a bijection of 64-bit keys onto 64-bit hashes.
//
// Fixed as version 1: checkpoints and the choice of a key's shard depend on it, so it must not change.
// The index stores only the hash; unmix returns the key.
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

}  // namespace karvan
