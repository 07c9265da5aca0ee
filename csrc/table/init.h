// Initial values of rows, as a pure function of (seed, table name, key, column).
//
// A key gets the same vector in any run, on any number of shards, in any order of insertion, on any
// processor. So only integer operations and IEEE + - * / sqrt are used, without fused multiply-adds.
// Version 1 is this definition, which other code can reproduce bit for bit, for instance a GPU kernel:
//
//   stream  = mix(mix(seed) + farm_fingerprint64(table name)), modulo 2^64, see hash/mix.h and hash/farm.h
//   state   = mix(mix(key) ^ stream)
//   draw(p) = output p = 0, 1, ... of SplitMix64 started at `state`: from z = state + (p + 1) * G, where
//             G = 0x9e3779b97f4a7c15,
//               z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9
//               z = (z ^ z >> 27) * 0x94d049bb133111eb
//               draw = z ^ z >> 31
//             (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)
//   x(c)    = the low 32 bits of draw(c / 2) where column c is even, the high 32 bits where it is odd
//
//   constant          a
//   uniform           in float: u = (x >> 8) * 2^-24, then a + (b - a) * u, but at most the float before b
//                     (and a where b <= a)
//   normal            in double, then rounded to float: a + b * quantile(x)
//   truncated_normal  the same with first + (x * (last - first + 1) >> 32) for x, the product in 64 bits,
//                     then clamped to [lo, hi]; [first, last] are the x whose normal value lies in [lo, hi]
//   gamma             in double: b * g, then rounded to float and clamped to [lo, hi], where g has the shape a. It is
//                     drawn as Marsaglia and Tsang do (A simple method for generating gamma variables, 2000), from a
//                     stream of the column, SplitMix64 started at draw(c). Its output 0 is for shapes below 1, whose
//                     g is that of a + 1 times u^(1/a). Outputs 1 to 16 are one attempt each: z = quantile of the low
//                     32 bits, u = (x + 0.5) * 2^-32 of the high ones, and the first that is accepted counts. Where
//                     none is, which does not happen, g is d.
//   poisson           in double: the least k, up to 2000, with u <= p(0) + ... + p(k) for u = (x + 0.5) * 2^-32, where
//                     p(0) = exp(-a), p(k) = p(k - 1) * a / k; then rounded to float and clamped to [lo, hi]
//
// quantile(x) is the normal quantile at u = (x + 0.5) * 2^-32 by algorithm AS 241, PPND16 (Wichura: The
// percentage points of the normal distribution, 1988), in the order of operations and with the logarithm of
// init.cpp. It reaches 6.3 standard deviations.
#pragma once
#include <cstdint>
#include <string_view>

namespace karvan {

inline constexpr int kInitVersion = 1;

struct Initialiser {
  enum class Kind : uint8_t { constant, uniform, normal, truncated_normal, gamma, poisson };
  Kind kind = Kind::constant;
  // constant: a; uniform: [a, b); normal: mean a, std b; truncated_normal: also, only values in [lo, hi]; gamma: shape a,
  // scale b; poisson: mean a, at most 500; both then clamped to [lo, hi].
  float a = 0, b = 0, lo = 0, hi = 0;
  // The x of a truncated normal that fall into [lo, hi]; make_initialiser finds them once. Where last is 0,
  // each call of initialise searches them again, which is right but slow.
  uint32_t first = 0, last = 0;
};

// From the names of the kinds; throws std::invalid_argument for another one.
Initialiser make_initialiser(std::string_view kind, float a, float b, float lo, float hi);

// Once per table.
uint64_t table_stream(uint64_t seed, std::string_view table_name);

// The first dim columns of the row whose mix(key) is key_hash.
void initialise(const Initialiser& init, uint64_t table_stream, uint64_t key_hash, float* out, int dim);

}  // namespace karvan
