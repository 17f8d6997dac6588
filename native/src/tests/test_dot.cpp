#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "gemm/kernels.hpp"
#include "packing/pack.hpp"
#include "runtime/arena.hpp"
#include "tests/check.hpp"

namespace ktserve {
namespace {

using test::Random;

const char* const kTypes[] = {"F32",      "F16",       "BF16",    "Q8_0",    "Q5_0",   "Q5_1",   "Q4_0",    "Q4_1",
                              "Q2_K",     "Q3_K",      "Q4_K",    "Q5_K",    "Q6_K",   "IQ4_NL", "IQ4_XS",  "MXFP4",
                              "INT4_G32", "INT4_G128", "F8_E4M3", "IQ2_XXS", "IQ2_XS", "IQ2_S",  "IQ3_XXS", "IQ3_S"};

// Random bytes are valid blocks of any quantised type once the scales are tame.
std::vector<uint8_t> random_source(const SourceType& type, int64_t n, int64_t k, Random& random) {
  std::vector<uint8_t> data(static_cast<size_t>(n * k / type.block * type.block_bytes));
  for (auto& byte : data) byte = static_cast<uint8_t>(random.bits());
  const std::string_view name = type.name;
  for (size_t at = 0; at < data.size(); at += static_cast<size_t>(type.block_bytes)) {
    const auto put = [&](size_t offset, float v) {
      const uint16_t half = name == "BF16" ? f32_to_bf16(v) : f32_to_f16(v);
      std::memcpy(&data[at + offset], &half, 2);
    };
    if (name == "F32") {
      const float v = random.symmetric();
      std::memcpy(&data[at], &v, 4);
    } else if (name == "MXFP4") {
      data[at] = static_cast<uint8_t>(115 + random.below(8));
    } else if (name == "F8_E4M3") {
      const float v = 0.02f * random.symmetric();
      std::memcpy(&data[at], &v, 4);
      for (size_t i = 4; i < 132; ++i) data[at + i] = (data[at + i] & 0x7f) == 0x7f ? 0x7e : data[at + i];
    } else {
      for (int64_t i = 0; i < std::max<int64_t>(type.scales, 1); ++i) {
        put(static_cast<size_t>(type.scales_at + 2 * i), 0.02f * random.symmetric());
      }
      if (name.substr(0, 4) == "INT4") data[at + 2] &= 15;  // the zero point
    }
  }
  return data;
}

// The exact dot product, and the size that errors are measured by: the root of its terms' squares.
std::pair<double, double> product(const float* w, const float* x, int64_t k) {
  double sum = 0;
  double squares = 0;
  for (int64_t j = 0; j < k; ++j) {
    const double term = static_cast<double>(w[j]) * x[j];
    sum += term;
    squares += term * term;
  }
  return {sum, std::sqrt(squares)};
}

// Of an instruction set: AVX-512 has two ways to multiply bf16, of which a machine uses one.
std::vector<const Kernels*> tables_of(Isa isa) {
  if (isa == Isa::avx512) return {&kernels_avx512(false), &kernels_avx512(true)};
  return {&kernels(isa)};
}

// Every format, instruction set and odd shape: right to the rounding of the activations, memory only where allowed
// (the arenas end on a page, so a sanitizer or the kernel sees an overrun of inputs; outputs carry a border).
void dot_case(const SourceType& type, Format format, int64_t n, int64_t k, int64_t rows, Random& random) {
  const std::vector<uint8_t> source = random_source(type, n, k, random);
  const size_t size = static_cast<size_t>(packed_size(format, n, k));
  std::vector<uint8_t> memory(size + 64);
  uint8_t* packed = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
  pack_panels(type, format, source.data(), n, k, 0, panels_of(n), packed);
  std::vector<float> values(static_cast<size_t>(n * k));
  unpack_rows(format, packed, k, 0, n, values.data());
  std::vector<float> x(static_cast<size_t>(rows * k));
  for (auto& v : x) v = random.symmetric();

  const int64_t width = panels_of(n) * kPanel;
  std::vector<std::vector<float>> results;
  const auto compute = [&](const Kernels& table, bool dequantised, int64_t first, int64_t count) {
    const int64_t stride = table.row_bytes_for(format, dequantised, k);
    std::vector<uint8_t> held(static_cast<size_t>(stride * count) + 64);
    uint8_t* packed_x = held.data() + (64 - reinterpret_cast<uintptr_t>(held.data()) % 64) % 64;
    for (int64_t r = 0; r < count; ++r) {
      const int64_t cut = k / 64 * 32;  // a row may be packed in parts
      const float* row = &x[static_cast<size_t>((first + r) * k)];
      table.pack(format, dequantised, row, k, 0, cut, packed_x + r * stride);
      table.pack(format, dequantised, row + cut, k, cut, k, packed_x + r * stride);
    }
    std::vector<float> out(static_cast<size_t>(count * (width + 16)), 77.0f);
    (dequantised ? table.dot_dequantised : table.dot)(
        DotArgs{format, packed, panels_of(n), k, packed_x, stride, count, out.data(), width + 16});
    return out;
  };
  const auto check = [&](const std::vector<float>& out, Isa isa, float bound) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = width; i < width + 16; ++i) CHECK(out[static_cast<size_t>(r * (width + 16) + i)] == 77.0f);
      for (int64_t i = 0; i < n; ++i) {
        const auto [exact, size] = product(&values[static_cast<size_t>(i * k)], &x[static_cast<size_t>(r * k)], k);
        const double got = out[static_cast<size_t>(r * (width + 16) + i)];
        CHECK(std::fabs(got - exact) <= bound * (size + 1e-6), "%s on %s [%d, %d] x %d: %g, not %g", type.name,
              isa_name(isa), static_cast<int>(n), static_cast<int>(k), static_cast<int>(rows), got, exact);
      }
    }
  };
  const auto check_last = [&](const Kernels& table, bool dequantised, const std::vector<float>& of) {
    const std::vector<float> last = compute(table, dequantised, rows - 1, 1);
    CHECK(std::equal(last.begin(), last.end(), of.end() - (width + 16)), "%s: a row sees its neighbours", type.name);
  };
  for (Isa isa : test::isas()) {
    for (const Kernels* each : tables_of(isa)) {
      const Kernels& table = *each;
      results.push_back(compute(table, false, 0, rows));
      check(results.back(), isa, plain(format) && format != Format::bf16 ? 1e-5f : 0.03f);
      check_last(table, false, results.back());
      if (plain(format)) continue;
      CHECK(results.back() == results.front(), "%s differs on %s", type.name, isa_name(isa));
      if (table.dequantised_from(format) == 0) continue;
      const std::vector<float> dequantised = compute(table, true, 0, rows);
      check(dequantised, isa, 0.02f);
      check_last(table, true, dequantised);
    }
  }
}

