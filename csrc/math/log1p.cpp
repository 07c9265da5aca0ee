// 1 + x = 2^k (1 + f) with f in [-1/4, 1/2); log(1 + x) = k log 2 + log(1 + f), and log(1 + f) = f - f²/2 + f³ p(f).
// p is the polynomial of degree 7 with the smallest greatest error relative to the result, 2^-27. f is found from x
// and not from 1 + x, so that nothing of a tiny x is lost. There are no branches in the usual case: compilers make vector
// code of it.
#include "math/log1p.h"

#ifdef __ARM_NEON
#include <arm_neon.h>
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "math/widest.h"

namespace karvan {
namespace {

constexpr float kP[] = {0.3333345055580139f,  -0.2500009536743164f,  0.19990861415863037f, -0.1664731204509735f,
                        0.14478400349617004f, -0.13161195814609528f, 0.10462995618581772f, -0.0450744666159153f};
// log 2 / 2^23 in two parts, the first so short that its product with k 2^23 is exact.
constexpr float kLog2High = 0.693145751953125f * 0x1p-23f, kLog2Low = 1.42860677e-6f * 0x1p-23f;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNone = std::numeric_limits<float>::quiet_NaN();
constexpr size_t kBlock = 512;

inline uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }

// Whether 1 + x lies above 0 and so far below infinity that k is at most 127.
inline bool is_usual(float x) { return bits_of(1.0f + x) - 1 < bits_of(0x1.8p127f) - 1; }

[[gnu::always_inline]] inline float log1p_usual(float x) {  // or the loop is not made vector code
  const uint32_t shift = (bits_of(1.0f + x) - bits_of(0.75f)) & 0xff800000;  // k 2^23: k as an exponent
  const float scaled = std::bit_cast<float>(bits_of(x) - shift);             // x / 2^k
  const float f = scaled + (std::bit_cast<float>(bits_of(1.0f) - shift) - 1.0f);
  const auto k = static_cast<float>(static_cast<int32_t>(shift));
  const float f2 = f * f, f4 = f2 * f2;
  const float low = (kP[0] + kP[1] * f) + (kP[2] + kP[3] * f) * f2;
  const float high = (kP[4] + kP[5] * f) + (kP[6] + kP[7] * f) * f2;
  const float tail = f2 * (f * (low + high * f4) - 0.5f);
  return std::copysign(k * kLog2High + (f + (tail + k * kLog2Low)), x);  // minus zero keeps its sign
}

float log1p_unusual(float x) {
  if (x > 1) return x < kInfinity ? log1p_usual(0.5f * x) + 0.693147182f : x;  // 1 is lost beside such x
  return x == -1.0f ? -kInfinity : kNone;
}

// What is not a number stays so. ARM has instructions for just that, but compilers do not make them of the comparisons.
[[gnu::always_inline]] inline void clip(const float* values, size_t count, float* out, Limits limits) {
  const auto [low, high] = limits;
  size_t i = 0;
#ifdef __ARM_NEON
  for (; i + 4 <= count; i += 4)
    vst1q_f32(out + i, vminq_f32(vmaxq_f32(vld1q_f32(values + i), vdupq_n_f32(low)), vdupq_n_f32(high)));
#endif
  for (; i < count; ++i) {
    const float x = low > values[i] ? low : values[i];
    out[i] = high < x ? high : x;
  }
}

[[gnu::always_inline]] inline void log1p_block(const float* values, size_t count, float* out) {
  uint32_t unusual = 0;
  for (size_t i = 0; i < count; ++i) {
    unusual |= is_usual(values[i]) ? 0u : 1u;
    out[i] = log1p_usual(values[i]);
  }
  for (size_t i = 0; unusual && i < count; ++i)
    if (!is_usual(values[i])) out[i] = log1p_unusual(values[i]);
}

[[gnu::always_inline]] inline void log1p_all(const float* values, size_t count, float* out, Limits limits) {
  const bool clips = limits.low != -kInfinity || limits.high != kInfinity;
  float clipped[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t size = std::min(kBlock, count - begin);
    if (clips) clip(values + begin, size, clipped, limits);
    log1p_block(clips ? clipped : values + begin, size, out + begin);
  }
}

}  // namespace

void log1p(const float* values, size_t count, float* out, Limits limits) {
  run_widest<log1p_all>(values, count, out, limits);
}

}  // namespace karvan
