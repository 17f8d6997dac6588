#include <algorithm>
#include <cmath>
#include <thread>
#include <vector>

#include "experts/moe.hpp"
#include "tests/check.hpp"

namespace ktserve {
namespace {

using test::Random;

std::vector<float> random_values(int64_t count, float scale, Random& random) {
  std::vector<float> values(static_cast<size_t>(count));
  for (auto& v : values) v = scale * random.symmetric();
  return values;
}

// A small layer of random float32 weights packed as `format`, with adapters in slots 1 and 3.
struct World {
  int64_t experts, hidden, inner;
  WorkerPool pool;
  ExpertLayer layer;

  World(int64_t e, int64_t h, int64_t i, Format format, int shards, Random& random)
      : experts(e),
        hidden(h),
        inner(i),
        pool(PoolOptions{shards == 1 ? std::vector<std::vector<int>>{{0, 1, 0}}
                                     : std::vector<std::vector<int>>{{0}, {1, 0}}}),
        layer(LayerShape{e, h, i, {format, format, format}, shards}) {
    for (int p = 0; p < 3; ++p) {
      const std::vector<float> w = random_values(e * h * i, 0.1f, random);
      std::vector<const uint8_t*> rows;
      for (int64_t x = 0; x < e; ++x)
        rows.push_back(reinterpret_cast<const uint8_t*>(&w[static_cast<size_t>(x * h * i)]));
      layer.load(pool, p, source_type("F32"), 0, rows);
    }
    for (int slot : {1, 3}) add_lora(slot, 1 + random.below(20), random);
  }

  void add_lora(int slot, int64_t rank, Random& random) {
    std::vector<float> held[6];
    LoraSource source{};
    source.rank = rank;
    for (int p = 0; p < 3; ++p) {
      held[p] = random_values(experts * rank * layer.inner_of(p), 0.1f, random);
      held[3 + p] = random_values(experts * rank * layer.rows_of(p), 0.1f, random);
      source.a[p] = held[p].data();
      source.b[p] = held[3 + p].data();
      source.scales[p] = 0.5f;
    }
    layer.set_lora(pool, slot, source);
  }
};

struct Batch {
  int64_t rows, top_k;
  int32_t bsz;
  std::vector<int64_t> ids;
  std::vector<float> weights, hidden, out;
  std::vector<int32_t> slots;

  Batch(const World& world, int64_t m, int64_t k, Random& random)
      : rows(m),
        top_k(k),
        bsz(static_cast<int32_t>(m)),
        weights(random_values(m * k, 1, random)),
        hidden(random_values(m * world.hidden, 1, random)),
        out(static_cast<size_t>(m * world.hidden)) {
    for (int64_t i = 0; i < m * k; ++i) ids.push_back(random.below(world.experts + 1) - 1);
    for (int64_t i = 0; i < m; ++i) slots.push_back(static_cast<int32_t>(random.below(4)));
  }

  MoeBuffers buffers() {
    return {&bsz, ids.data(), weights.data(), slots.data(), hidden.data(), out.data(), rows, top_k, false};
  }
  // Row r alone, computed by the same kernels.
  std::vector<float> alone(MoeRunner& runner, const World& world, int64_t r) const {
    Batch one = *this;
    one.bsz = 1;
    for (int64_t j = 0; j < top_k; ++j) {
      one.ids[static_cast<size_t>(j)] = ids[static_cast<size_t>(r * top_k + j)];
      one.weights[static_cast<size_t>(j)] = weights[static_cast<size_t>(r * top_k + j)];
    }
    one.slots[0] = slots[static_cast<size_t>(r)];
    for (int64_t i = 0; i < world.hidden; ++i)
      one.hidden[static_cast<size_t>(i)] = hidden[static_cast<size_t>(r * world.hidden + i)];
    runner.forward(world.layer, one.buffers());
    one.out.resize(static_cast<size_t>(world.hidden));
    return one.out;
  }
};

KTSERVE_TEST(moe_rows_are_independent) {
  Random random(3);
  for (Format format : {Format::f32, Format::bf16, Format::i8, Format::i4m}) {
    for (int shards : {1, 2}) {
      World world(5, 96, 64, format, shards, random);
      for (Isa isa : test::isas()) {
        MoeRunner runner(world.pool, isa, true);
        for (int64_t rows : {1, 2, 13, 70}) {
          Batch batch(world, rows, 3, random);
          runner.forward(world.layer, batch.buffers());
          for (float v : batch.out) CHECK(std::isfinite(v));
          const int64_t r = random.below(rows);
          const std::vector<float> alone = batch.alone(runner, world, r);
          for (int64_t i = 0; i < world.hidden; ++i) {
            CHECK(alone[static_cast<size_t>(i)] == batch.out[static_cast<size_t>(r * world.hidden + i)]);
          }
        }
      }
    }
  }
}

// Enough rows for dot_wide: near what the deterministic runner gives, the same in every run, with any pool, and for any
// values of the other rows.
KTSERVE_TEST(moe_many_rows) {
  Random random(5);
  for (Format format : {Format::bf16, Format::i8, Format::i4m}) {
    World world(3, 96, 64, format, 2, random);
    for (Isa isa : test::isas()) {
      Batch batch(world, 70, 2, random);
      MoeRunner exact(world.pool, isa, true);
      exact.forward(world.layer, batch.buffers());
      const std::vector<float> want = batch.out;
      WorkerPool alone(PoolOptions{{{0}}});
      MoeRunner runner(world.pool, isa, false);
      MoeRunner other(alone, isa, false);
      runner.forward(world.layer, batch.buffers());
      const std::vector<float> got = batch.out;
      double difference = 0;
      double size = 0;
      for (size_t i = 0; i < want.size(); ++i) {
        difference += std::fabs(got[i] - want[i]);
        size += std::fabs(want[i]);
      }
      const bool wide = kernels(isa).wide_from(format) > 0;
      CHECK(difference <= (wide ? 0.02 : 0) * size);
      CHECK(!wide || difference > 0);
      other.forward(world.layer, batch.buffers());
      CHECK(batch.out == got);
      for (int64_t i = 35 * world.hidden; i < 70 * world.hidden; ++i) batch.hidden[static_cast<size_t>(i)] = 1e4f;
      runner.forward(world.layer, batch.buffers());
      CHECK(std::equal(got.begin(), got.begin() + 35 * world.hidden, batch.out.begin()));
    }
  }
}

// Several runners, each with a pool of its own, and two of them on one pool, all at the same time.
KTSERVE_TEST(moe_stress) {
  Random random(4);
  World one(4, 64, 32, Format::i8, 1, random);
  World two(6, 32, 64, Format::bf16, 2, random);
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      World& world = t % 2 == 0 ? one : two;
      MoeRunner runner(world.pool, best_isa(), false);
      Random own(10 + t);
      Batch batch(world, 9, 2, own);
      runner.forward(world.layer, batch.buffers());
      const std::vector<float> first = batch.out;
      for (int call = 0; call < 300; ++call) {
        batch.bsz = static_cast<int32_t>(own.below(10));
        runner.forward(world.layer, batch.buffers());
        CHECK(batch.out == first);
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace
}  // namespace ktserve
