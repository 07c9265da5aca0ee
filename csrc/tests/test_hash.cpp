#include <cstdint>
#include <cstring>
#include <vector>

#include "hash/crc32.h"
#include "hash/crc32c.h"
#include "hash/farm.h"
#include "hash/mix.h"
#include "hash/murmur.h"
#include "tests/check.h"

using namespace karvan;

namespace {

// The goldens are the hashes of its beginnings by the public packages pyfarmhash 0.5.1 and murmurhash 1.0.16.
std::vector<uint8_t> sequence(size_t size) {
  std::vector<uint8_t> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<uint8_t>((i * 167 + 13) ^ (i >> 3));
  return bytes;
}

struct FarmGolden {
  size_t size;
  uint64_t hash;
};

constexpr FarmGolden kFarm[] = {
    {0, 0x9ae16a3b2f90404fULL},   {1, 0x8aa334f91c5bc106ULL},   {2, 0xddcf873d024ed0c5ULL},
    {3, 0xf9b7aa01c03550eaULL},   {4, 0xd8d503003c461469ULL},   {7, 0x09152394440cacf1ULL},
    {8, 0xddbab18b55be8b4cULL},   {9, 0x2ee658cfc97cbebfULL},   {15, 0x454b67fe5a767f60ULL},
    {16, 0xcc9a314872ff2d3eULL},  {17, 0x6ea6b31ac72f2fffULL},  {24, 0x5d15b154847169d1ULL},
    {31, 0x88f5e074b512ba8fULL},  {32, 0xd92bc02bdce02417ULL},  {33, 0x271b20ef553ffde5ULL},
    {48, 0xd59738b561b7c05aULL},  {63, 0x8a8072785d6ce74eULL},  {64, 0x0a70d0227ab92b79ULL},
    {65, 0x8fb6d262546cefb1ULL},  {100, 0x688f41d507219405ULL}, {127, 0x6886d562d278b556ULL},
    {128, 0x47ef4f4cfd1801abULL}, {129, 0xc27cc0f562b63cfeULL}, {192, 0x16fb76de5ba941d5ULL},
    {300, 0xf16dd9b6ef24af63ULL},
};

struct MurmurGolden {
  size_t size;
  uint64_t seed, hash;
};

constexpr MurmurGolden kMurmur[] = {
    {0, 0, 0x0000000000000000ULL},  {0, 7, 0x6e80950782bdbe12ULL},   {1, 0, 0x1d0e8431eb102dbeULL},
    {3, 0, 0x9a415b1c55e8863cULL},  {7, 1, 0xda0f56c56528c426ULL},   {8, 0, 0x110f089277d0300bULL},
    {9, 0, 0xd477d5eba7232187ULL},  {15, ~0ULL, 0xef816410463cd5adULL}, {16, 0, 0x449d102d041146f9ULL},
    {17, 0, 0xbfa977a73218dbaaULL}, {63, 5, 0x8dc21e5a1a264f07ULL},  {300, 0, 0x8f267ceb0d4c3027ULL},
};

int64_t farm(const std::vector<uint8_t>& bytes) {
  return static_cast<int64_t>(farm_fingerprint64(bytes.data(), bytes.size()));
}

int64_t murmur(const void* data, size_t size) { return static_cast<int64_t>(murmur_hash64a(data, size, 0)); }

}  // namespace

TEST(farm_equals_public_implementation_on_every_branch) {
  for (const FarmGolden& golden : kFarm) {
    // Exactly sized, so that the address sanitizer sees a read beyond the end.
    const std::vector<uint8_t> bytes = sequence(golden.size);
    CHECK_EQ(farm_fingerprint64(bytes.data(), bytes.size()), golden.hash);
  }
}

TEST(farm_does_not_depend_on_alignment) {
  const std::vector<uint8_t> bytes = sequence(300);
  for (size_t shift = 1; shift < 8; ++shift) {
    std::vector<uint8_t> moved(300 + shift);
    std::memcpy(moved.data() + shift, bytes.data(), 300);
    CHECK_EQ(farm_fingerprint64(moved.data() + shift, 300), farm_fingerprint64(bytes.data(), 300));
    CHECK_EQ(murmur_hash64a(moved.data() + shift, 300, 0), murmur_hash64a(bytes.data(), 300, 0));
  }
}

TEST(farm_gives_the_ids_of_recis) {
  CHECK_EQ(farm({0, 1, 2}), -7736835464683084646);
  CHECK_EQ(farm({1, 2, 3}), -5546720800891377920);
}

