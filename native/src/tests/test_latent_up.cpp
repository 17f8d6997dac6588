#include <cmath>
#include <memory>
#include <numeric>
#include <vector>

#include "linear/latent_up.hpp"
#include "tests/check.hpp"

namespace ktserve {
namespace {

using test::draw;
using test::Random;

constexpr float kScale = 0.25f;  // of the adapter

struct Packed {
  std::unique_ptr<PackedLinear> linear;
  std::vector<float> values;  // [n, k], as they were rounded
};

Packed packed(WorkerPool& pool, const char* format, int64_t n, int64_t k, Random& random) {
  Packed made{std::make_unique<PackedLinear>(format, n, k, pool.groups(), nullptr), draw(n * k, random)};
  made.linear->load(pool, "F32", SourceRows(reinterpret_cast<const uint8_t*>(made.values.data())), n * k * 4);
  std::vector<int64_t> ids(static_cast<size_t>(n));
  std::iota(ids.begin(), ids.end(), 0);
  made.linear->rows(pool, ids.data(), n, made.values.data());
  return made;
}

// The products of one half, adapters included, against the same in double. first, second: by head, of the adapter's
// products t = second(h) x, y += s first(h) t.
template <class First, class Second>
void near_double(const Packed& half, int64_t heads, const std::vector<float>& x, const std::vector<float>& out,
                 const std::vector<int32_t>& slots, int64_t rank, First&& first, Second&& second, double bound,
                 const char* what) {
  const int64_t k = half.linear->k(), rows = half.linear->n() / heads;
  double error = 0, size = 0;
  for (size_t t = 0; t < slots.size(); ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      const float* in = &x[(t * static_cast<size_t>(heads) + static_cast<size_t>(h)) * static_cast<size_t>(k)];
      std::vector<double> small(static_cast<size_t>(slots[t] == 1 ? rank : 0));
      for (size_t r = 0; r < small.size(); ++r)
        for (int64_t i = 0; i < k; ++i) small[r] += double{second(h, static_cast<int64_t>(r), i)} * in[i];
      for (int64_t row = 0; row < rows; ++row) {
        double want = 0;
        for (int64_t i = 0; i < k; ++i)
          want += double{half.values[static_cast<size_t>((h * rows + row) * k + i)]} * in[i];
        for (size_t r = 0; r < small.size(); ++r) want += kScale * first(h, row, static_cast<int64_t>(r)) * small[r];
        const float got = out[(t * static_cast<size_t>(heads) + static_cast<size_t>(h)) * static_cast<size_t>(rows) +
                              static_cast<size_t>(row)];
        error += std::fabs(got - want);
        size += std::fabs(want);
      }
    }
  }
  CHECK(error <= size * bound, "%s: %g", what, error / size);
}

// Halves of two formats; buffers end where rows end.
void one(Isa isa, const char* keys_format, const char* values_format, int64_t tokens, Random& random) {
  WorkerPool pool(PoolOptions{random.below(2) == 0 ? std::vector<std::vector<int>>{{0, 1, 0}}
                                                   : std::vector<std::vector<int>>{{0}, {1, 0}}});
  const int64_t heads = 1 + random.below(5), nope = 32 * (1 + random.below(4)), latent = 32 * (1 + random.below(8));
  const int64_t value = 16 * (1 + random.below(9)), rank = 1 + random.below(20);
  const Packed keys = packed(pool, keys_format, heads * latent, nope, random);
  const Packed values = packed(pool, values_format, heads * value, latent, random);
  LatentUp up(pool, isa, random.below(2) == 0, *keys.linear, *values.linear, static_cast<int>(heads));
  const std::vector<float> a = draw(rank * latent, random), b_keys = draw(heads * nope * rank, random),
                           b_values = draw(heads * value * rank, random);
  up.set_adapter(1, {a.data(), b_keys.data(), b_values.data(), false, rank, kScale});
  std::vector<int32_t> slots(static_cast<size_t>(tokens));
  for (auto& slot : slots) slot = static_cast<int32_t>(random.below(3));
  const std::vector<float> q = draw(tokens * heads * nope, random), mixed = draw(tokens * heads * latent, random);
  std::vector<float> absorbed(mixed.size()), out(static_cast<size_t>(tokens * heads * value));
  up.absorb({q.data(), heads * nope, nope}, {absorbed.data(), heads * latent, latent}, tokens, false, slots.data());
  up.values({mixed.data(), heads * latent, latent}, {out.data(), heads * value, value}, tokens, false, slots.data());
  const auto a_of = [&](int64_t r, int64_t c) { return a[static_cast<size_t>(r * latent + c)]; };
  near_double(
      keys, heads, q, absorbed, slots, rank, [&](int64_t, int64_t c, int64_t r) { return a_of(r, c); },
      [&](int64_t h, int64_t r, int64_t i) { return b_keys[static_cast<size_t>((h * nope + i) * rank + r)]; }, 0.03,
      keys_format);
  near_double(
      values, heads, mixed, out, slots, rank,
      [&](int64_t h, int64_t v, int64_t r) { return b_values[static_cast<size_t>((h * value + v) * rank + r)]; },
      [&](int64_t, int64_t r, int64_t i) { return a_of(r, i); }, 0.03, values_format);
}

KTSERVE_TEST(latent_up_equals_double) {
  for (Isa isa : test::isas()) {
    Random random(7);
    for (const char* keys : {"f32", "bf16", "i8", "i4m"})
      for (const char* values : {"f32", "bf16", "i8", "i4m"})
        for (int64_t tokens : {1L, 2 + random.below(15), 17 + random.below(100)})
          one(isa, keys, values, tokens, random);
  }
}

}  // namespace
}  // namespace ktserve
