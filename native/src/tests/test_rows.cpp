#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "gemm/kernels.hpp"
#include "packing/half.hpp"
#include "tests/check.hpp"

namespace ktserve {
namespace {

using test::draw;
using test::Random;

// Runs `compute` on every instruction set; it must give the same bits on all. NaN has one bit pattern here.
template <class F>
std::vector<float> on_all(const F& compute) {
  std::vector<float> first;
  for (Isa isa : test::isas()) {
    std::vector<float> got = compute(kernels(isa));
    if (first.empty()) first = got;
    for (size_t i = 0; i < got.size(); ++i) {
      CHECK(got[i] == first[i] || (std::isnan(got[i]) && std::isnan(first[i])), "%g on %s, %g on %s", got[i],
            isa_name(isa), first[i], isa_name(test::isas().front()));
    }
  }
  return first;
}

KTSERVE_TEST(silu_of_any_float) {
  Random random(1);
  for (int round = 0; round < 200; ++round) {
    const int64_t n = 1 + random.below(70);
    std::vector<float> gate = draw(n, random, round % 2 == 0 ? 100.0f : 4.0f), up(gate.size(), 1.0f);
    constexpr float inf = std::numeric_limits<float>::infinity();
    const float special[] = {0.0f, -0.0f, inf, std::nanf(""), 1e-40f, 3e38f, -3e38f, -87.5f, -88.8f, -104.0f};
    for (float v : special) gate[static_cast<size_t>(random.below(n))] = v;
    const std::vector<float> got = on_all([&](const Kernels& table) {
      std::vector<float> out = gate;
      table.silu_mul(out.data(), up.data(), n);
      return out;
    });
    for (size_t i = 0; i < gate.size(); ++i) {
      const double want = gate[i] == inf ? inf : double{gate[i]} / (1 + std::exp(-double{gate[i]}));
      // Below about -88, e^-x is no float any more.
      const double bound = gate[i] > -87 ? 4e-7 * std::fabs(want) : 1e-36;
      CHECK(std::isnan(want) ? std::isnan(got[i]) : got[i] == want || std::fabs(got[i] - want) <= bound,
            "silu(%g) = %g, wanted %g", gate[i], got[i], want);
    }
  }
}

KTSERVE_TEST(clamped_activation_of_any_float) {
  Random random(7);
  for (int round = 0; round < 200; ++round) {
    const int64_t n = 1 + random.below(70);
    const Activation by{round % 3 == 0 ? 0.5f : 7.0f, 1.702f};
    std::vector<float> gate = draw(n, random, round % 2 == 0 ? 50.0f : 4.0f), up = draw(n, random, 10);
    constexpr float inf = std::numeric_limits<float>::infinity();
    const float special[] = {0.0f, -0.0f, inf, std::nanf(""), 1e-40f, 3e38f, 7.0f, -7.0f};
    for (float v : special) {
      gate[static_cast<size_t>(random.below(n))] = v;
      up[static_cast<size_t>(random.below(n))] = -v;
    }
    const std::vector<float> got = on_all([&](const Kernels& table) {
      std::vector<float> out = gate;
      table.activate(by, out.data(), up.data(), n);
      return out;
    });
    const auto limit = static_cast<double>(by.limit);
    for (size_t i = 0; i < gate.size(); ++i) {
      const double g = std::isnan(gate[i]) ? NAN : std::min(double{gate[i]}, limit);
      const double u = std::isnan(up[i]) ? NAN : std::clamp(double{up[i]}, -limit, limit);
      const double want = g / (1 + std::exp(-double{by.alpha} * g)) * (u + 1);
      CHECK(std::isnan(want) ? std::isnan(got[i]) : std::fabs(got[i] - want) <= 2e-6 * std::fabs(g * (u + 1)) + 1e-36,
            "of %g and %g: %g, wanted %g", gate[i], up[i], got[i], want);
    }
  }
}

KTSERVE_TEST(bf16_there_and_back) {
  Random random(2);
  for (int round = 0; round < 200; ++round) {
    const int64_t n = 1 + random.below(70);
    std::vector<float> x(static_cast<size_t>(n));
    for (float& v : x) v = bf16_to_f32(static_cast<uint16_t>(random.bits())) * (round % 2 == 0 ? 1.0f : 1.003f);
    const std::vector<float> got = on_all([&](const Kernels& table) {
      std::vector<uint16_t> half(x.size());
      std::vector<float> out(x.size());
      table.to_bf16(x.data(), n, half.data());
      table.from_bf16(half.data(), n, out.data());
      return out;
    });
    for (size_t i = 0; i < x.size(); ++i) {
      CHECK(std::isnan(x[i]) ? std::isnan(got[i]) : got[i] == bf16_to_f32(f32_to_bf16(x[i])), "%g became %g", x[i],
            got[i]);
    }
  }
}

// Activation rows are the same bytes on every instruction set, packed whole or in two parts, and end where they end.
KTSERVE_TEST(packed_rows) {
  Random random(4);
  for (int f = 0; f < kFormats; ++f) {
    const Format format = static_cast<Format>(f);
    for (int round = 0; round < 20; ++round) {
      const int64_t k = plain(format) ? 1 + random.below(300) : info(format).unit * (1 + random.below(3));
      std::vector<float> x = draw(k, random, round % 3 == 0 ? 1e-31f : 10.0f);
      if (round % 4 == 3) x[static_cast<size_t>(random.below(k))] = round % 8 == 3 ? std::nanf("") : 1.0f / 0.0f;
      std::vector<uint16_t> half;
      for (float v : x) half.push_back(f32_to_bf16(v));
      for (bool is_bf16 : {false, true}) {
        const auto packed = [&](const Kernels& table, int64_t cut) {
          const size_t bytes = static_cast<size_t>(table.row_bytes(format, k));
          const std::unique_ptr<uint8_t, void (*)(void*)> memory(static_cast<uint8_t*>(std::aligned_alloc(64, bytes)),
                                                                 std::free);
          uint8_t* row = memory.get();
          std::memset(row, 0, bytes);
          const auto part = [&](int64_t first, int64_t last) {
            if (is_bf16)
              table.pack_bf16(format, half.data() + first, k, first, last, row);
            else
              table.pack_f32(format, x.data() + first, k, first, last, row);
          };
          if (cut > 0) part(0, cut);
          part(cut, k);
          return std::vector<uint8_t>(row, row + bytes);
        };
        const std::vector<uint8_t> first = packed(kernels(test::isas().front()), 0);
        for (Isa isa : test::isas())
          CHECK(packed(kernels(isa), k / 64 * 32) == first, "%s on %s", info(format).name, isa_name(isa));
      }
    }
  }
}

KTSERVE_TEST(sums_of_rows_and_of_lora) {
  Random random(3);
  for (int round = 0; round < 100; ++round) {
    const int64_t count = 1 + random.below(9), n = 1 + random.below(70);
    const std::vector<float> values = draw(count * n, random), weights = draw(count, random);
    std::vector<const float*> rows;
    for (int64_t j = 0; j < count; ++j) rows.push_back(random.below(4) == 0 ? nullptr : &values[j * n]);
    const std::vector<float> combined = on_all([&](const Kernels& table) {
      std::vector<float> out(static_cast<size_t>(n));
      table.combine(rows.data(), weights.data(), count, n, out.data());
      return out;
    });
    for (int64_t i = 0; i < n; ++i) {
      float want = 0;
      for (int64_t j = 0; j < count; ++j)
        if (rows[j] != nullptr) want = std::fmaf(weights[j], rows[j][i], want);
      CHECK(combined[i] == want, "%g, wanted %g", combined[i], want);
    }

    const int64_t panels = 1 + random.below(4), rank = random.below(20);
    const std::vector<float> start = draw(panels * kPanel, random), t = draw(rank, random);
    std::vector<float> b = draw(panels * rank * kPanel, random);
    std::vector<uint16_t> half;
    for (float& v : b) {
      half.push_back(f32_to_bf16(v));
      v = bf16_to_f32(half.back());
    }
    for (bool is_bf16 : {false, true}) {
      const std::vector<float> got = on_all([&](const Kernels& table) {
        std::vector<float> out = start;
        if (is_bf16)
          table.lora_b(half.data(), panels, rank, t.data(), out.data());
        else
          table.lora_b_f32(b.data(), panels, rank, t.data(), out.data());
        return out;
      });
      for (int64_t i = 0; i < panels * kPanel; ++i) {
        float want = start[i];
        for (int64_t r = 0; r < rank; ++r)
          want = std::fmaf(b[(i / kPanel * rank + r) * kPanel + i % kPanel], t[r], want);
        CHECK(got[i] == want, "%g, wanted %g", got[i], want);
      }
    }
  }
}

}  // namespace
}  // namespace ktserve
