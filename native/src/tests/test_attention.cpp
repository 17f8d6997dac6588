#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "attention/attention.hpp"
#include "packing/pack.hpp"
#include "tests/check.hpp"

namespace ktserve {
namespace {

using test::Random;

// Rows of floats, or of the bf16 nearest to them; exactly as long as they are read, for the sanitizers.
struct Rows {
  std::vector<float> values;  // as rounded
  std::vector<uint8_t> memory;

  Rows(int64_t count, bool bf16, Random& random)
      : values(static_cast<size_t>(count)), memory(static_cast<size_t>(count * (bf16 ? 2 : 4))) {
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = random.symmetric();
      if (bf16) {
        const uint16_t half = f32_to_bf16(values[i]);
        values[i] = bf16_to_f32(half);
        std::memcpy(&memory[i * 2], &half, 2);
      } else {
        std::memcpy(&memory[i * 4], &values[i], 4);
      }
    }
  }
};

float read(const std::vector<uint8_t>& memory, size_t i, bool bf16) {
  if (!bf16) {
    float v;
    std::memcpy(&v, &memory[i * 4], 4);
    return v;
  }
  uint16_t half;
  std::memcpy(&half, &memory[i * 2], 2);
  return bf16_to_f32(half);
}

struct Sequence {
  std::vector<int32_t> blocks;
  std::vector<float> k, v;  // [position, kv_heads, head_dim]
};

// One query head against its window of the positions up to and with its own, and its sink, in double.
std::vector<double> attend(const float* q, const Sequence& s, int64_t seen, int64_t head, const AttentionShape& shape,
                           double sink) {
  const int64_t kv_heads = shape.kv_heads, dim = shape.head_dim;
  const int64_t from = shape.window > 0 ? std::max<int64_t>(0, seen - shape.window) : 0;
  std::vector<double> scores(static_cast<size_t>(seen)), out(static_cast<size_t>(shape.value_dim()));
  double highest = sink;
  for (int64_t p = from; p < seen; ++p) {
    double dot = 0;
    for (int64_t d = 0; d < dim; ++d) dot += double{q[d]} * s.k[static_cast<size_t>((p * kv_heads + head) * dim + d)];
    scores[static_cast<size_t>(p)] = dot / std::sqrt(static_cast<double>(dim));
    highest = std::max(highest, scores[static_cast<size_t>(p)]);
  }
  double total = std::exp(sink - highest);
  for (int64_t p = from; p < seen; ++p) {
    double& x = scores[static_cast<size_t>(p)];
    total += x = std::exp(x - highest);
  }
  for (int64_t p = from; p < seen; ++p)
    for (int64_t d = 0; d < shape.value_dim(); ++d)
      out[static_cast<size_t>(d)] +=
          scores[static_cast<size_t>(p)] / total * s.v[static_cast<size_t>((p * kv_heads + head) * dim + d)];
  return out;
}

// Several sequences grow by random steps in a cache of shuffled blocks; every output is compared.
void grow(Isa isa, KvType kv, bool float_rows, Products products, bool latent, Random& random) {
  const int64_t kv_heads = latent ? 1 : 1 + random.below(3), group = 1 + random.below(9);
  const int64_t heads = kv_heads * group, dim = 16 * (1 + random.below(16));
  const int windows[] = {0, 0, 1, 3, 16, 40, 130, 300};
  constexpr int num_blocks = 96;
  WorkerPool pool(PoolOptions{{{0, 1, 0}}});
  AttentionShape shape{
      2,          num_blocks, static_cast<int>(heads), static_cast<int>(kv_heads), static_cast<int>(dim), kv,
      float_rows, products};
  shape.latent = latent ? static_cast<int>(16 * (1 + random.below(dim / 16))) : 0;
  shape.window = windows[random.below(8)];
  const int64_t out_dim = shape.value_dim();
  PagedAttention attention(pool, shape, isa);
  std::vector<float> sinks(static_cast<size_t>(heads), -INFINITY);
  if (random.below(2) == 0) {
    for (float& sink : sinks) sink = random.symmetric() * (random.below(4) == 0 ? 300.0f : 3.0f);
    attention.set_sinks(1, sinks.data());
  }
  std::vector<int32_t> free(num_blocks);
  for (int i = 0; i < num_blocks; ++i) free[static_cast<size_t>(i)] = i;
  for (size_t i = free.size(); i > 1; --i)
    std::swap(free[i - 1], free[static_cast<size_t>(random.below(static_cast<int64_t>(i)))]);
  std::vector<Sequence> sequences(static_cast<size_t>(1 + random.below(3)));
  for (int step = 0; step < 5; ++step) {
    std::vector<int64_t> starts{0}, contexts;
    std::vector<std::vector<int32_t>> tables;
    for (Sequence& s : sequences) {
      const int64_t had = static_cast<int64_t>(s.k.size()) / (kv_heads * dim);
      const int64_t add = step % 2 == 0 ? 1 + random.below(150) : 1;
      starts.push_back(starts.back() + add);
      contexts.push_back(had + add);
      while (static_cast<int64_t>(s.blocks.size()) * 16 < had + add) {
        s.blocks.push_back(free.back());
        free.pop_back();
      }
      tables.push_back(s.blocks);
    }
    const int64_t tokens = starts.back();
    const bool half = kv != KvType::float32 && !float_rows;
    const Rows q(tokens * heads * dim, half, random), k(tokens * kv_heads * dim, half, random),
        v(tokens * kv_heads * dim, half, random);
    std::vector<uint8_t> out(q.memory.size() / static_cast<size_t>(dim) * static_cast<size_t>(out_dim));
    attention.plan(starts, contexts, tables);
    attention.forward(1, tokens, {q.memory.data(), heads * dim}, {k.memory.data(), kv_heads * dim},
                      {v.memory.data(), kv_heads * dim}, {out.data(), heads * out_dim});
    double error = 0, size = 0;
    for (size_t r = 0; r < sequences.size(); ++r) {
      Sequence& s = sequences[r];
      const auto part = [&](const Rows& rows) {
        return std::pair{rows.values.begin() + starts[r] * kv_heads * dim,
                         rows.values.begin() + starts[r + 1] * kv_heads * dim};
      };
      s.k.insert(s.k.end(), part(k).first, part(k).second);
      s.v.insert(s.v.end(), part(latent ? k : v).first, part(latent ? k : v).second);
      for (int64_t t = starts[r]; t < starts[r + 1]; ++t) {
        const int64_t h = random.below(heads);  // one head a token keeps the test quick
        const size_t at = static_cast<size_t>((t * heads + h) * out_dim);
        const auto want =
            attend(&q.values[static_cast<size_t>((t * heads + h) * dim)], s, contexts[r] - (starts[r + 1] - 1 - t),
                   h / group, shape, double{sinks[static_cast<size_t>(h)]});
        for (size_t d = 0; d < want.size(); ++d) {
          error += std::fabs(read(out, at + d, half) - want[d]);
          size += std::fabs(want[d]);
        }
      }
    }
    const double bound = kv == KvType::float32 ? 1e-5 : kv == KvType::bf16 ? 0.005 : 0.015;
    CHECK(error <= size * bound + 1e-30, "%s kv %d float rows %d dim %ld latent %d window %d: %g", isa_name(isa),
          static_cast<int>(kv), float_rows, static_cast<long>(dim), shape.latent, shape.window, error / size);
  }
}

KTSERVE_TEST(attention_equals_double) {
  for (Isa isa : test::isas()) {
    Random random(11);
    for (int i = 0; i < 4; ++i) {
      for (bool latent : {false, true}) grow(isa, KvType::float32, false, Products::by_cpu, latent, random);
      for (Products products : {Products::int16, Products::bf16}) {
        if (isa == Isa::avx2 && products == Products::bf16) continue;
        for (bool float_rows : {false, true}) {
          for (bool latent : {false, true}) grow(isa, KvType::bf16, float_rows, products, latent, random);
          grow(isa, KvType::int8, float_rows, products, false, random);
        }
      }
    }
  }
}

}  // namespace
}  // namespace ktserve