TEST(hash_stack_gives_the_rows_of_persia) {
  const int64_t expected[][3] = {{12, 2, 18}, {23, 5, 10}, {34, 0, 11},
                                 {56, 6, 17}, {78, 7, 12}, {90, 8, 16}};
  for (const auto& [key, first, second] : expected) {
    int64_t rows[2];
    farm_hash_stack(static_cast<uint64_t>(key), 2, 10, rows);
    CHECK_EQ(rows[0], first);
    CHECK_EQ(rows[1], second);
  }
}

TEST(murmur_equals_public_implementation) {
  for (const MurmurGolden& golden : kMurmur) {
    const std::vector<uint8_t> bytes = sequence(golden.size);
    CHECK_EQ(murmur_hash64a(bytes.data(), bytes.size(), golden.seed), golden.hash);
  }
}

TEST(murmur_gives_the_ids_of_recis) {
  const uint8_t first[] = {0, 1, 2}, second[] = {1, 2, 3};
  CHECK_EQ(murmur(first, 3), -4003751876240412087);
  CHECK_EQ(murmur(second, 3), -1042754718167355375);
}

TEST(murmur_of_a_pair_is_the_feature_cross_of_recis) {
  const int64_t pairs[][2] = {{1001, 1}, {1002, 2}, {1003, 3}};
  const int64_t expected[] = {-7808879811642834040, -4967483181219983279, 1752425377096056168};
  for (int i = 0; i < 3; ++i) CHECK_EQ(murmur(pairs[i], sizeof pairs[i]), expected[i]);
}

TEST(unmix_inverts_mix) {
  for (uint64_t key = 1, i = 0; i < 10000; ++i, key = key * 6364136223846793005ULL + 1442695040888963407ULL) {
    CHECK_EQ(unmix(mix(key)), key);
    CHECK_EQ(mix(unmix(key)), key);
  }
  for (uint64_t key : {0ULL, 1ULL, ~0ULL, 1ULL << 63}) CHECK_EQ(unmix(mix(key)), key);
}

TEST(crc32_is_the_same_by_instructions_and_by_tables_in_any_pieces) {
  std::vector<uint8_t> bytes(3000);
  uint64_t state = 1;
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>((state = mix(state + 1)) >> 32);
  for (size_t size = 0; size < 400; ++size) {
    const std::span<const uint8_t> part(bytes.data() + size % 7, size);
    CHECK_EQ(crc32(part), crc32_by_tables(part));
    CHECK_EQ(crc32(part.subspan(size / 3), crc32(part.first(size / 3))), crc32_by_tables(part));
  }
  CHECK_EQ(crc32(bytes), crc32_by_tables(bytes));
  const uint8_t digits[] = {'1', '2', '3', '4', '5', '6', '7', '8', '9'};
  CHECK_EQ(crc32(digits), 0xCBF43926u);
}

TEST(crc32c_is_the_same_by_instructions_and_by_tables_in_any_pieces) {
  std::vector<uint8_t> bytes(3000);
  uint64_t state = 1;
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>((state = mix(state + 1)) >> 32);
  for (size_t size = 0; size < 400; ++size) {
    const std::span<const uint8_t> part(bytes.data() + size % 7, size);
    CHECK_EQ(crc32c(part), crc32c_by_tables(part));
    CHECK_EQ(crc32c(part.subspan(size / 3), crc32c(part.first(size / 3))), crc32c_by_tables(part));
  }
  CHECK_EQ(crc32c(bytes), crc32c_by_tables(bytes));
}

// RFC 3720, appendix B.4: the checksums of iSCSI, which are the same.
TEST(crc32c_has_the_values_of_rfc_3720) {
  const std::vector<uint8_t> zeros(32, 0), ones(32, 0xFF);
  CHECK_EQ(crc32c(zeros), 0x8A9136AAu);
  CHECK_EQ(crc32c(ones), 0x62A8AB43u);
  std::vector<uint8_t> up(32);
  for (size_t i = 0; i < up.size(); ++i) up[i] = static_cast<uint8_t>(i);
  CHECK_EQ(crc32c(up), 0x46DD794Eu);
  const uint8_t digits[] = {'1', '2', '3', '4', '5', '6', '7', '8', '9'};
  CHECK_EQ(crc32c(digits), 0xE3069283u);
}