// Dequantising in half precision must not show: outputs whose scales are far apart or subnormal, zero weights, large
// and tiny activations.
KTSERVE_TEST(dequantised_rows_keep_their_range) {
  Random random(5);
  for (const char* name : {"Q8_0", "Q4_K", "Q6_K", "Q4_1", "Q2_K", "IQ4_XS", "INT4_G128", "IQ2_XS", "IQ3_S"}) {
    const SourceType& type = source_type(name);
    constexpr int64_t n = 32, k = 512, rows = 40;
    std::vector<uint8_t> source = random_source(type, n, k, random);
    const size_t row_bytes = source.size() / n;
    const float sizes[8] = {1e-7f, 3e-6f, 1e-4f, 0.01f, 1.0f, 100.0f, 0.0f, 1e-7f};
    for (size_t at = 0; at < source.size(); at += static_cast<size_t>(type.block_bytes)) {
      const uint16_t half = f32_to_f16(sizes[at / row_bytes % 8] * (0.5f + 0.5f * random.symmetric()));
      for (int64_t i = 0; i < type.scales; ++i) {
        std::memcpy(&source[at + static_cast<size_t>(type.scales_at + 2 * i)], &half, 2);
      }
    }
    Arena packed(static_cast<size_t>(packed_size(type.format, n, k)));
    pack_panels(type, type.format, source.data(), n, k, 0, panels_of(n), packed.data());
    std::vector<float> values(n * k);
    unpack_rows(type.format, packed.data(), k, 0, n, values.data());
    std::vector<float> x(rows * k);
    const float scales[4] = {1.0f, 1e-12f, 1e6f, 1e15f};
    for (size_t i = 0; i < x.size(); ++i) x[i] = random.symmetric() * scales[i / k % 4];
    for (Isa isa : test::isas()) {
      const Kernels& table = kernels(isa);
      if (table.dequantised_from(type.format) == 0) continue;
      const int64_t stride = table.row_bytes_for(type.format, true, k);
      Arena packed_x(static_cast<size_t>(rows * stride));
      for (int64_t r = 0; r < rows; ++r) {
        table.pack(type.format, true, &x[static_cast<size_t>(r * k)], k, 0, k, packed_x.data() + r * stride);
      }
      std::vector<float> out(rows * n);
      table.dot_dequantised(
          {type.format, packed.data(), panels_of(n), k, packed_x.data(), stride, rows, out.data(), n});
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t i = 0; i < n; ++i) {
          const auto [exact, size] = product(&values[static_cast<size_t>(i * k)], &x[static_cast<size_t>(r * k)], k);
          const double got = out[static_cast<size_t>(r * n + i)];
          CHECK(std::fabs(got - exact) <= 0.02 * size, "%s row %d output %d: %g, not %g", name, static_cast<int>(r),
                static_cast<int>(i), got, exact);
        }
      }
    }
  }
}

