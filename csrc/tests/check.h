// A unit test framework in a page: TEST registers a case, CHECK records a failure and goes on.
#pragma once
#include <cstdio>
#include <sstream>
#include <string>
#include <vector>

namespace karvan::test {

struct Case {
  const char* name;
  void (*run)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

inline int& failures() {
  static int count = 0;
  return count;
}

inline bool add_case(const char* name, void (*run)()) {
  cases().push_back({name, run});
  return true;
}

// Not inlined, and no string made where it is called: there are thousands of calls to compile.
[[gnu::noinline]] inline void fail(const char* file, int line, const char* text) {
  ++failures();
  std::fprintf(stderr, "%s:%d: %s\n", file, line, text);
}

template <class A, class B>
[[gnu::noinline]] void check_equal(const A& got, const B& expected, const char* text, const char* file, int line) {
  if (got == expected) return;
  std::ostringstream message;
  message << text << ": expected " << expected << ", got " << got;
  fail(file, line, message.str().c_str());
}

}  // namespace karvan::test

#define TEST(name)                                                                         \
  static void name();                                                                      \
  static const bool registered_##name = ::karvan::test::add_case(#name, name);             \
  static void name()
#define CHECK(condition)                                                                   \
  do {                                                                                     \
    if (!(condition)) ::karvan::test::fail(__FILE__, __LINE__, "failed: " #condition);     \
  } while (0)
#define CHECK_EQ(got, expected) \
  ::karvan::test::check_equal((got), (expected), #got " == " #expected, __FILE__, __LINE__)
