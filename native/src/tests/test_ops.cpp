#include <cmath>
#include <vector>

#include "ops/ops.hpp"
#include "tests/check.hpp"

namespace ktserve {
namespace {

using test::draw;
using test::Random;

void close(float got, double want, const char* what) {
  CHECK(std::fabs(got - want) <= 2e-6 + 1e-5 * std::fabs(want), "%s: %g, wanted %g", what, got, want);
}

// Buffers end where rows end, and sizes are odd: a sanitizer sees a vector that runs over.
void norms(const Ops& ops, Random& random) {
  const int64_t rows = 1 + random.below(40), dim = 1 + random.below(700);
  const std::vector<float> x = draw(rows * dim, random), weight = draw(dim, random);
  std::vector<float> residual = draw(rows * dim, random), out(static_cast<size_t>(rows * dim));
  std::vector<float> sum = residual;
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += x[i];
  ops.norm({x.data(), dim, residual.data(), dim, weight.data(), false, out.data(), dim, rows, dim, 1e-6f}, false);
  for (int64_t r = 0; r < rows; ++r) {
    double squares = 0;
    for (int64_t i = 0; i < dim; ++i)
      squares += double{sum[static_cast<size_t>(r * dim + i)]} * sum[static_cast<size_t>(r * dim + i)];
    const double scale = 1 / std::sqrt(squares / static_cast<double>(dim) + 1e-6);
    for (int64_t i = 0; i < dim; ++i) {
      const auto at = static_cast<size_t>(r * dim + i);
      CHECK(residual[at] == sum[at]);
      close(out[at], sum[at] * scale * weight[static_cast<size_t>(i)], "norm");
    }
  }
}

void rotations(const Ops& ops, Random& random) {
  const int64_t tokens = 1 + random.below(60), half = 1 + random.below(40), dim = 2 * half;
  const int heads = static_cast<int>(1 + random.below(4));
  std::vector<float> q = draw(tokens * heads * dim, random), k = draw(tokens * dim, random);
  const std::vector<float> before = q, weight = draw(dim, random), cos = draw(9 * half, random),
                           sin = draw(9 * half, random);
  std::vector<int64_t> positions(static_cast<size_t>(tokens));
  for (auto& p : positions) p = random.below(9);
  ops.qk_norm_rope({q.data(), heads * dim, k.data(), dim, weight.data(), weight.data(), false, cos.data(), sin.data(),
                    positions.data(), 9, tokens, heads, 1, static_cast<int>(dim), 1e-6f},
                   false);
  for (int64_t row = 0; row < tokens * heads; ++row) {
    const float* from = &before[static_cast<size_t>(row * dim)];
    double squares = 0;
    for (int64_t i = 0; i < dim; ++i) squares += double{from[i]} * from[i];
    const double scale = 1 / std::sqrt(squares / static_cast<double>(dim) + 1e-6);
    for (int64_t i = 0; i < half; ++i) {
      const size_t entry = static_cast<size_t>(positions[static_cast<size_t>(row / heads)] * half + i);
      const double a = from[i] * scale * weight[static_cast<size_t>(i)];
      const double b = from[half + i] * scale * weight[static_cast<size_t>(half + i)];
      close(q[static_cast<size_t>(row * dim + i)], a * cos[entry] - b * sin[entry], "rotation");
      close(q[static_cast<size_t>(row * dim + half + i)], b * cos[entry] + a * sin[entry], "rotation");
    }
  }
}

void routes(const Ops& ops, Random& random) {
  const int64_t rows = 1 + random.below(60);
  const int experts = static_cast<int>(1 + random.below(200)),
            top_k = static_cast<int>(1 + random.below(std::min(experts, 10)));
  std::vector<float> logits = draw(rows * experts, random), weights(static_cast<size_t>(rows * top_k));
  std::vector<int64_t> ids(static_cast<size_t>(rows * top_k));
  ops.router_topk({logits.data(), experts, rows, experts, top_k, true, ids.data(), weights.data()}, false);
  for (int64_t r = 0; r < rows; ++r) {
    double total = 0;
    for (int j = 0; j < top_k; ++j) {
      const auto at = static_cast<size_t>(r * top_k + j);
      CHECK(ids[at] >= 0 && ids[at] < experts);
      if (j > 0) CHECK(weights[at] <= weights[at - 1]);
      total += weights[at];
    }
    close(static_cast<float>(total), 1.0, "weights");
  }
}

void products(const Ops& ops, Random& random) {
  const int64_t rows = 1 + random.below(40), dim = 1 + random.below(700);
  const std::vector<float> gate = draw(rows * dim, random), up = draw(rows * dim, random);
  std::vector<float> out(static_cast<size_t>(rows * dim));
  ops.silu_mul({gate.data(), dim, up.data(), dim, out.data(), dim, rows, dim}, false);
  for (size_t i = 0; i < out.size(); ++i) close(out[i], gate[i] / (1 + std::exp(-double{gate[i]})) * up[i], "silu");
}

void places(const Ops& ops, Random& random) {
  const int64_t rows = 1 + random.below(9), n = 1 + random.below(9000);
  std::vector<float> x = draw(rows * n, random);
  for (float& v : x) v = std::round(v * 20);  // with equals
  if (n > 1) x[static_cast<size_t>(random.below(n))] = random.below(2) ? std::nanf("") : INFINITY;
  std::vector<int64_t> out(static_cast<size_t>(rows));
  ops.argmax({x.data(), n, rows, n, out.data()}, false);
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = x.data() + r * n;
    int64_t place = 0;
    for (int64_t i = 1; i < n && !std::isnan(row[place]); ++i)
      if (row[i] > row[place] || std::isnan(row[i])) place = i;
    if (!std::isfinite(row[place])) place = -1;
    CHECK(out[static_cast<size_t>(r)] == place, "place %ld, wanted %ld", static_cast<long>(out[static_cast<size_t>(r)]),
          static_cast<long>(place));
  }
}

KTSERVE_TEST(ops_equal_double) {
  WorkerPool pool(PoolOptions{{{0, 1, 0}}});
  for (Isa isa : test::isas()) {
    const Ops ops(pool, isa);
    Random random(3);
    for (int i = 0; i < 30; ++i) {
      norms(ops, random);
      rotations(ops, random);
      routes(ops, random);
      products(ops, random);
      places(ops, random);
    }
  }
}

}  // namespace
}  // namespace ktserve
