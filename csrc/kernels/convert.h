// fp16 and bf16 to and from fp32, one element at a time. Internal linkage: each instruction set compiles its own.
#pragma once
#include <cstdint>
#include <cstring>

namespace karvan {

static inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
static inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

static inline float bf16_to_float(uint16_t half) { return bits_to_float(static_cast<uint32_t>(half) << 16); }

static inline float f16_to_float(uint16_t half) {
  const uint32_t magnitude = (half & 0x7fffu) << 13;
  // Scaling by 2^112 rebiases the exponent and normalises subnormals in one exact multiplication.
  float value = bits_to_float(magnitude) * 0x1p112f;
  uint32_t bits = float_to_bits(value);
  if ((half & 0x7c00u) == 0x7c00u) bits = magnitude | 0x7f800000u;
  return bits_to_float(bits | (half & 0x8000u) << 16);
}

// Rounds by adding `noise` in [0, 2^16) below the kept bits: 0x8000 - 1 + (kept bit) gives nearest-even, a uniform
// random number gives stochastic rounding. Values beyond the type's range become its largest finite value.
static inline uint16_t float_to_bf16(float value, uint32_t noise) {
  const uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);  // NaN stays NaN
  uint32_t magnitude = (bits & 0x7fffffffu) + noise;
  if (magnitude > 0x7f7fffffu) magnitude = 0x7f7f0000u;
  return static_cast<uint16_t>(bits >> 16 & 0x8000u) | static_cast<uint16_t>(magnitude >> 16);
}

static inline uint16_t float_to_f16(float value, uint32_t noise) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t sign = bits >> 16 & 0x8000u;
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477fe000u) return static_cast<uint16_t>(sign | 0x7bffu);
  if (magnitude < 0x38800000u) {  // subnormal in fp16: a multiple of 2^-24
    // In units of 2^-40 there are 16 bits below the ones that are kept.
    const auto fixed = static_cast<uint64_t>(bits_to_float(magnitude) * 0x1p40f) + noise;
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(fixed >> 16));
  }
  magnitude += noise >> 3;  // 13 bits are dropped
  const uint32_t half = (magnitude - 0x38000000u) >> 13;
  return static_cast<uint16_t>(sign | (half > 0x7bffu ? 0x7bffu : half));
}

static inline uint16_t nearest_bf16(float value) {
  return float_to_bf16(value, 0x7fffu + (float_to_bits(value) >> 16 & 1));
}
static inline uint16_t nearest_f16(float value) {
  const uint32_t bits = float_to_bits(value), magnitude = bits & 0x7fffffffu;
  if (magnitude < 0x38800000u) {  // subnormal in fp16: adding 2^23 rounds to a whole number of units of 2^-24
    const float units = (bits_to_float(magnitude) * 0x1p24f + 0x1p23f) - 0x1p23f;
    return static_cast<uint16_t>((bits >> 16 & 0x8000u) | static_cast<uint32_t>(units));
  }
  return float_to_f16(value, (0xfffu + (magnitude >> 13 & 1)) << 3);
}

}  // namespace karvan
