#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "tests/check.hpp"
#include "tests/world.hpp"
#include "training/trainer.hpp"

namespace ktserve {
namespace {

using test::draw;
using test::Random;
using test::World;

// One layer's step: the loss sum(out * g) and its gradients.
struct Training {
  World& world;
  int64_t rows, top_k = 2;
  std::vector<int64_t> ids;
  std::vector<float> weights, hidden, g, out, kept, grad_hidden, grad_weights;
  std::vector<int32_t> slots;
  std::vector<float> matrices[2][6], gradients[2][6];
  std::vector<TrainLora> loras;

  Training(World& w, int64_t m, Random& random)
      : world(w),
        rows(m),
        weights(draw(m * top_k, random)),
        hidden(draw(m * w.hidden, random)),
        g(draw(m * w.hidden, random)),
        out(g.size()),
        kept(static_cast<size_t>(m * top_k * 2 * (w.inner + 18))),
        grad_hidden(g.size()),
        grad_weights(weights.size()) {
    for (int64_t i = 0; i < m * top_k; ++i) ids.push_back(random.below(w.experts + 1) - 1);
    for (int64_t i = 0; i < m; ++i) slots.push_back(static_cast<int32_t>(random.below(3)));
    for (int slot : {1, 2}) {
      TrainLora lora{slot, slot == 1 ? 3 : 18, 0.5f, {}, {}, {}, {}};
      for (int p = 0; p < 3; ++p) {
        for (int half = 0; half < 2; ++half) {
          const int64_t side = half == 0 ? w.layer.inner_of(p) : w.layer.rows_of(p);
          auto& matrix = matrices[slot - 1][half * 3 + p];
          auto& gradient = gradients[slot - 1][half * 3 + p];
          matrix = draw(w.experts * lora.rank * side, random, 0.2f);
          gradient.resize(matrix.size());
          (half == 0 ? lora.a : lora.b)[p] = matrix.data();
          (half == 0 ? lora.grad_a : lora.grad_b)[p] = gradient.data();
        }
      }
      loras.push_back(lora);
    }
  }
  TrainBatch batch() const { return {ids.data(), weights.data(), slots.data(), hidden.data(), rows, top_k, false}; }
  double loss(ExpertTrainer& trainer) {
    trainer.forward(world.layer, loras, batch(), out.data(), kept.data());
    double sum = 0;
    for (size_t i = 0; i < g.size(); ++i) sum += static_cast<double>(out[i]) * static_cast<double>(g[i]);
    return sum;
  }
  void backward(ExpertTrainer& trainer, bool use_kept) {
    trainer.backward(world.layer, loras, batch(), use_kept ? kept.data() : nullptr, g.data(), grad_hidden.data(),
                     grad_weights.data());
  }
};

// Forward is what serving computes, of the same adapters.
KTSERVE_TEST(trainer_forward_equals_serving) {
  Random random(25);
  for (bool biased : {false, true}) {
    World world(3, 96, 64, Format::f32, 2, random, biased);
    for (Isa isa : test::isas()) {
      for (int64_t rows : {1, 29}) {
        Training training(world, rows, random);
        for (const TrainLora& lora : training.loras) {
          LoraSource source{};
          source.rank = lora.rank;
          for (int p = 0; p < 3; ++p) {
            source.a[p] = lora.a[p];
            source.b[p] = lora.b[p];
            source.scales[p] = lora.scale;
          }
          world.layer.set_lora(world.pool, lora.slot, source);
        }
        ExpertTrainer trainer(world.pool, isa);
        training.loss(trainer);
        MoeRunner runner(world.pool, isa, true);
        std::vector<float> out(training.out.size());
        const auto bsz = static_cast<int32_t>(rows);
        runner.forward(world.layer, {&bsz, training.ids.data(), training.weights.data(), training.slots.data(),
                                     training.hidden.data(), out.data(), rows, training.top_k, false});
        for (size_t i = 0; i < out.size(); ++i) {
          CHECK(std::fabs(out[i] - training.out[i]) <= 1e-4f * (1 + std::fabs(out[i])), "%g, %g", double{out[i]},
                double{training.out[i]});
        }
      }
    }
  }
}

// A step along the gradient changes the loss by its length squared.
KTSERVE_TEST(trainer_gradients) {
  Random random(22);
  for (const auto& [shards, biased] :
       {std::pair{1, false}, std::pair{2, false}, std::pair{1, true}, std::pair{2, true}}) {
    World world(3, 96, 64, Format::f32, shards, random, biased);
    for (Isa isa : test::isas()) {
      for (int64_t rows : {1, 2, 29}) {
        Training training(world, rows, random);
        ExpertTrainer trainer(world.pool, isa);
        training.loss(trainer);
        training.backward(trainer, false);
        const std::vector<float> first = training.grad_hidden, of_lora = training.gradients[1][5];
        std::fill(training.gradients[1][5].begin(), training.gradients[1][5].end(), NAN);  // all of it is written
        training.backward(trainer, true);
        CHECK(first == training.grad_hidden && of_lora == training.gradients[1][5]);
        const auto along = [&](std::vector<float>& values, const std::vector<float>& gradient) {
          double square = 0;
          for (float v : gradient) square += static_cast<double>(v) * static_cast<double>(v);
          if (square == 0) return;
          // The clamped form has corners, which few values may be within a step of.
          const auto eps = static_cast<float>((biased ? 2e-4 : 3e-3) / std::sqrt(square));
          const std::vector<float> before = values;
          for (size_t i = 0; i < values.size(); ++i) values[i] = before[i] + eps * gradient[i];
          const double above = training.loss(trainer);
          for (size_t i = 0; i < values.size(); ++i) values[i] = before[i] - eps * gradient[i];
          const double below = training.loss(trainer);
          values = before;
          const double slope = (above - below) / (2 * static_cast<double>(eps));
          CHECK(std::fabs(slope - square) <= 0.02 * square + 1e-3 * std::sqrt(square), "%g, %g", slope, square);
        };
        along(training.hidden, training.grad_hidden);
        along(training.weights, training.grad_weights);
        for (int slot = 0; slot < 2; ++slot) {
          for (int i = 0; i < 6; ++i) along(training.matrices[slot][i], training.gradients[slot][i]);
        }
      }
    }
  }
}

// LoRA as the tail of the products, where all rows of an expert are of one adapter, and beside them, where the same
// adapter comes as two. Widths and numbers of rows on both sides of what a product takes at a time.
KTSERVE_TEST(trainer_one_adapter) {
  Random random(24);
  for (const auto [experts, hidden, inner] : {std::array{3, 96, 160}, std::array{2, 1056, 128}}) {
    World world(experts, hidden, inner, Format::bf16, experts - 1, random);
    for (Isa isa : test::isas()) {
      for (int64_t rows : {24, 48, 120}) {
        Training training(world, rows, random);
        ExpertTrainer trainer(world.pool, isa);
        const TrainLora lora = training.loras[1];
        training.loras = {lora};
        std::fill(training.slots.begin(), training.slots.end(), lora.slot);
        training.loss(trainer);
        training.backward(trainer, true);
        const std::vector<float> out = training.out, grad_hidden = training.grad_hidden;
        std::vector<float> sums[6];
        std::copy_n(training.gradients[1], 6, sums);
        training.loras.push_back(lora);
        training.loras[1].slot = lora.slot + 1;
        for (int p = 0; p < 3; ++p) {
          for (int half = 0; half < 2; ++half) {
            std::vector<float>& other = training.gradients[0][half * 3 + p];
            other.resize(sums[half * 3 + p].size());
            (half == 0 ? training.loras[1].grad_a : training.loras[1].grad_b)[p] = other.data();
          }
        }
        for (size_t i = 0; i < training.slots.size(); i += 2) ++training.slots[i];
        training.loss(trainer);
        training.backward(trainer, true);
        const auto near = [](const std::vector<float>& got, const std::vector<float>& want) {
          double difference = 0, size = 0;
          for (size_t i = 0; i < got.size(); ++i) {
            difference += static_cast<double>(std::fabs(got[i] - want[i]));
            size += static_cast<double>(std::fabs(want[i]));
          }
          CHECK(difference <= 0.004 * size, "%g, %g", difference, size);
        };
        near(training.out, out);
        near(training.grad_hidden, grad_hidden);
        for (int i = 0; i < 6; ++i) {
          std::vector<float> both = training.gradients[1][i];
          for (size_t j = 0; j < both.size(); ++j) both[j] += training.gradients[0][i][j];
          near(both, sums[i]);
        }
      }
    }
  }
}

// Quantised and bf16 weights: finite, and the same bits for any pool.
KTSERVE_TEST(trainer_threads) {
  Random random(23);
  for (Format format : {Format::bf16, Format::i8, Format::i4m}) {
    World world(4, 96, 160, format, 2, random);
    WorkerPool alone(PoolOptions{{{0}}});
    for (Isa isa : test::isas()) {
      Training one(world, 300, random);
      ExpertTrainer trainer(world.pool, isa);
      ExpertTrainer other(alone, isa);
      one.loss(trainer);
      one.backward(trainer, true);
      const std::vector<float> out = one.out, hidden = one.grad_hidden, a = one.gradients[1][0];
      for (float v : hidden) CHECK(std::isfinite(v));
      std::fill(one.gradients[1][0].begin(), one.gradients[1][0].end(), NAN);
      one.loss(other);
      one.backward(other, true);
      CHECK(out == one.out && hidden == one.grad_hidden && a == one.gradients[1][0]);
    }
  }
}

}  // namespace
}  // namespace ktserve
