// A test is a function; KTSERVE_TEST registers it, CHECK stops the program with the place and what was found.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "runtime/isa.hpp"

namespace ktserve::test {

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Register {
  Register(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

inline std::vector<Isa> isas() {
  std::vector<Isa> usable;
  for (Isa isa : {Isa::avx2, Isa::avx512, Isa::amx}) {
    if (isa <= best_isa()) usable.push_back(isa);
  }
  return usable;
}

// Reproducible random numbers.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2862933555777941757u + 3037000493u) {}
  uint64_t bits() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    return state_ ^= state_ << 17;
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  float symmetric() { return static_cast<float>(bits() >> 40) / 8388608.0f - 1.0f; }

 private:
  uint64_t state_;
};

inline std::vector<float> draw(int64_t count, Random& random, float scale = 1) {
  std::vector<float> values(static_cast<size_t>(count));
  for (auto& v : values) v = scale * random.symmetric();
  return values;
}

}  // namespace ktserve::test

#define CHECK(condition, ...)                                              \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      __VA_OPT__(std::fprintf(stderr, __VA_ARGS__);)                       \
      std::fprintf(stderr, "\n");                                          \
      std::exit(1);                                                        \
    }                                                                      \
  } while (false)

#define KTSERVE_TEST(name)                                       \
  static void test_##name();                                     \
  static ktserve::test::Register reg_##name(#name, test_##name); \
  static void test_##name()
