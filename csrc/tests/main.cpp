#include <chrono>
#include <cstdlib>

#include "tests/check.h"

// Without arguments all cases; with two numbers, every n-th from the i-th on: karvan_tests 0 2 and karvan_tests 1 2.
int main(int count, char** arguments) {
  using namespace karvan::test;
  const size_t first = count == 3 ? std::strtoul(arguments[1], nullptr, 10) : 0;
  const size_t step = count == 3 ? std::strtoul(arguments[2], nullptr, 10) : 1;
  int passed = 0, failed = 0;
  for (size_t i = first; i < cases().size(); i += step) {
    const Case& c = cases()[i];
    const int before = failures();
    const auto start = std::chrono::steady_clock::now();
    c.run();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    const bool ok = failures() == before;
    failed += !ok;
    passed += ok;
    std::printf("%-4s %6.2f s  %s\n", ok ? "ok" : "FAIL", seconds.count(), c.name);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed || passed == 0;
}
