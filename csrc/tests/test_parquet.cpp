#include <algorithm>
#include <span>
#include <string_view>

#include "parquet/column.h"
#include "hash/crc32.h"
#include "parquet/hybrid.h"
#include "parquet/page_header.h"
#include "parquet/snappy.h"
#include "tests/check.h"
#include "tests/parquet_writer.h"
#include "tests/tools.h"

using namespace karvan::parquet;
using namespace karvan::test;

namespace {

[[gnu::noinline]] std::optional<Bytes> uncompress(const Bytes& block, size_t size) {
  Bytes out(size + kSnappySlack);
  if (!snappy_uncompress(Exact(block), out.data(), size)) return std::nullopt;
  out.resize(size);
  return out;
}

// A column of rows in pages, as the decoder sees it and gives it back.
struct Chunk {
  Bytes bytes;
  Values rows;
  PageOptions options;

  [[gnu::noinline]] std::optional<Values> decode() const {
    const size_t width = options.width;
    std::unique_ptr<uint64_t[]> values(new uint64_t[(rows.size() * width + 7) / 8]);
    std::unique_ptr<uint8_t[]> bits(new uint8_t[(rows.size() + 7) / 8]);
    const ColumnChunk column{0,    bytes.size(), rows.size(), static_cast<unsigned>(width), options.compress,
                             true, values.get(), bits.get()};
    const int64_t nulls = karvan::parquet::decode(Exact(bytes), column);
    if (nulls < 0) return std::nullopt;
    Values made(rows.size());
    int64_t missing = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
      uint64_t value = 0;
      std::memcpy(&value, reinterpret_cast<const char*>(values.get()) + i * width, width);
      if (nulls == 0 || (bits[i / 8] >> i % 8 & 1))
        made[i] = value;
      else
        missing += value == 0;
    }
    CHECK_EQ(missing, nulls);
    return made;
  }

  bool is_decoded() const { return decode() == rows; }
  bool is_refused() const { return !decode(); }
};

Chunk make_chunk(Random& random) {
  Chunk chunk;
  chunk.options = {below(random, 2) == 0, below(random, 2) == 0, below(random, 2) == 0, below(random, 2) ? 4u : 8u};
  const auto number = [&] { return random() >> (64 - 8 * chunk.options.width); };
  Numbers dictionary(below(random, 4) ? 1 + below(random, below(random, 2) ? 5 : 600) : 0);
  for (auto& entry : dictionary) entry = number();
  if (!dictionary.empty()) chunk.bytes = dictionary_page(dictionary, chunk.options);
  const uint64_t nulls = below(random, 4);  // none, some, many, all
  for (size_t pages = 1 + below(random, 4); pages; --pages) {
    Values rows(1 + below(random, below(random, 2) ? 40 : 3000));
    uint64_t same = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
      if (same) {
        --same;
        rows[i] = rows[i - 1];
        continue;
      }
      same = below(random, 4) ? 0 : below(random, 60);
      if (below(random, 3) >= nulls) rows[i] = dictionary.empty() ? number() : dictionary[below(random, dictionary.size())];
    }
    add(chunk.bytes, data_page(rows, dictionary, chunk.options));
    chunk.rows.insert(chunk.rows.end(), rows.begin(), rows.end());
  }
  return chunk;
}

Chunk small_chunk(PageOptions options, size_t entries = 4) {
  Numbers dictionary{0, 1, 2, 4};
  Chunk chunk;
  chunk.options = options;
  chunk.rows.resize(40);
  for (size_t i = 0; i < 40; ++i)
    if (i % 5 != 3) chunk.rows[i] = i * i % 7;
  const Bytes data = data_page(chunk.rows, dictionary, options);
  dictionary.resize(entries);
  if (entries) chunk.bytes = dictionary_page(dictionary, options);
  add(chunk.bytes, data);
  return chunk;
}

Bytes text(std::string_view bytes) { return Bytes(bytes.begin(), bytes.end()); }

Bytes first(const Bytes& bytes, size_t count) { return Bytes(bytes.data(), bytes.data() + count); }

}  // namespace

