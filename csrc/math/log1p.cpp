// 1 + x = 2^k (1 + f) with f in [-1/4, 1/2); log(1 + x) = k log 2 + log(1 + f), and log(1 + f) = f - f²/2 + f³ p(f).
// p is the polynomial of degree 7 with the smallest greatest error relative to the result, 2^-27. f is found from x
// and not from 1 + x, so that nothing of a tiny x is lost. There are no branches: compilers make vector code of it.
#include "math/log1p.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace karvan {
namespace {

constexpr float kP[] = {0.3333345055580139f,  -0.2500009536743164f,  0.19990861415863037f, -0.1664731204509735f,
                        0.14478400349617004f, -0.13161195814609528f, 0.10462995618581772f, -0.0450744666159153f};
// log 2 in two parts, the first so short that its product with k is exact.
constexpr float kLog2High = 0.693145751953125f, kLog2Low = 1.42860677e-6f;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNone = std::numeric_limits<float>::quiet_NaN();

inline uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }

// For finite x above -1.
inline float log1p_finite(float x) {
  const uint32_t shift = (bits_of(1.0f + x) - bits_of(0.75f)) & 0xff800000;  // k in the place of an exponent
  const auto power = static_cast<int32_t>(bits_of(1.0f) - shift);            // 1 / 2^k, or below 0 for k = 128
  const float f = std::bit_cast<float>(bits_of(x) - shift) + (std::bit_cast<float>(std::max(power, 0)) - 1.0f);
  const float k = static_cast<float>(static_cast<int32_t>(shift)) * 0x1p-23f;
  const float f2 = f * f, f4 = f2 * f2;
  const float low = (kP[0] + kP[1] * f) + (kP[2] + kP[3] * f) * f2;
  const float high = (kP[4] + kP[5] * f) + (kP[6] + kP[7] * f) * f2;
  const float tail = f2 * (f * (low + high * f4) - 0.5f);
  return k * kLog2High + (f + (tail + k * kLog2Low));
}

}  // namespace

void log1p(const float* values, size_t count, float* out) {
  for (size_t i = 0; i < count; ++i) {
    const float x = values[i];
    float made = std::copysign(log1p_finite(x), x);  // of minus zero, too
    made = x < kInfinity ? made : x;                 // a NaN, too
    out[i] = x <= -1.0f ? (x == -1.0f ? -kInfinity : kNone) : made;
  }
}

}  // namespace karvan
