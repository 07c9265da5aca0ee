// MurmurHash64A: the 64-bit hash of byte strings that other recommendation systems name "murmur".
//
// Like farm.h it is part of the data. The id of a crossed feature is this hash, with seed 0, of its two
// int64 ids.
#pragma once
#include <cstddef>
#include <cstdint>

namespace karvan {

uint64_t murmur_hash64a(const void* data, size_t size, uint64_t seed);

}  // namespace karvan