TEST(snappy_blocks_become_what_they_were) {
  CHECK(uncompress(text({"\0", 1}), 0) == Bytes());
  CHECK(uncompress(text("\3\10abc"), 3) == text("abc"));
  for (size_t offset = 1; offset <= 40; ++offset)  // copies that overlap what they make, in all three forms
    for (size_t length = 4; length <= 64; ++length)
      for (size_t form = length > 11 ? 2 : 1; form <= 3; ++form) {
        Bytes expected, block;
        for (size_t i = 0; i < 40; ++i) expected.push_back(static_cast<uint8_t>(i * i + 1));
        add_varint(block, 40 + length + 1);
        block.push_back(39 << 2);
        add(block, expected);
        if (form == 1)
          add(block, bytes_of(1 | (length - 4) << 2 | offset << 8, 2));
        else
          add(block, bytes_of(form | (length - 1) << 2 | offset << 8, form == 2 ? 3 : 5));
        add(block, bytes_of('z' << 8, 2));
        for (size_t i = 0; i < length; ++i) expected.push_back(expected[expected.size() - offset]);
        expected.push_back('z');
        CHECK(uncompress(block, expected.size()) == expected);
        if (length % 16 || offset % 10) continue;
        for (size_t cut = 0; cut < block.size(); ++cut) CHECK(!uncompress(first(block, cut), expected.size()));
        for (const size_t size : {expected.size() - 1, expected.size() + 1}) CHECK(!uncompress(block, size));
      }
}

TEST(snappy_blocks_that_point_outside_are_refused) {
  const auto refused = [](std::string_view block, size_t size) { return !uncompress(text(block), size); };
  CHECK(refused({"\5\0a\1\2", 5}, 5));              // before the start
  CHECK(refused({"\5\0a\1\0", 5}, 5));              // at itself
  CHECK(refused({"\4\0a\1\1", 5}, 4));              // beyond the end
  CHECK(refused({"\5\0a\3\1\0\0\1", 8}, 5));        // far away
  CHECK(refused("\11\xFC\xFF\xFF\xFF\xFF" "a", 9));  // a literal beyond the end
  CHECK(refused("\xFF\xFF\xFF\xFF\xFF\1", 1));
  Bytes far;  // the same far from both ends, where less is checked
  add_varint(far, 1000);
  add(far, text({"\20abcde\36\6\0", 9}));
  far.resize(300);
  CHECK(!uncompress(far, 1000));
}

TEST(long_snappy_blocks_of_all_elements_become_what_they_were) {
  Random random{5};
  for (int round = 0; round < 100; ++round) {
    Bytes expected, elements, block;
    while (expected.size() < 2000) {
      const size_t length = 1 + below(random, below(random, 8) ? 20 : 60), before = expected.size();
      size_t offset = 0;
      if (before && below(random, 2)) {
        offset = 1 + below(random, std::min<size_t>(before, below(random, 2) ? 20 : 2000));
        add(elements, bytes_of(2 | (length - 1) << 2 | offset << 8, 3));
      } else {
        elements.push_back(static_cast<uint8_t>((length - 1) << 2));
      }
      for (size_t i = 0; i < length; ++i) {
        expected.push_back(offset ? expected[before + i - offset] : static_cast<uint8_t>(random()));
        if (!offset) elements.push_back(expected.back());
      }
    }
    add_varint(block, expected.size());
    add(block, elements);
    CHECK(uncompress(block, expected.size()) == expected);
  }
}

TEST(packed_values_of_every_width_are_unpacked) {
  Random random{6};
  for (unsigned width = 0; width <= 32; ++width)
    for (size_t count : {1, 7, 8, 9, 100, 1000}) {
      std::vector<uint32_t> values(count), made(count + kUnpackRoom);
      for (auto& value : values) value = width ? static_cast<uint32_t>(random() >> (64 - width)) : 0;
      const Exact bytes(hybrid(values, width));
      Runs runs(bytes, width, count);
      size_t at = 0;
      for (Run run; !runs.is_complete(); at += run.count) {
        CHECK(runs.next(run));
        if (run.is_packed)
          unpack(run.packed, width, run.count, made.data() + at);
        else
          std::fill_n(made.begin() + static_cast<ptrdiff_t>(at), run.count, run.value);
      }
      made.resize(count);
      CHECK(made == values);
    }
}