KTSERVE_TEST(dot_every_format) {
  Random random(1);
  for (const char* name : kTypes) {
    const SourceType& type = source_type(name);
    for (int round = 0; round < 12; ++round) {
      const int64_t unit = type.block == 1 ? 1 : type.block;
      const int64_t k = unit == 1 ? 1 + random.below(200) : unit * (1 + random.below(unit == 256 ? 3 : 9));
      const int64_t n = 1 + random.below(70);
      const int64_t rows = 1 + random.below(round < 6 ? 8 : 40);
      dot_case(type, type.format, n, k, rows, random);
      if (type.block == 1) {
        dot_case(type, Format::f32, n, k, rows, random);
        dot_case(type, Format::bf16, n, k, rows, random);
        dot_case(type, Format::i8, n, round_up(k, 32), rows, random);
        dot_case(type, Format::i4m, n, round_up(k, 32), rows, random);
      }
    }
  }
}

// AMX goes through k in chunks when there are many rows.
KTSERVE_TEST(dot_long_rows) {
  Random random(2);
  for (int64_t rows : {1, 8, 9, 16, 17, 32, 33, 50})
    dot_case(source_type("BF16"), Format::bf16, 33, 1300, rows, random);
  for (int64_t rows : {1, 40, 100}) {
    dot_case(source_type("Q8_0"), Format::i8, 70, 1312, rows, random);
    for (const char* name : {"Q6_K", "Q2_K"}) {
      dot_case(source_type(name), source_type(name).format, 16, 1280, rows, random);
    }
  }
}

KTSERVE_TEST(half_precision) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const uint16_t half = static_cast<uint16_t>(bits);
    const float v = f16_to_f32(half);
    if (v != v) {
      CHECK(f16_to_f32(f32_to_f16(v)) != f16_to_f32(f32_to_f16(v)));
    } else {
      CHECK(f32_to_f16(v) == half, "%x", bits);
    }
    const float b = bf16_to_f32(half);
    if (b == b) CHECK(f32_to_bf16(b) == half, "%x", bits);
  }
}

// A tail adds what a second call would, bit for bit.
KTSERVE_TEST(dot_tail) {
  Random random(9);
  constexpr int64_t panels = 3, k = 1056, rank = 40, most = 70;
  const auto draw_panels = [&](int64_t of) {
    Arena memory(static_cast<size_t>(packed_size(Format::bf16, panels * kPanel, of)));
    const std::vector<float> w = test::draw(panels * kPanel * of, random);
    pack_panels(source_type("F32"), Format::bf16, reinterpret_cast<const uint8_t*>(w.data()), panels * kPanel, of, 0,
                panels, memory.data());
    return memory;
  };
  const Arena w = draw_panels(k), tail = draw_panels(rank);
  for (Isa isa : test::isas()) {
    const Kernels& table = kernels(isa);
    if (!table.tails) continue;
    const int64_t stride = table.row_bytes(Format::bf16, k), tail_stride = table.row_bytes(Format::bf16, rank);
    Arena x(static_cast<size_t>(most * stride)), t(static_cast<size_t>(most * tail_stride));
    for (int64_t row = 0; row < most; ++row) {
      table.pack_f32(Format::bf16, test::draw(k, random).data(), k, 0, k, x.data() + row * stride);
      table.pack_f32(Format::bf16, test::draw(rank, random).data(), rank, 0, rank, t.data() + row * tail_stride);
    }
    for (int64_t rows : {int64_t{1}, int64_t{16}, int64_t{23}, int64_t{33}, most}) {
      constexpr int64_t out_stride = panels * kPanel + 16;
      std::vector<float> want(static_cast<size_t>(rows * out_stride), 0.5f), got = want;
      DotArgs args{Format::bf16, w.data(), panels, k, x.data(), stride, rows, want.data(), out_stride, nullptr, true};
      table.dot(args);
      args.out = got.data();
      args.tail = {tail.data(), rank, t.data(), tail_stride};
      table.dot(args);
      CHECK(want != got);
      table.dot({Format::bf16, tail.data(), panels, rank, t.data(), tail_stride, rows, want.data(), out_stride, nullptr,
                 true});
      CHECK(want == got, "%d rows", static_cast<int>(rows));
    }
  }
}

}  // namespace
}  // namespace ktserve
