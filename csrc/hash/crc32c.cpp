#include "hash/crc32c.h"

#include <cstddef>
#include <cstring>

#if defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <immintrin.h>
#endif

#include "hash/crc_tables.h"

namespace karvan {
namespace {

constexpr auto by_tables = crc_by_tables<0x82F63B78u>;

#if defined(__aarch64__) && defined(__linux__)

bool has_instructions() { return getauxval(AT_HWCAP) & HWCAP_CRC32; }

__attribute__((target("+crc"))) uint32_t by_instructions(const uint8_t* at, size_t left, uint32_t rest) {
  for (; left >= 8; at += 8, left -= 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    rest = __builtin_aarch64_crc32cx(rest, word);
  }
  for (; left; ++at, --left) rest = __builtin_aarch64_crc32cb(rest, *at);
  return rest;
}

#elif defined(__x86_64__)

bool has_instructions() { return __builtin_cpu_supports("sse4.2"); }

__attribute__((target("sse4.2"))) uint32_t by_instructions(const uint8_t* at, size_t left, uint32_t rest) {
  uint64_t kept = rest;
  for (; left >= 8; at += 8, left -= 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    kept = _mm_crc32_u64(kept, word);
  }
  rest = static_cast<uint32_t>(kept);
  for (; left; ++at, --left) rest = _mm_crc32_u8(rest, *at);
  return rest;
}

#else

bool has_instructions() { return false; }
uint32_t by_instructions(const uint8_t* at, size_t left, uint32_t rest) { return by_tables(at, left, rest); }

#endif

}  // namespace

uint32_t crc32c(std::span<const uint8_t> bytes, uint32_t before) {
  static const bool fast = has_instructions();
  return ~(fast ? by_instructions : by_tables)(bytes.data(), bytes.size(), ~before);
}

uint32_t crc32c_by_tables(std::span<const uint8_t> bytes, uint32_t before) {
  return ~by_tables(bytes.data(), bytes.size(), ~before);
}

}  // namespace karvan
