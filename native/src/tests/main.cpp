// Runs all tests, or those whose names contain an argument. Built plain, with ASan and UBSan, or with TSan.
#include <cstring>

#include "tests/check.hpp"

int main(int argc, char** argv) {
  int ran = 0;
  for (const auto& test : ktserve::test::tests()) {
    bool wanted = argc == 1;
    for (int i = 1; i < argc; ++i) wanted = wanted || std::strstr(test.name, argv[i]) != nullptr;
    if (!wanted) continue;
    test.run();
    std::printf("ok %s\n", test.name);
    std::fflush(stdout);
    ++ran;
  }
  std::printf("%d tests passed on %s\n", ran, ktserve::isa_name(ktserve::best_isa()));
  return ran > 0 ? 0 : 1;
}