TEST(runs_that_no_writer_makes_are_refused) {
  const auto reads = [](std::string_view bytes, size_t values) {
    const Exact exact(text(bytes));
    Runs runs(exact, 1, values);
    for (Run run; !runs.is_complete();)
      if (!runs.next(run)) return false;
    return true;
  };
  CHECK(reads("\20\1", 8));
  CHECK(reads("\5\xFF\1", 9));
  CHECK(!reads("", 1));
  CHECK(!reads("\20", 8));            // cut
  CHECK(!reads("\20\1", 7));          // too many
  CHECK(!reads("\20\1", 9));          // too few
  CHECK(!reads({"\20\1\0", 3}, 8));   // bytes left over
  CHECK(!reads("\20\2", 8));          // wider than it may be
  CHECK(!reads({"\0\1\20\1", 4}, 8));  // empty
  CHECK(!reads("\1\20\1", 8));        // empty
  CHECK(!reads("\5\xFF", 9));         // cut
  CHECK(!reads("\7\xFF\1\1", 9));     // a group too many
  CHECK(!reads("\x80\x80\x80\x80\x80\1", 8));
}

TEST(headers_are_read_whatever_else_they_hold) {
  Struct statistics;
  add(statistics.head(1, 8).bytes, text("\2ab"));             // a string
  add(statistics.head(2, 6).bytes, text("\4"));               // a long integer
  add(statistics.head(3, 9).bytes, text("\x25\1\2"));         // a list of two integers
  add(statistics.head(4, 11).bytes, text("\1\x51\3\1"));      // a map from an integer to a boolean
  add(statistics.head(5, 7).bytes, Bytes(8));                 // a double
  add(statistics.head(6, 1).head(7, 3).bytes, text("\t"));    // a boolean and a byte
  Struct inner, outer;
  inner.integer(1, 10).integer(2, 8).integer(3, 3).integer(4, 3).nested(5, statistics);
  outer.integer(1, 0).integer(2, 200).integer(3, 100).integer(4, -2).nested(5, inner);
  const Bytes bytes = outer.nested(6, statistics).nested(14, statistics).ended();
  PageHeader header;
  CHECK(read_page_header(Exact(bytes), header));
  CHECK(header.type == PageType::data);
  CHECK(header.size == bytes.size());
  CHECK(header.uncompressed_size == 200 && header.compressed_size == 100);
  CHECK(header.has_crc && header.crc == 0xFFFFFFFE);
  CHECK(header.values == 10 && header.encoding == 8 && header.level_encoding == 3);
  for (size_t cut = 0; cut < bytes.size(); ++cut) CHECK(!read_page_header(Exact(first(bytes, cut)), header));
}

