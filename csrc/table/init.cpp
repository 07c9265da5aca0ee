#include "table/init.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "hash/farm.h"
#include "hash/mix.h"

namespace karvan {
namespace {

static_assert(std::endian::native == std::endian::little, "a draw is split by copying it to two numbers");

constexpr int kBlock = 64;  // columns drawn at a time: the draws stay in the first-level cache
constexpr int kGammaAttempts = 16, kPoissonMost = 2000;

// Calls put(x, out, columns) for one block of columns after another. The draws have a loop of their own,
// since 64-bit products resist the vector units, while what put does with them mostly does not.
template <class Put>
void for_blocks(uint64_t state, float* out, int dim, Put put) {
  uint32_t x[kBlock];
  for (int begin = 0; begin < dim; begin += kBlock) {
    const int columns = std::min(kBlock, dim - begin);
    for (int pair = 0; 2 * pair < columns; ++pair) {
      const uint64_t both = draw(state, static_cast<uint64_t>(begin / 2 + pair));
      std::memcpy(x + 2 * pair, &both, sizeof both);
    }
    put(x, out + begin, columns);
  }
}

// The natural logarithm of a positive double, to about 1e-15: libm's differs from one system to the next.
// With u = m * 2^e, m in [sqrt(1/2), sqrt(2)) and s = (m - 1) / (m + 1), it is e ln 2 + 2 (s + s^3/3 + ...
// + s^19/19), summed by Horner's rule.
double natural_log(double u) {
  constexpr double ln2 = 0.693147180559945309417;
  constexpr uint64_t sqrt_half = 0x3fe6a09e667f3bcdULL;  // the bits of sqrt(1/2)
  const uint64_t bits = std::bit_cast<uint64_t>(u);
  const int64_t exponent = static_cast<int64_t>(bits - sqrt_half) >> 52;
  const double m = std::bit_cast<double>(bits - (static_cast<uint64_t>(exponent) << 52));
  const double s = (m - 1) / (m + 1), square = s * s;
  double sum = 1.0 / 19;
  for (int power = 17; power >= 1; power -= 2) sum = sum * square + 1.0 / power;
  return static_cast<double>(exponent) * ln2 + 2 * s * sum;
}

// e to the power of x <= 0, to about 1e-13, and 0 below -700. With n the integer nearest to -x / ln 2 it is 2^-n times the
// series of r = x + n ln 2 up to r^14 / 14!.
double natural_exp(double x) {
  constexpr double ln2 = 0.693147180559945309417;
  if (x < -700) return 0;
  const auto n = static_cast<int64_t>(0.5 - x / ln2);
  const double r = x + static_cast<double>(n) * ln2;
  double sum = 1;
  for (int power = 14; power >= 1; --power) sum = sum * r / power + 1;
  return sum * std::bit_cast<double>(static_cast<uint64_t>(1023 - n) << 52);
}

// The u in (0, 1) that x represents.
double unit(uint32_t x) { return (static_cast<double>(x) + 0.5) * 0x1p-32; }

// u - 1/2 for the u in (0, 1) that x represents. It is exact, so the way through signed numbers, whose
// conversion every vector unit has, gives the same as (x + 0.5) * 2^-32 - 0.5.
inline double centred(uint32_t x) {
  return (static_cast<double>(static_cast<int32_t>(x ^ 0x80000000u)) + 0.5) * 0x1p-32;
}

// The polynomial whose coefficients are given from the highest power down.
[[gnu::always_inline]] inline double horner(double r, const double (&coefficients)[8]) {
  double sum = coefficients[0];
  for (int i = 1; i < 8; ++i) sum = sum * r + coefficients[i];
  return sum;
}

// AS 241, PPND16, by its two ranges. The third, beyond sqrt(-ln u) = 5, cannot occur: the smallest u is
// 2^-33.
bool in_tail(uint32_t x) { return std::abs(centred(x)) > 0.425; }

[[gnu::always_inline]] inline double central_quantile(uint32_t x) {
  const double q = centred(x), r = 0.180625 - q * q;
  const double above = horner(r, {2509.0809287301226727, 33430.575583588128105, 67265.770927008700853,
                                  45921.953931549871457, 13731.693765509461125, 1971.5909503065514427,
                                  133.14166789178437745, 3.3871328727963666080});
  const double below = horner(r, {5226.4952788528545610, 28729.085735721942674, 39307.895800092710610,
                                  21213.794301586595867, 5394.1960214247511077, 687.18700749205790830,
                                  42.313330701600911252, 1.0});
  return q * above / below;
}

double tail_quantile(uint32_t x) {
  const double q = centred(x), r = std::sqrt(-natural_log(0.5 - std::abs(q))) - 1.6;
  const double above = horner(r, {7.74545014278341407640e-4, 0.0227238449892691845833,
                                  0.241780725177450611770, 1.27045825245236838258, 3.64784832476320460504,
                                  5.76949722146069140550, 4.63033784615654529590, 1.42343711074968357734});
  const double below = horner(r, {1.05075007164441684324e-9, 5.47593808499534494600e-4,
                                  0.0151986665636164571966, 0.148103976427480074590, 0.689767334985100004550,
                                  1.67638483018380384940, 2.05319162663775882187, 1.0});
  return q < 0 ? -(above / below) : above / below;
}

float scaled(const Initialiser& init, double quantile) {
  return static_cast<float>(static_cast<double>(init.a) + static_cast<double>(init.b) * quantile);
}

float normal_value(const Initialiser& init, uint32_t x) {
  return scaled(init, in_tail(x) ? tail_quantile(x) : central_quantile(x));
}

// The central formula for all, which becomes vector code, then the 15 % in the tails once more.
void normal_block(const Initialiser& init, const uint32_t* x, float* out, int columns) {
  for (int c = 0; c < columns; ++c) out[c] = scaled(init, central_quantile(x[c]));
  for (int c = 0; c < columns; ++c) {
    if (in_tail(x[c])) out[c] = scaled(init, tail_quantile(x[c]));
  }
}

// The first x, up to 2^32, whose normal value satisfies a condition that stays true once it is.
template <class Condition>
uint64_t first_where(const Initialiser& init, Condition condition) {
  uint64_t low = 0, high = uint64_t{1} << 32;
  while (low < high) {
    const uint64_t middle = (low + high) / 2;
    if (condition(normal_value(init, static_cast<uint32_t>(middle)))) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// A search over the quantile itself needs no distribution function, and agrees with it to the last bit.
void find_range(Initialiser& init) {
  constexpr uint64_t most = std::numeric_limits<uint32_t>::max();
  const uint64_t inside = first_where(init, [&](float value) { return value >= init.lo; });
  const uint64_t above = first_where(init, [&](float value) { return value > init.hi; });
  init.first = static_cast<uint32_t>(std::min(inside, most));
  // Where no x falls inside, the nearest represents all and the clamp puts it on the bound. last is at
  // least 1, since 0 says that the range is not known yet.
  init.last = static_cast<uint32_t>(std::max({above, uint64_t{init.first} + 1, uint64_t{2}}) - 1);
}

void uniform(const Initialiser& init, uint64_t state, float* out, int dim) {
  const float low = init.a, width = init.b - init.a;
  const float top = std::max(low, std::nextafter(init.b, -std::numeric_limits<float>::infinity()));
  for_blocks(state, out, dim, [=](const uint32_t* x, float* block, int columns) {
    for (int c = 0; c < columns; ++c) {
      const float u = static_cast<float>(static_cast<int32_t>(x[c] >> 8)) * 0x1p-24f;
      block[c] = std::min(low + width * u, top);
    }
  });
}

void normal(const Initialiser& init, uint64_t state, float* out, int dim) {
  for_blocks(state, out, dim, [&](const uint32_t* x, float* block, int columns) {
    normal_block(init, x, block, columns);
  });
}

void truncated_normal(const Initialiser& init, uint64_t state, float* out, int dim) {
  const uint64_t count = uint64_t{init.last} - init.first + 1;
  for_blocks(state, out, dim, [&](uint32_t* x, float* block, int columns) {
    for (int c = 0; c < columns; ++c) x[c] = init.first + static_cast<uint32_t>(x[c] * count >> 32);
    normal_block(init, x, block, columns);
    for (int c = 0; c < columns; ++c) block[c] = std::clamp(block[c], init.lo, init.hi);
  });
}

// Marsaglia and Tsang: a normal z is bent to d (1 + c z)^3, and accepted with the ratio of the densities.
double gamma_value(double shape, uint64_t stream) {
  const double d = (shape < 1 ? shape + 1 : shape) - 1.0 / 3, c = 1 / std::sqrt(9 * d);
  double value = d;
  for (int attempt = 1; attempt <= kGammaAttempts; ++attempt) {
    const uint64_t both = draw(stream, static_cast<uint64_t>(attempt));
    const auto x = static_cast<uint32_t>(both);
    const double z = in_tail(x) ? tail_quantile(x) : central_quantile(x), root = 1 + c * z;
    if (!(root > 0)) continue;
    const double v = root * root * root;
    if (natural_log(unit(static_cast<uint32_t>(both >> 32))) < 0.5 * z * z + d - d * v + d * natural_log(v)) {
      value = d * v;
      break;
    }
  }
  if (shape < 1) value = value * natural_exp(natural_log(unit(static_cast<uint32_t>(draw(stream, 0)))) / shape);
  return value;
}

void gamma(const Initialiser& init, uint64_t state, float* out, int dim) {
  const double shape = init.a, scale = init.b;
  for (int c = 0; c < dim; ++c) {
    const double value = scale * gamma_value(shape, draw(state, static_cast<uint64_t>(c)));
    out[c] = std::clamp(static_cast<float>(value), init.lo, init.hi);
  }
}

void poisson(const Initialiser& init, uint64_t state, float* out, int dim) {
  const double rate = init.a, none = natural_exp(-rate);
  for_blocks(state, out, dim, [&](const uint32_t* x, float* block, int columns) {
    for (int c = 0; c < columns; ++c) {
      const double u = unit(x[c]);
      double probability = none, sum = none;
      int k = 0;
      while (u > sum && k < kPoissonMost) {
        ++k;
        probability = probability * rate / k;
        sum = sum + probability;
      }
      block[c] = std::clamp(static_cast<float>(k), init.lo, init.hi);
    }
  });
}

}  // namespace

Initialiser make_initialiser(std::string_view kind, float a, float b, float lo, float hi) {
  using Kind = Initialiser::Kind;
  Initialiser init{.kind = Kind::constant, .a = a, .b = b, .lo = lo, .hi = hi};
  if (kind == "constant") return init;
  if (kind == "uniform") {
    init.kind = Kind::uniform;
  } else if (kind == "normal") {
    init.kind = Kind::normal;
  } else if (kind == "truncated_normal") {
    init.kind = Kind::truncated_normal;
    find_range(init);
  } else if (kind == "gamma") {
    init.kind = Kind::gamma;
  } else if (kind == "poisson") {
    init.kind = Kind::poisson;
  } else {
    throw std::invalid_argument("Expected the initialiser constant, uniform, normal, truncated_normal, gamma or "
                                "poisson, received '" + std::string(kind) + "'.");
  }
  return init;
}

uint64_t table_stream(uint64_t seed, std::string_view table_name) {
  return mix(mix(seed) + farm_fingerprint64(table_name.data(), table_name.size()));
}

void initialise(const Initialiser& init, uint64_t table_stream, uint64_t key_hash, float* out, int dim) {
  const uint64_t state = mix(key_hash ^ table_stream);
  switch (init.kind) {
    case Initialiser::Kind::constant:
      std::fill_n(out, dim, init.a);
      return;
    case Initialiser::Kind::uniform:
      uniform(init, state, out, dim);
      return;
    case Initialiser::Kind::normal:
      normal(init, state, out, dim);
      return;
    case Initialiser::Kind::truncated_normal: {
      Initialiser ready = init;
      if (ready.last == 0) find_range(ready);
      truncated_normal(ready, state, out, dim);
      return;
    }
    case Initialiser::Kind::gamma:
      gamma(init, state, out, dim);
      return;
    case Initialiser::Kind::poisson:
      poisson(init, state, out, dim);
      return;
  }
}

}  // namespace karvan
