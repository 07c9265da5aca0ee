// Hashes, id helpers and initialisers on contiguous CPU arrays; results go into arrays the caller allocates.
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>

#include "bindings/bindings.h"
#include "hash/crc32.h"
#include "hash/farm.h"
#include "hash/mix.h"
#include "hash/murmur.h"
#include "table/init.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace karvan::bindings {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Keys = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using KeysOut = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using HashesOut = nb::ndarray<uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using VectorsOut = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Taking and giving back the interpreter's lock costs about as much as hashing this many values.
constexpr size_t kWorthRelease = 256;

template <class Work>
void run(size_t size, Work work) {
  if (size < kWorthRelease) {
    work();
  } else {
    nb::gil_scoped_release release;
    work();
  }
}

void expect_size(const char* what, size_t received, size_t expected) {
  if (received == expected) return;
  throw std::invalid_argument(std::string(what) + " must have " + std::to_string(expected) +
                              " entries, but has " + std::to_string(received) + ".");
}

int64_t farm64(nb::bytes data) { return static_cast<int64_t>(farm_fingerprint64(data.c_str(), data.size())); }

int64_t murmur64a(nb::bytes data, uint64_t seed) {
  return static_cast<int64_t>(murmur_hash64a(data.c_str(), data.size(), seed));
}

void check_offsets(const int64_t* offsets, size_t rows, size_t size) {
  using std::to_string;
  if (offsets[0] < 0) {
    throw std::invalid_argument("offsets must not be negative, but start at " + to_string(offsets[0]) + ".");
  }
  for (size_t row = 0; row < rows; ++row) {
    if (offsets[row] <= offsets[row + 1]) continue;
    throw std::invalid_argument("offsets must not decrease, but go from " + to_string(offsets[row]) + " to " +
                                to_string(offsets[row + 1]) + " at row " + to_string(row) + ".");
  }
  if (static_cast<uint64_t>(offsets[rows]) > size) {
    throw std::invalid_argument("offsets must end within the " + to_string(size) + " bytes, but end at " +
                                to_string(offsets[rows]) + ".");
  }
}

template <class Hash>
void hash_rows(const Bytes& data, const Keys& offsets, const KeysOut& out, Hash hash) {
  const uint8_t* bytes = data.data();
  const int64_t* bounds = offsets.data();
  int64_t* hashes = out.data();
  const size_t rows = out.size(), size = data.size();
  run(size + rows, [=] {
    check_offsets(bounds, rows, size);
    for (size_t row = 0; row < rows; ++row) {
      const auto length = static_cast<size_t>(bounds[row + 1] - bounds[row]);
      hashes[row] = static_cast<int64_t>(hash(bytes + bounds[row], length));
    }
  });
}

void hash_bytes(std::string_view kind, Bytes data, Keys offsets, KeysOut out) {
  if (offsets.size() == 0) throw std::invalid_argument("offsets must have rows + 1 entries, but has 0.");
  expect_size("out", out.size(), offsets.size() - 1);
  if (kind == "farm") {
    hash_rows(data, offsets, out, farm_fingerprint64);
  } else if (kind == "murmur") {
    hash_rows(data, offsets, out, [](const uint8_t* s, size_t size) { return murmur_hash64a(s, size, 0); });
  } else {
    throw std::invalid_argument("Expected the hash farm or murmur, received '" + std::string(kind) + "'.");
  }
}

void hash_stack(Keys values, int rounds, int64_t size, KeysOut out) {
  if (rounds < 1) {
    throw std::invalid_argument("rounds must be at least 1, but is " + std::to_string(rounds) + ".");
  }
  if (size < 1 || size > std::numeric_limits<int64_t>::max() / rounds) {
    throw std::invalid_argument("size must be at least 1 and rounds * size below 2^63, but size is " +
                                std::to_string(size) + " and rounds is " + std::to_string(rounds) + ".");
  }
  expect_size("out", out.size(), values.size() * static_cast<size_t>(rounds));
  const int64_t* keys = values.data();
  int64_t* rows = out.data();
  const size_t count = values.size();
  run(count * static_cast<size_t>(rounds), [=] {
    for (size_t i = 0; i < count; ++i) {
      farm_hash_stack(static_cast<uint64_t>(keys[i]), rounds, static_cast<uint64_t>(size), rows + i * rounds);
    }
  });
}

void mix_keys(Keys keys, HashesOut out) {
  expect_size("out", out.size(), keys.size());
  const int64_t* key = keys.data();
  uint64_t* hashes = out.data();
  const size_t count = keys.size();
  run(count, [=] {
    for (size_t i = 0; i < count; ++i) hashes[i] = mix(static_cast<uint64_t>(key[i]));
  });
}

void fill(std::string_view kind, float a, float b, float lo, float hi, uint64_t seed, std::string_view table,
          Keys keys, VectorsOut out) {
  const Initialiser init = make_initialiser(kind, a, b, lo, hi);
  if (out.shape(0) != keys.size()) {
    throw std::invalid_argument("out must have one row for each of the " + std::to_string(keys.size()) +
                                " keys, but has " + std::to_string(out.shape(0)) + ".");
  }
  if (out.shape(1) > static_cast<size_t>(std::numeric_limits<int>::max())) {
    throw std::invalid_argument("out must have fewer than 2^31 columns, but has " +
                                std::to_string(out.shape(1)) + ".");
  }
  const uint64_t stream = table_stream(seed, table);
  const int64_t* key = keys.data();
  float* vectors = out.data();
  const size_t rows = keys.size(), dim = out.shape(1);
  run(out.size(), [=] {
    for (size_t row = 0; row < rows; ++row) {
      initialise(init, stream, karvan::mix(static_cast<uint64_t>(key[row])), vectors + row * dim,
                 static_cast<int>(dim));
    }
  });
}

}  // namespace

void bind_hashing(nb::module_& m) {
  m.def("farm64", &farm64, "data"_a, "FarmHash Fingerprint64, as a signed number.");
  m.def("murmur64a", &murmur64a, "data"_a, "seed"_a = 0, "MurmurHash64A, as a signed number.");
  // Without noconvert an array of another type or layout would be copied, and results written to the copy.
  m.def("hash_bytes", &hash_bytes, "kind"_a, "data"_a.noconvert(), "offsets"_a.noconvert(),
        "out"_a.noconvert(),
        "out[i] becomes the hash (farm, or murmur with seed 0) of data[offsets[i]:offsets[i + 1]].");
  m.def("hash_stack", &hash_stack, "values"_a.noconvert(), "rounds"_a, "size"_a, "out"_a.noconvert(),
        "out[i * rounds + r] becomes the row of id i in round r, within [r * size, (r + 1) * size).");
  m.def(
      "crc32",
      [](const nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& data, uint32_t before) {
        nb::gil_scoped_release release;
        return karvan::crc32({data.data(), data.size()}, before);
      },
      "data"_a, "before"_a = 0, "CRC-32 as in gzip, of data after bytes whose checksum is `before`.");
  m.def("mix", &mix_keys, "keys"_a.noconvert(), "out"_a.noconvert(), "out[i] becomes the hash of keys[i]; see hash/mix.h.");
  m.def("initialise", &fill, "kind"_a, "a"_a, "b"_a, "lo"_a, "hi"_a, "seed"_a, "table"_a,
        "keys"_a.noconvert(), "out"_a.noconvert(),
        "out[i] becomes the initial vector of keys[i] in the table; see table/init.h.");
}

}  // namespace karvan::bindings
