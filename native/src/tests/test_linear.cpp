#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "linear/linear.hpp"
#include "packing/pack.hpp"
#include "tests/check.hpp"

namespace ktserve {
namespace {

using test::draw;
using test::Random;

double dot(const float* a, const float* b, int64_t k) {
  double sum = 0;
  for (int64_t i = 0; i < k; ++i) sum += double{a[i]} * b[i];
  return sum;
}

// Two projections of one input with adapters and a bias, against the same in double; buffers end where rows end.
void one(Isa isa, const char* format, double bound, int64_t rows, int64_t k, Random& random) {
  const int64_t n[2] = {1 + random.below(200), 1 + random.below(40)};
  WorkerPool pool(PoolOptions{{{0, 1, 0}}});
  LinearRunner runner(pool, isa, random.below(2) == 0);
  const std::vector<float> bias = draw(n[0], random), x = draw(rows * k, random);
  std::vector<float> weights[2], out[2];
  std::vector<PackedLinear*> linears;
  struct Adapter {
    std::vector<float> a, b;
    int64_t rank;
  } adapters[2][4];
  for (int i = 0; i < 2; ++i) {
    weights[i] = draw(n[i] * k, random);
    linears.push_back(new PackedLinear(format, n[i], k, i + 1, i == 0 ? bias.data() : nullptr));
    linears.back()->load(pool, "F32", SourceRows(reinterpret_cast<const uint8_t*>(weights[i].data())), n[i] * k * 4);
    std::vector<int64_t> ids(static_cast<size_t>(n[i]));
    std::iota(ids.begin(), ids.end(), 0);
    linears.back()->rows(pool, ids.data(), n[i], weights[i].data());  // as they were rounded
    for (int slot : {1, 3}) {
      Adapter& adapter = adapters[i][slot];
      adapter.rank = 1 + random.below(20);
      adapter.a = draw(adapter.rank * k, random);
      adapter.b = draw(n[i] * adapter.rank, random);
      linears.back()->set_adapter(slot, adapter.a.data(), adapter.b.data(), false, adapter.rank, 0.25f);
    }
    out[i].resize(static_cast<size_t>(rows * n[i]));
  }
  std::vector<int32_t> slots(static_cast<size_t>(rows));
  for (auto& slot : slots) slot = static_cast<int32_t>(random.below(4));
  runner.run({{linears[0], out[0].data(), n[0]}, {linears[1], out[1].data(), n[1]}},
             {x.data(), k, rows, false, false, slots.data()});
  for (int i = 0; i < 2; ++i) {
    double error = 0, size = 0;
    for (int64_t r = 0; r < rows; ++r) {
      const Adapter& adapter = adapters[i][slots[static_cast<size_t>(r)]];
      std::vector<double> t(static_cast<size_t>(adapter.b.empty() ? 0 : adapter.rank));
      for (size_t j = 0; j < t.size(); ++j)
        t[j] = dot(&x[static_cast<size_t>(r * k)], &adapter.a[j * static_cast<size_t>(k)], k);
      for (int64_t j = 0; j < n[i]; ++j) {
        double want = dot(&x[static_cast<size_t>(r * k)], &weights[i][static_cast<size_t>(j * k)], k);
        if (i == 0) want += bias[static_cast<size_t>(j)];
        for (size_t q = 0; q < t.size(); ++q) want += 0.25 * t[q] * adapter.b[static_cast<size_t>(j) * t.size() + q];
        error += std::fabs(out[i][static_cast<size_t>(r * n[i] + j)] - want);
        size += std::fabs(want);
      }
    }
    CHECK(error <= size * bound, "%s %s: %g", isa_name(isa), format, error / size);
    delete linears[static_cast<size_t>(i)];
  }
}

KTSERVE_TEST(linear_equals_double) {
  for (Isa isa : test::isas()) {
    Random random(5);
    for (int i = 0; i < 8; ++i) {
      const auto drawn = [&](const char* format, double bound) {
        const int64_t k = 32 * (1 + random.below(8)), rows = 1 + random.below(3) * random.below(70);
        one(isa, format, bound, rows, k, random);
      };
      drawn("f32", 1e-5);
      drawn("bf16", 0.012);
      drawn("i8", 0.03);
      drawn("i4m", 0.03);
    }
  }
}

// Several parts of k and several ranges of rows, whose lengths differ.
KTSERVE_TEST(linear_of_many_rows) {
  for (Isa isa : test::isas()) {
    Random random(6);
    for (const char* format : {"bf16", "i8", "i4m"}) one(isa, format, 0.03, 261 + random.below(90), 1600, random);
  }
}

}  // namespace
}  // namespace ktserve
