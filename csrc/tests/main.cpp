#include "tests/check.h"

int main() {
  using namespace karvan::test;
  int failed = 0;
  for (const Case& c : cases()) {
    const int before = failures();
    c.run();
    const bool ok = failures() == before;
    failed += !ok;
    std::printf("%-4s %s\n", ok ? "ok" : "FAIL", c.name);
  }
  std::printf("%zu passed, %d failed\n", cases().size() - failed, failed);
  return failed ? 1 : 0;
}
