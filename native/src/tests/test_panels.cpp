#include <cmath>
#include <cstring>
#include <vector>

#include "packing/pack.hpp"
#include "runtime/arena.hpp"
#include "tests/check.hpp"
#include "training/panels.hpp"

namespace ktserve {
namespace {

using test::draw;
using test::Random;

// Panels of values of about one.
Arena random_panels(Format format, int64_t n, int64_t k, Random& random) {
  Arena memory(static_cast<size_t>(packed_size(format, n, k)));
  uint8_t* packed = memory.data();
  if (format == Format::bf16 || format == Format::f32 || format == Format::i8 || format == Format::i4m) {
    const std::vector<float> w = draw(n * k, random, 0.1f);
    pack_panels(source_type("F32"), format, reinterpret_cast<const uint8_t*>(w.data()), n, k, 0, n / kPanel, packed);
  } else {
    // Any bits are quants; scales, and values of f16, are small.
    const auto fill_halves = [&random](uint8_t* to, int64_t halves) {
      for (int64_t i = 0; i < halves; ++i) {
        const auto half = static_cast<uint16_t>(0x2000 + random.below(1024));
        std::memcpy(to + 2 * i, &half, 2);
      }
    };
    const int64_t bytes = packed_size(format, n, k);
    for (int64_t i = 0; i < bytes; ++i) packed[i] = static_cast<uint8_t>(random.below(256));
    if (format == Format::f16) fill_halves(packed, bytes / 2);
    if (format == Format::f8) {
      for (int64_t i = 0; i < bytes; ++i) packed[i] = static_cast<uint8_t>(packed[i] % 0x7f);  // no NaN
      for (int64_t p = 0; p < n / kPanel; ++p) {
        const std::vector<float> scales = draw(meta_size(format, k) / 4, random, 1e-4f);
        std::memcpy(packed + p * panel_size(format, k), scales.data(), scales.size() * 4);
      }
    }
    for (int64_t p = 0; p < n / kPanel && !plain(format); ++p) {
      for (int64_t u = 0; u < k / info(format).unit; ++u) {
        uint8_t* meta = packed + p * panel_size(format, k) + u * info(format).meta_bytes;
        if (info(format).exponents) {
          for (int i = 0; i < 16; ++i) meta[i] = static_cast<uint8_t>(118 + random.below(8));
        } else {
          fill_halves(meta, info(format).minima && !zero_points(format) ? 32 : 16);
          for (int i = 0; i < 16 && zero_points(format); ++i) meta[info(format).min_steps + i] %= 17;  // as files have
        }
      }
    }
  }
  return memory;
}

// W^T as panels, of every format: what unpack_rows gives, to the last place that the panels hold.
KTSERVE_TEST(panels_of_the_transpose) {
  Random random(21);
  constexpr int64_t n = 64, k = 512, first = 96, count = 64;
  for (int f = 0; f < kFormats; ++f) {
    const auto format = static_cast<Format>(f);
    const Arena memory = random_panels(format, n, k, random);
    const uint8_t* packed = memory.data();
    std::vector<float> values(n * k);
    unpack_rows(format, packed, k, 0, n, values.data());
    for (Isa isa : test::isas()) {
      for (Format to : {Format::f32, Format::bf16}) {
        const int64_t size = panel_size(to, n);
        std::vector<uint8_t> out(static_cast<size_t>(count / kPanel * size));
        panel_kernels(isa).transpose(format, packed, n / kPanel, k, first, count, to, out.data(), size, {});
        std::vector<float> got(n);
        for (int64_t c = 0; c < count; ++c) {
          unpack_rows(to, out.data(), n, c, c + 1, got.data());
          for (int64_t row = 0; row < n; ++row) {
            const float want = values[static_cast<size_t>(row * k + first + c)];
            const float tolerance = (to == Format::bf16 ? 0.004f : 1e-5f) * (std::fabs(want) + 0.05f);
            CHECK(std::fabs(got[static_cast<size_t>(row)] - want) <= tolerance, "%s: %g, %g", info(format).name,
                  static_cast<double>(got[static_cast<size_t>(row)]), static_cast<double>(want));
          }
        }
      }
    }
  }
}

// W^T d without panels of the transpose, where an instruction set has it: exact of bf16, else to its last place.
KTSERVE_TEST(few_rows) {
  Random random(23);
  constexpr int64_t n = 80, k = 512, stride = 192, out_stride = 240;
  const Arena room(static_cast<size_t>(n / kPanel * kFewRowsRoom));
  std::vector<uint8_t> d(static_cast<size_t>(16 * stride));
  for (int f = 0; f < kFormats; ++f) {
    const auto format = static_cast<Format>(f);
    if (format != Format::bf16 && plain(format)) continue;
    const Arena weights = random_panels(format, n, k, random);
    std::vector<float> values(n * k);
    unpack_rows(format, weights.data(), k, 0, n, values.data());
    for (Isa isa : test::isas()) {
      const PanelKernels& kernels = panel_kernels(isa);
      for (int64_t rows = 1; rows <= kernels.few; rows += format == Format::bf16 ? 1 : 5) {
        std::vector<float> wanted(static_cast<size_t>(rows * n));
        for (int64_t i = 0; i < rows * n; ++i) {
          const float value = static_cast<float>(random.below(255)) - 127.0f;  // as bf16 holds it
          uint32_t bits;
          std::memcpy(&bits, &value, 4);
          const auto upper = static_cast<uint16_t>(bits >> 16);
          std::memcpy(&d[static_cast<size_t>(i / n * stride + i % n * 2)], &upper, 2);
          wanted[static_cast<size_t>(i)] = value;
        }
        for (int64_t first : {int64_t{0}, int64_t{96}}) {
          const int64_t count = 32 * (1 + random.below(6));
          for (bool adds : {false, true}) {
            std::vector<float> out(static_cast<size_t>(rows * out_stride), 3.0f);
            kernels.few_rows({format,
                              weights.data(),
                              n / kPanel,
                              k,
                              first,
                              count,
                              d.data(),
                              stride,
                              rows,
                              out.data(),
                              out_stride,
                              adds,
                              room.data(),
                              {}});
            for (int64_t i = 0; i < rows * out_stride; ++i) {
              const int64_t row = i / out_stride, column = i % out_stride;
              double want = column < count && !adds ? 0.0 : 3.0;
              double size = 1.0;
              for (int64_t j = 0; column < count && j < n; ++j) {
                const double term = static_cast<double>(values[static_cast<size_t>(j * k + first + column)]) *
                                    static_cast<double>(wanted[static_cast<size_t>(row * n + j)]);
                want += term;
                size += std::fabs(term);
              }
              const double got = static_cast<double>(out[static_cast<size_t>(i)]);
              CHECK(std::fabs(got - want) <= (format == Format::bf16 ? 1e-5 : 0.004) * size,
                    "%s, row %d, column %d: %g, %g", info(format).name, static_cast<int>(row), static_cast<int>(column),
                    got, want);
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace ktserve
