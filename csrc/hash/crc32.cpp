#include "hash/crc32.h"

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

constexpr auto by_tables = crc_by_tables<0xEDB88320u>;

#if defined(__aarch64__) && defined(__linux__)

bool has_instructions() { return getauxval(AT_HWCAP) & HWCAP_CRC32; }

__attribute__((target("+crc"))) uint32_t by_instructions(const uint8_t* at, size_t left, uint32_t rest) {
  for (; left >= 8; at += 8, left -= 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    rest = __builtin_aarch64_crc32x(rest, word);
  }
  for (; left; ++at, --left) rest = __builtin_aarch64_crc32b(rest, *at);
  return rest;
}

#elif defined(__x86_64__)

bool has_instructions() { return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"); }

// Four times 16 bytes are kept as a remainder and folded onto the next 64 by carry-less products with powers of x modulo
// the polynomial, bits reflected; at the end onto 16, whose 128 bits go through the tables.
__attribute__((target("pclmul,sse4.1"))) uint32_t by_instructions(const uint8_t* at, size_t left, uint32_t rest) {
  if (left < 128) return by_tables(at, left, rest);
  const auto load = [](const uint8_t* from) __attribute__((target("pclmul,sse4.1"), always_inline)) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  };
  const auto fold = [](__m128i kept, __m128i powers, __m128i next) __attribute__((target("pclmul,sse4.1"), always_inline)) {
    const __m128i low = _mm_clmulepi64_si128(kept, powers, 0x00), high = _mm_clmulepi64_si128(kept, powers, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
  };
  const __m128i by_64 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4), by_16 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
  __m128i kept[4];
  for (int i = 0; i < 4; ++i) kept[i] = load(at + 16 * i);
  kept[0] = _mm_xor_si128(kept[0], _mm_cvtsi32_si128(static_cast<int>(rest)));
  for (at += 64, left -= 64; left >= 64; at += 64, left -= 64)
    for (int i = 0; i < 4; ++i) kept[i] = fold(kept[i], by_64, load(at + 16 * i));
  for (int i = 1; i < 4; ++i) kept[i] = fold(kept[i - 1], by_16, kept[i]);
  uint8_t last[16];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(last), kept[3]);
  return by_tables(at, left, by_tables(last, 16, 0));
}

#else

bool has_instructions() { return false; }
uint32_t by_instructions(const uint8_t* at, size_t left, uint32_t rest) { return by_tables(at, left, rest); }

#endif

}  // namespace

uint32_t crc32(std::span<const uint8_t> bytes, uint32_t before) {
  static const bool fast = has_instructions();
  return ~(fast ? by_instructions : by_tables)(bytes.data(), bytes.size(), ~before);
}

uint32_t crc32_by_tables(std::span<const uint8_t> bytes, uint32_t before) {
  return ~by_tables(bytes.data(), bytes.size(), ~before);
}

}  // namespace karvan
