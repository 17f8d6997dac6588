#pragma once

#include <map>
#include <vector>

#include "experts/moe.hpp"
#include "runtime/task.hpp"
#include "tests/check.hpp"

namespace ktserve::test {

// What an adapter was made of: A of gate, up, down, then B.
struct DrawnLora {
  int64_t rank;
  std::vector<float> matrices[6];
};

// A small layer of random float32 weights packed as `format`, with adapters in slots 1 and 3. `biased`: with biases,
// and the clamped activation with a limit that many values exceed.
struct World {
  int64_t experts, hidden, inner;
  WorkerPool pool;
  ExpertLayer layer;
  std::vector<float> biases[3];
  std::map<int, DrawnLora> loras;
  static constexpr float kScale = 0.5f;  // of adapters

  World(int64_t e, int64_t h, int64_t i, Format format, int shards, Random& random, bool biased = false)
      : experts(e),
        hidden(h),
        inner(i),
        pool(PoolOptions{shards == 1 ? std::vector<std::vector<int>>{{0, 1, 0}}
                                     : std::vector<std::vector<int>>{{0}, {1, 0}}}),
        layer(LayerShape{
            e, h, i, {format, format, format}, shards, biased, biased ? Activation{0.4f, 1.7f} : Activation{}}) {
    for (int p = 0; p < 3; ++p) {
      const std::vector<float> w = draw(e * h * i, random, 0.1f);
      std::vector<SourceRows> rows;
      for (int64_t x = 0; x < e; ++x)
        rows.emplace_back(reinterpret_cast<const uint8_t*>(&w[static_cast<size_t>(x * h * i)]));
      layer.load(pool, p, source_type("F32"), 0, rows);
      if (!biased) continue;
      biases[p] = draw(e * layer.rows_of(p), random, 0.5f);
      layer.load_bias(p, biases[p].data());
    }
    for (int slot : {1, 3}) add_lora(slot, 1 + random.below(20), random);
  }

  void add_lora(int slot, int64_t rank, Random& random) {
    DrawnLora& made = loras[slot];
    made.rank = rank;
    std::vector<float>(&held)[6] = made.matrices;
    LoraSource source{};
    source.rank = rank;
    for (int p = 0; p < 3; ++p) {
      held[p] = draw(experts * rank * layer.inner_of(p), random, 0.1f);
      held[3 + p] = draw(experts * rank * layer.rows_of(p), random, 0.1f);
      source.a[p] = held[p].data();
      source.b[p] = held[3 + p].data();
      source.scales[p] = kScale;
    }
    layer.set_lora(pool, slot, source);
  }
};

// A layer's expert call over buffers that stay, to be replayed.
struct Forward : Task {
  MoeRunner& runner;
  const ExpertLayer& layer;
  MoeBuffers buffers;

  Forward(MoeRunner& runner, const ExpertLayer& layer, const MoeBuffers& buffers)
      : runner(runner), layer(layer), buffers(buffers) {}
  void run() const override { runner.forward(layer, buffers); }
};

}  // namespace ktserve::test
