#include <algorithm>
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
  const int64_t tokens = 1 + random.below(60), half = 1 + random.below(40), turned = 2 * half;
  const int64_t dim = turned + (random.below(2) ? random.below(50) : 0);
  const int heads = static_cast<int>(1 + random.below(4));
  const bool normed = random.below(3) > 0;
  std::vector<float> q = draw(tokens * heads * dim, random), k = draw(tokens * dim, random);
  const std::vector<float> before = q, weight = draw(dim, random), cos = draw(9 * half, random),
                           sin = draw(9 * half, random);
  std::vector<int64_t> positions(static_cast<size_t>(tokens));
  for (auto& p : positions) p = random.below(9);
  const float* weights = normed ? weight.data() : nullptr;
  ops.qk_norm_rope({q.data(), heads * dim, k.data(), dim, weights, weights, false, cos.data(), sin.data(),
                    positions.data(), 9, tokens, heads, 1, static_cast<int>(dim), static_cast<int>(turned), 1e-6f},
                   false);
  for (int64_t row = 0; row < tokens * heads; ++row) {
    const float* from = &before[static_cast<size_t>(row * dim)];
    const float* to = &q[static_cast<size_t>(row * dim)];
    double squares = 0;
    for (int64_t i = 0; i < dim; ++i) squares += double{from[i]} * from[i];
    const double scale = 1 / std::sqrt(squares / static_cast<double>(dim) + 1e-6);
    const auto value = [&](int64_t i) { return normed ? from[i] * scale * weight[static_cast<size_t>(i)] : from[i]; };
    for (int64_t i = 0; i < half; ++i) {
      const size_t entry = static_cast<size_t>(positions[static_cast<size_t>(row / heads)] * half + i);
      const double a = value(i), b = value(half + i);
      close(to[i], a * cos[entry] - b * sin[entry], "rotation");
      close(to[half + i], b * cos[entry] + a * sin[entry], "rotation");
    }
    for (int64_t i = turned; i < dim; ++i) close(to[i], value(i), "what is not rotated");
  }
}

Router draw_router(int experts, const std::vector<float>& bias, Random& random) {
  Router router;
  router.groups = static_cast<int>(1 + random.below(8));
  while (experts % router.groups != 0) --router.groups;
  router.top_groups = static_cast<int>(1 + random.below(router.groups));
  const int left = experts / router.groups * router.top_groups;
  router.top_k = static_cast<int>(1 + random.below(std::min(left, 10)));
  router.score = random.below(2) ? Score::sigmoid : Score::softmax;
  router.group_score = random.below(2) ? GroupScore::top2 : GroupScore::max;
  if (random.below(2)) router.bias = bias.data();
  if (random.below(2)) router.normalise = random.below(2) ? 0.0f : 0.25f;
  if (random.below(2)) router.scale = 2.5f;
  return router;
}

// Against what ops/router.hpp says, in double; a group that is kept may come out a little below the last.
void routes(const Ops& ops, Random& random) {
  const int64_t rows = 1 + random.below(60);
  const int experts = static_cast<int>(1 + random.below(200));
  const std::vector<float> logits = draw(rows * experts, random, 3), bias = draw(experts, random);
  const Router router = draw_router(experts, bias, random);
  const int top_k = router.top_k, size = experts / router.groups;
  std::vector<float> weights(static_cast<size_t>(rows * top_k));
  std::vector<int64_t> ids(static_cast<size_t>(rows * top_k));
  ops.router_topk({logits.data(), experts, rows, experts, router, ids.data(), weights.data()}, false);
  for (int64_t r = 0; r < rows; ++r) {
    const float* x = &logits[static_cast<size_t>(r * experts)];
    std::vector<double> s(static_cast<size_t>(experts)), choice, group_scores;
    double total = 0, sum = 0;
    for (int e = 0; e < experts; ++e) total += std::exp(double{x[e]});
    for (size_t e = 0; e < s.size(); ++e) {
      s[e] = router.score == Score::sigmoid ? 1 / (1 + std::exp(-double{x[e]})) : std::exp(double{x[e]}) / total;
      choice.push_back(s[e] + (router.bias == nullptr ? 0 : bias[e]));
    }
    for (int g = 0; g < router.groups; ++g) {
      std::vector<double> group(choice.begin() + g * size, choice.begin() + (g + 1) * size);
      std::sort(group.rbegin(), group.rend());
      group_scores.push_back(group[0] + (router.group_score == GroupScore::top2 && size > 1 ? group[1] : 0));
    }
    std::vector<double> sorted = group_scores;
    std::sort(sorted.rbegin(), sorted.rend());
    const double worst = sorted[static_cast<size_t>(router.top_groups - 1)] - 1e-5;
    for (size_t e = 0; e < s.size(); ++e)
      if (group_scores[e / static_cast<size_t>(size)] < worst) choice[e] = -INFINITY;
    sorted = choice;
    std::sort(sorted.rbegin(), sorted.rend());
    const auto at = [&](int j) { return static_cast<size_t>(ids[static_cast<size_t>(r * top_k + j)]); };
    for (int j = 0; j < top_k; ++j) {
      CHECK(at(j) < s.size());
      for (int other = 0; other < j; ++other) CHECK(at(other) != at(j));
      close(static_cast<float>(choice[at(j)]), sorted[static_cast<size_t>(j)], "choice");
      sum += s[at(j)];
    }
    const double divisor = router.normalise ? sum + double{*router.normalise} : 1;
    for (int j = 0; j < top_k; ++j)
      close(weights[static_cast<size_t>(r * top_k + j)], s[at(j)] / divisor * double{router.scale}, "weight");
  }
}

void sums(const Ops& ops, Random& random) {
  const int64_t rows = 1 + random.below(40), dim = 1 + random.below(700);
  const std::vector<float> base = draw(rows * dim, random), x = draw(rows * dim, random), gate = draw(rows, random, 5);
  std::vector<float> out(static_cast<size_t>(rows * dim));
  for (const float* logits : {static_cast<const float*>(nullptr), gate.data()}) {
    ops.add_gated({base.data(), dim, x.data(), dim, logits, out.data(), dim, rows, dim}, false);
    for (size_t i = 0; i < out.size(); ++i) {
      const double share = logits == nullptr ? 1 : 1 / (1 + std::exp(-double{gate[i / static_cast<size_t>(dim)]}));
      close(out[i], base[i] + share * x[i], "sum");
    }
  }
}

// Heads of queries and gates in one projection, [query | gate] each.
void gates(const Ops& ops, Random& random) {
  const int64_t tokens = 1 + random.below(30), heads = 1 + random.below(5), dim = 1 + random.below(90);
  const int64_t width = heads * dim;
  const std::vector<float> both = draw(2 * tokens * width, random, 4), x = draw(tokens * width, random);
  std::vector<float> queries(x.size()), out = x;
  ops.copy_heads({both.data(), 2 * width, 2 * dim, queries.data(), width, tokens, heads, dim}, 4);
  ops.gate_heads({both.data() + dim, 2 * width, 2 * dim, out.data(), width, tokens, heads, dim}, false);
  for (int64_t i = 0; i < tokens * width; ++i) {
    const auto at = static_cast<size_t>(i / dim * 2 * dim + i % dim), to = static_cast<size_t>(i);
    CHECK(queries[to] == both[at]);
    close(out[to], x[to] / (1 + std::exp(-double{both[at + static_cast<size_t>(dim)]})), "gated head");
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
      sums(ops, random);
      gates(ops, random);
      products(ops, random);
      places(ops, random);
    }
  }
}

}  // namespace
}  // namespace ktserve