TEST(headers_that_lack_or_repeat_something_are_refused) {
  const auto reads = [](int type, int32_t size, int field, int32_t values, int other = 0, bool deep = false) {
    Struct inner, outer, nothing;
    inner.integer(1, values).integer(2, 0).integer(3, 3).integer(4, 3);
    outer.integer(1, type).integer(2, size);
    if (other == 3) outer.integer(3, size);
    outer.integer(3, size);
    if (field) outer.nested(field, inner);
    if (other > 3) outer.nested(other, inner);
    if (deep) nothing.bytes = Bytes(100'000, 0x1C), outer.nested(14, nothing);  // a struct that holds one, and so on
    PageHeader header;
    return read_page_header(Exact(outer.ended()), header);
  };
  CHECK(reads(0, 4, 5, 10));
  CHECK(reads(0, 4, 5, 10, 6));
  CHECK(!reads(0, 4, 5, 10, 0, true));
  CHECK(!reads(0, 4, 5, 10, 7));
  CHECK(!reads(0, 4, 5, 10, 3));
  CHECK(!reads(0, 4, 0, 10));
  CHECK(!reads(0, 4, 7, 10));  // the header of another type
  CHECK(!reads(2, 4, 5, 10));
  CHECK(!reads(3, 4, 8, 10));
  CHECK(!reads(1, 4, 6, 10));
  CHECK(!reads(9, 4, 5, 10));
  CHECK(!reads(0, -4, 5, 10));
  CHECK(!reads(0, 4, 5, -1));
}

TEST(checksums_are_those_of_gzip) {
  CHECK(karvan::crc32(Exact(text("123456789"))) == 0xCBF43926);
  CHECK(karvan::crc32(Exact(Bytes())) == 0);
}

TEST(columns_are_decoded_as_they_were_written) {
  Random random{7};
  for (int round = 0; round < 100; ++round) CHECK(make_chunk(random).is_decoded());
}

TEST(columns_side_by_side_are_decoded_on_several_threads) {
  Random random{8};
  constexpr size_t kChunks = 20;
  std::vector<int64_t> expected(kChunks + 1, -1), nulls(kChunks + 1);
  std::vector<Numbers> room(2 * kChunks);
  std::vector<ColumnChunk> columns;
  Bytes bytes;
  for (size_t i = 0; i < kChunks; ++i) {
    const Chunk chunk = make_chunk(random);
    const size_t rows = chunk.rows.size();
    room[2 * i].resize(rows);
    room[2 * i + 1].resize(rows / 64 + 1);
    expected[i] = std::count(chunk.rows.begin(), chunk.rows.end(), std::nullopt);
    columns.push_back({bytes.size(), chunk.bytes.size(), rows, static_cast<unsigned>(chunk.options.width),
                       chunk.options.compress, true, room[2 * i].data(),
                       reinterpret_cast<uint8_t*>(room[2 * i + 1].data())});
    add(bytes, chunk.bytes);
  }
  columns[7].size -= 1;
  expected[7] = -1;
  columns.push_back(columns[0]);
  columns.back().begin = bytes.size() - 1;  // and goes on beyond the bytes
  for (const int threads : {1, 2, 5, 100}) {
    decode(Exact(bytes), columns, threads, nulls);
    CHECK(nulls == expected);
  }
}

TEST(chunks_with_too_much_or_too_little_are_refused) {
  for (unsigned kind = 0; kind < 4; ++kind) {
    const PageOptions options{kind % 2 == 1, kind / 2 == 1, true, 8};
    const Chunk chunk = small_chunk(options);
    CHECK(chunk.is_decoded());
    Chunk other = chunk;
    other.bytes.push_back(0);
    CHECK(other.is_refused());
    for (size_t cut = 0; cut < chunk.bytes.size(); ++cut) {
      other.bytes = first(chunk.bytes, cut);
      CHECK(other.is_refused());
    }
    other.bytes = chunk.bytes;
    for (const size_t rows : {39, 41}) {
      other.rows.resize(rows);
      CHECK(other.is_refused());
    }
    add(other.bytes, chunk.bytes);
    other.rows.resize(80);
    CHECK(other.is_refused());  // a second dictionary
    for (const size_t entries : {0, 1, 3}) CHECK(small_chunk(options, entries).is_refused());
  }
}

TEST(a_changed_bit_under_a_checksum_is_noticed) {
  const Chunk chunk = small_chunk({false, false, true, 4});
  for (size_t at = 0; at < chunk.bytes.size() * 8; ++at) {
    Chunk changed = chunk;
    changed.bytes[at / 8] ^= static_cast<uint8_t>(1u << at % 8);
    CHECK(changed.is_refused() || changed.is_decoded());
  }
}

TEST(damaged_chunks_are_decoded_within_bounds) {
  if (KARVAN_TSAN) return;  // one thread
  Random random{9};
  for (int round = 0; round < 3000; ++round) {
    Chunk chunk = round % 8 ? small_chunk({round % 2 == 0, round % 3 == 0, false, 8}) : make_chunk(random);
    Bytes& bytes = chunk.bytes;
    for (uint64_t changes = 1 + below(random, 3); changes; --changes) {
      // Headers, which are at the start, are worth more than the rest.
      const size_t at = below(random, below(random, 2) ? std::min<size_t>(bytes.size(), 40) : bytes.size());
      const auto byte = static_cast<uint8_t>(below(random, 3) ? random() : 255);
      const uint64_t kind = below(random, 16);
      if (kind == 0)
        bytes = first(bytes, at + 1);
      else if (kind < 4)
        bytes.insert(bytes.begin() + static_cast<ptrdiff_t>(at), byte);
      else if (kind < 7 && bytes.size() > 1)
        bytes.erase(bytes.begin() + static_cast<ptrdiff_t>(at));
      else
        bytes[at] = byte;
    }
    chunk.decode();
  }
}
