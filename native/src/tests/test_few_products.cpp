#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/check.hpp"
#include "training/panels.hpp"

namespace ktserve {
namespace {

using test::draw;
using test::Random;

// Rows of whole numbers up to 127 in an order of their own, as float32 or bf16, and what they hold.
struct Rows {
  int64_t count, n;
  bool bf16;
  std::vector<uint8_t> data;
  std::vector<int32_t> index;
  std::vector<float> values;

  Rows(int64_t count, int64_t n, bool bf16, Random& random) : count(count), n(n), bf16(bf16) {
    const int64_t element = bf16 ? 2 : 4;
    data.resize(static_cast<size_t>(count * n * element));
    for (int64_t i = 0; i < count; ++i) index.push_back(static_cast<int32_t>(count - 1 - i));
    for (int64_t i = 0; i < count * n; ++i) {
      const float value = static_cast<float>(random.below(255)) - 127.0f;
      values.push_back(value);
      const uint8_t* bytes = reinterpret_cast<const uint8_t*>(&value) + 4 - element;
      std::copy_n(bytes, element,
                  &data[static_cast<size_t>((index[static_cast<size_t>(i / n)] * n + i % n) * element)]);
    }
  }
  RowView view() const { return {data.data(), n * (bf16 ? 2 : 4), bf16, index.data()}; }
  double at(int64_t i, int64_t j) const { return static_cast<double>(values[static_cast<size_t>(i * n + j)]); }
};

void check(double got, double want, double size, const char* what, int64_t i, int64_t j) {
  CHECK(std::fabs(got - want) <= 1e-5 * size, "%s %d, %d: %g, %g", what, static_cast<int>(i), static_cast<int>(j), got,
        want);
}

KTSERVE_TEST(few_dots) {
  Random random(31);
  for (Isa isa : test::isas()) {
    const PanelKernels& kernels = panel_kernels(isa);
    for (int64_t rows : {1, 2, 3, 4}) {
      for (int64_t rank : {1, 7, 16, 33, 64}) {
        for (bool transposed : {false, true}) {
          const int64_t k = 96, stride = (transposed ? rank : k) + 5;
          const std::vector<float> m = draw((transposed ? k : rank) * stride, random), x = draw(rows * k, random);
          std::vector<float> out(static_cast<size_t>(rows * 80), 3.0f);
          kernels.few_dots({m.data(), stride, transposed, k, rank, x.data(), rows, out.data(), 80});
          for (int64_t i = 0; i < rows; ++i) {
            for (int64_t j = 0; j < rank; ++j) {
              double want = 0, size = 1;
              for (int64_t l = 0; l < k; ++l) {
                const int64_t at = transposed ? l * stride + j : j * stride + l;
                const double term = static_cast<double>(m[static_cast<size_t>(at)]) *
                                    static_cast<double>(x[static_cast<size_t>(i * k + l)]);
                want += term;
                size += std::fabs(term);
              }
              check(static_cast<double>(out[static_cast<size_t>(i * 80 + j)]), want, size, "few_dots", i, j);
            }
          }
        }
      }
    }
  }
}

KTSERVE_TEST(few_gradient) {
  Random random(32);
  for (Isa isa : test::isas()) {
    const PanelKernels& kernels = panel_kernels(isa);
    for (int64_t rows : {int64_t{1}, int64_t{3}, int64_t{9}, kFewGradientRows}) {
      for (int64_t rank : {1, 7, 16, 33, 64}) {
        for (int variant = 0; variant < 16; ++variant) {
          const bool transposed = variant % 2 != 0, adds = variant / 2 % 2 != 0;
          const int64_t columns = variant / 4 % 2 != 0 ? 32 : 592;  // one block of columns, and more
          const Rows u(rows, rank, variant / 8 != 0, random), x(rows, columns, variant / 8 == 0, random);
          const std::vector<float> scale = draw(rows, random);
          const int64_t stride = transposed ? rank : columns + 16;
          const int64_t count = (transposed ? columns : rank) * stride;
          alignas(64) static float to[64 * 1024];
          std::fill_n(to, count, 3.0f);
          const bool scaled = variant / 4 % 2 != 0;
          kernels.few_gradient(
              {u.view(), scaled ? scale.data() : nullptr, x.view(), rows, rank, columns, to, stride, transposed, adds});
          __builtin_ia32_sfence();
          for (int64_t i = 0; i < count; ++i) {
            const int64_t j = transposed ? i % stride : i / stride, c = transposed ? i / stride : i % stride;
            double want = c >= columns || adds ? 3.0 : 0.0, size = 1;  // what lies between rows stays
            for (int64_t r = 0; c < columns && r < rows; ++r) {
              const double factor = scaled ? static_cast<double>(scale[static_cast<size_t>(r)]) : 1.0;
              want += factor * u.at(r, j) * x.at(r, c);
              size += std::fabs(factor * u.at(r, j) * x.at(r, c));
            }
            check(static_cast<double>(to[i]), want, size, "few_gradient", j, c);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace ktserve
