#include "kernels/convert.h"

#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "tests/check.h"
#include "tests/tools.h"

using namespace karvan;
using namespace karvan::test;

namespace {

// The two formats by their definition, in double: (sign, exponent, mantissa).
struct Format {
  const char* name;
  int mantissa, bias;
  uint16_t largest;  // finite
  float (*widen)(uint16_t);
  uint16_t (*nearest)(float);
  uint16_t (*round)(float, uint32_t);

  double value(uint16_t half) const {
    const int magnitude = half & 0x7fff, exponent = magnitude >> mantissa;
    const int fraction = magnitude & ((1 << mantissa) - 1);
    const double size = exponent == 0 ? std::ldexp(fraction, 1 - bias - mantissa)
                                      : std::ldexp(fraction + (1 << mantissa), exponent - bias - mantissa);
    return half & 0x8000 ? -size : size;
  }
  // The largest magnitude that is not above |x|; halves of one sign are in order of their value.
  uint16_t towards_zero(double x) const {
    uint16_t low = 0, high = largest;
    while (low < high) {
      const auto middle = static_cast<uint16_t>((low + high + 1) / 2);
      if (value(middle) <= std::fabs(x)) low = middle;
      else high = static_cast<uint16_t>(middle - 1);
    }
    return low;
  }
  uint16_t slow_nearest(double x) const {
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0, low = towards_zero(x);
    if (low == largest) return sign | low;
    const double down = std::fabs(x) - value(low), up = value(static_cast<uint16_t>(low + 1)) - std::fabs(x);
    const bool take_up = up < down || (up == down && (low & 1));
    return static_cast<uint16_t>(sign | (low + take_up));
  }
};

const Format kFormats[] = {
    {"f16", 10, 15, 0x7bff, [](uint16_t h) { return f16_to_float(h); },
     [](float x) { return nearest_f16(x); },
     [](float x, uint32_t noise) { return float_to_f16(x, noise); }},
    {"bf16", 7, 127, 0x7f7f, [](uint16_t h) { return bf16_to_float(h); },
     [](float x) { return nearest_bf16(x); },
     [](float x, uint32_t noise) { return float_to_bf16(x, noise); }},
};

// Around every finite half: itself, the middle to the next one, and their neighbours in float. These are all
// the places where rounding can go wrong.
void each_hard_value(const Format& format, const std::function<void(float)>& f) {
  for (uint32_t half = 0; half <= format.largest; ++half) {
    const double here = format.value(static_cast<uint16_t>(half));
    const double next = half < format.largest ? format.value(static_cast<uint16_t>(half + 1)) : here;
    for (const double at : {here, (here + next) / 2}) {
      const auto x = static_cast<float>(at);
      for (const float value : {x, std::nextafter(x, 0.0f), std::nextafter(x, INFINITY)}) {
        f(value);
        f(-value);
      }
    }
  }
}

}  // namespace

TEST(halves_widen_to_their_value) {
  for (const Format& format : kFormats) {
    int wrong = 0;
    for (uint32_t half = 0; half < 65536; ++half) {
      if ((half & 0x7fff) > format.largest) continue;
      const float got = format.widen(static_cast<uint16_t>(half));
      wrong += got != format.value(static_cast<uint16_t>(half)) || std::signbit(got) != (half >= 0x8000);
    }
    CHECK_EQ(wrong, 0);
  }
}

TEST(halves_come_back_exactly) {
  for (const Format& format : kFormats) {
    int wrong = 0;
    for (uint32_t half = 0; half < 65536; ++half) {
      const float wide = format.widen(static_cast<uint16_t>(half));
      const uint16_t sign = half & 0x8000, magnitude = half & 0x7fff;
      const int infinite = ((format.largest >> format.mantissa) + 1) << format.mantissa;
      const uint16_t back = format.nearest(wide);
      if (magnitude < infinite)
        wrong += back != half || format.round(wide, 0) != half || format.round(wide, 0xffff) != half;
      else if (magnitude == infinite) wrong += !std::isinf(wide) || back != (sign | format.largest);
      else wrong += !std::isnan(wide) || !std::isnan(format.widen(back)) || (back & 0x8000) != sign;
    }
    CHECK_EQ(wrong, 0);
  }
}

TEST(nearest_rounds_to_nearest_even) {
  if (KARVAN_TSAN) return;  // one thread
  for (const Format& format : kFormats) {
    int wrong = 0;
    float first = 0;
    const auto check = [&](float x) {
      if (!std::isfinite(x) || format.nearest(x) == format.slow_nearest(x)) return;
      if (wrong++ == 0) first = x;
    };
    each_hard_value(format, check);
    Random random(1);
    for (int i = 0; i < 100000; ++i) check(bits_to_float(static_cast<uint32_t>(random())));
    if (wrong) std::fprintf(stderr, "%s: first wrong value %a\n", format.name, first);
    CHECK_EQ(wrong, 0);
  }
}

TEST(stochastic_rounding_gives_one_of_the_two_neighbours) {
  if (KARVAN_TSAN) return;  // one thread
  for (const Format& format : kFormats) {
    int wrong = 0;
    const auto check = [&](float x) {
      if (!std::isfinite(x)) return;
      const uint16_t sign = std::signbit(x) ? 0x8000 : 0, low = format.towards_zero(x);
      const bool exact = format.value(low) == std::fabs(x);
      const uint16_t high = exact || low == format.largest ? low : static_cast<uint16_t>(low + 1);
      for (const uint32_t noise : {0u, 1u, 0x7fffu, 0x8000u, 0xfffeu, 0xffffu}) {
        const uint16_t got = format.round(x, noise);
        wrong += got != (sign | low) && got != (sign | high);
      }
      wrong += format.round(x, 0) != (sign | low);
    };
    each_hard_value(format, check);
    Random random(2);
    for (int i = 0; i < 50000; ++i) check(bits_to_float(static_cast<uint32_t>(random())));
    CHECK_EQ(wrong, 0);
  }
}

// Over all 65536 noises the average is the value itself, down to the bits the noise cannot see.
TEST(stochastic_rounding_is_unbiased) {
  for (const Format& format : kFormats) {
    for (const float x : {1.0f / 3, -2.7182818f, 1e-3f, 12345.678f, 3e-5f, -1e-6f, 2.5e-7f, 6e-8f, 2e-8f}) {
      const uint16_t low = format.towards_zero(x);
      const double ulp = format.value(static_cast<uint16_t>(low + 1)) - format.value(low);
      double sum = 0;
      for (uint32_t noise = 0; noise < 65536; ++noise) sum += format.widen(format.round(x, noise));
      CHECK(std::fabs(sum / 65536 - x) <= ulp / 65536);
    }
  }
}

TEST(values_beyond_the_range_become_the_largest_finite) {
  for (const Format& format : kFormats) {
    const double largest = format.value(format.largest);
    for (const float x : {static_cast<float>(largest), std::nextafter(static_cast<float>(largest), INFINITY),
                          std::numeric_limits<float>::max(), INFINITY}) {
      for (const uint32_t noise : {0u, 0x8000u, 0xffffu}) {
        CHECK_EQ(format.round(x, noise), format.largest);
        CHECK_EQ(format.round(-x, noise), 0x8000 | format.largest);
      }
      CHECK_EQ(format.nearest(x), format.largest);
    }
    for (const uint32_t noise : {0u, 0x8000u, 0xffffu}) {
      CHECK(std::isnan(format.widen(format.round(NAN, noise))));
      CHECK(std::isnan(format.widen(format.round(bits_to_float(0xff800001u), noise))));
    }
  }
}
