// FarmHash Fingerprint64: the 64-bit hash of byte strings that other recommendation systems name "farm".
//
// The value is part of the data: ids of other systems must get the same rows here. So it is the fixed
// variant (farmhashna), never those that change with the machine's instruction set.
#pragma once
#include <cstddef>
#include <cstdint>

namespace karvan {

uint64_t farm_fingerprint64(const void* data, size_t size);

// Hash-stack: one key is represented by `rounds` rows of a small table, so that few rows serve many keys and two
// keys seldom share all of theirs. A round's hash feeds the next; out[r] lies in [r * size, (r + 1) *
// size).
void farm_hash_stack(uint64_t key, int rounds, uint64_t size, int64_t* out);

}  // namespace karvan
