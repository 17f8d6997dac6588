#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "bridge/bridge.hpp"
#include "experts/moe.hpp"
#include "tests/check.hpp"
#include "tests/world.hpp"

namespace ktserve {
namespace {

using test::draw;
using test::Forward;
using test::Random;
using test::World;

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
        weights(draw(m * k, random)),
        hidden(draw(m * world.hidden, random)),
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
      World world(5, 96, 64, format, shards, random, shards == 2);
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

// [rows, k] by a matrix [n, k] in float64, added to out [n].
void add_product(const float* w, int64_t n, const std::vector<double>& x, double scale, std::vector<double>& out) {
  const auto k = static_cast<int64_t>(x.size());
  for (int64_t i = 0; i < n; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < k; ++j) sum += double{w[i * k + j]} * x[static_cast<size_t>(j)];
    out[static_cast<size_t>(i)] += scale * sum;
  }
}

// What a row of a projection of an expert is: its product, its bias and an adapter's part.
std::vector<double> projected(const World& world, int p, int64_t expert, int32_t slot, const std::vector<double>& x) {
  const int64_t n = world.layer.rows_of(p), k = world.layer.inner_of(p);
  std::vector<float> w(static_cast<size_t>(n * k));
  for (int64_t panel = 0; panel < n / kPanel; ++panel) {
    unpack_rows(world.layer.shape().formats[p], world.layer.panel(p, expert, panel), k, 0, kPanel,
                w.data() + panel * kPanel * k);
  }
  std::vector<double> out(static_cast<size_t>(n));
  for (int64_t i = 0; i < n && !world.biases[p].empty(); ++i) {
    out[static_cast<size_t>(i)] = double{world.biases[p][static_cast<size_t>(expert * n + i)]};
  }
  add_product(w.data(), n, x, 1, out);
  const auto found = world.loras.find(slot);
  if (found == world.loras.end()) return out;
  const auto& [rank, matrices] = found->second;
  std::vector<double> t(static_cast<size_t>(rank));
  add_product(matrices[p].data() + expert * rank * k, rank, x, 1, t);
  add_product(matrices[3 + p].data() + expert * n * rank, n, t, double{World::kScale}, out);
  return out;
}

// A row of the batch by plain loops in float64.
std::vector<double> by_loops(const World& world, const Batch& batch, int64_t row) {
  const auto first = batch.hidden.begin() + row * world.hidden;
  const std::vector<double> x(first, first + world.hidden);
  const int32_t slot = batch.slots[static_cast<size_t>(row)];
  const Activation by = world.layer.shape().activation;
  std::vector<double> out(x.size());
  for (int64_t j = row * batch.top_k; j < (row + 1) * batch.top_k; ++j) {
    const int64_t expert = batch.ids[static_cast<size_t>(j)];
    if (expert < 0) continue;
    std::vector<double> h = projected(world, kGate, expert, slot, x);
    const std::vector<double> up = projected(world, kUp, expert, slot, x);
    for (size_t i = 0; i < h.size(); ++i) {
      const double limit = by.clamped() ? double{by.limit} : HUGE_VAL;
      const double g = std::min(h[i], limit), u = std::clamp(up[i], -limit, limit);
      h[i] = g / (1 + std::exp(-double{by.alpha} * g)) * (by.clamped() ? u + 1 : u);
    }
    const std::vector<double> y = projected(world, kDown, expert, slot, h);
    for (size_t i = 0; i < y.size(); ++i) out[i] += double{batch.weights[static_cast<size_t>(j)]} * y[i];
  }
  return out;
}

// With and without biases and the clamped activation: few rows and many, base and adapters, at drawn sizes.
KTSERVE_TEST(moe_equals_plain_loops) {
  Random random(9);
  for (int round = 0; round < 24; ++round) {
    const Format format = std::array{Format::f32, Format::bf16, Format::i8}[static_cast<size_t>(round % 3)];
    const int shards = 1 + static_cast<int>(random.below(2));
    const auto size = [&] { return 32 * (1 + random.below(6)); };
    const int64_t hidden = size(), inner = size();
    World world(1 + random.below(5), hidden, inner, format, shards, random, round % 4 != 0);
    Batch batch(world, std::array{1, 2, 13, 70}[static_cast<size_t>(random.below(4))], 1 + random.below(3), random);
    for (Isa isa : test::isas()) {
      for (bool deterministic : {false, true}) {
        MoeRunner runner(world.pool, isa, deterministic);
        std::fill(batch.out.begin(), batch.out.end(), NAN);
        runner.forward(world.layer, batch.buffers());
        double difference = 0;
        double all = 0;
        for (int64_t row = 0; row < batch.rows; ++row) {
          const std::vector<double> want = by_loops(world, batch, row);
          for (int64_t i = 0; i < hidden; ++i) {
            const double value = want[static_cast<size_t>(i)];
            difference += std::fabs(double{batch.out[static_cast<size_t>(row * hidden + i)]} - value);
            all += std::fabs(value);
          }
        }
        const double bound = format == Format::f32 ? 2e-6 : format == Format::bf16 ? 0.006 : 0.02;
        CHECK(difference <= bound * all, "%s, %s: %g of %g", info(format).name, isa_name(isa), difference, all);
      }
    }
  }
}

KTSERVE_TEST(expert_layers_refuse_what_they_cannot_hold) {
  const auto refuses = [](const auto& call) {
    try {
      call();
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  LayerShape shape{2, 32, 32, {Format::f32, Format::f32, Format::f32}, 1};
  std::vector<float> values(64);
  ExpertLayer plain(shape);
  CHECK(refuses([&] { plain.load_bias(kGate, values.data()); }));
  shape.biased = true;
  ExpertLayer biased(shape);
  CHECK(biased.bytes() == plain.bytes() + 3 * 2 * 32 * 4);
  biased.load_bias(kGate, values.data());
  values[40] = NAN;
  CHECK(refuses([&] { biased.load_bias(kGate, values.data()); }));
  for (const Activation by : {Activation{-1, 1}, Activation{NAN, 1}, Activation{7, NAN}}) {
    shape.activation = by;
    CHECK(refuses([&] { ExpertLayer{shape}; }));
  }
}

// In parts of a call, too, and without what is skipped or behind bsz.
KTSERVE_TEST(moe_counts_distinct_experts) {
  Random random(8);
  World world(9, 32, 32, Format::f32, 1, random);
  MoeRunner runner(world.pool, test::isas()[0], false);
  int64_t touched = 100;
  int64_t want = 100;
  for (int64_t rows : {1, 3, 40, 5000}) {
    Batch batch(world, rows, 2, random);
    batch.bsz = static_cast<int32_t>(rows - rows / 3);
    for (int64_t& id : batch.ids) {
      if (id == 8) id = 4;
    }
    if (rows > 1) batch.ids[static_cast<size_t>(2 * batch.bsz)] = 8;
    MoeBuffers buffers = batch.buffers();
    runner.forward(world.layer, buffers);
    CHECK(touched == want);  // nobody asked
    buffers.touched = &touched;
    runner.forward(world.layer, buffers);
    std::vector<bool> chosen(9);
    for (int64_t i = 0; i < 2 * batch.bsz; ++i) {
      if (batch.ids[static_cast<size_t>(i)] >= 0) chosen[static_cast<size_t>(batch.ids[static_cast<size_t>(i)])] = true;
    }
    want += std::count(chosen.begin(), chosen.end(), true);
    CHECK(touched == want);
  }
}

// Enough rows for dot_dequantised: near what the deterministic runner gives, the same in every run, with any pool, and
// for any values of the other rows.
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
      const bool dequantised = kernels(isa).dequantised_from(format) > 0;
      CHECK(difference <= (dequantised ? 0.02 : 0) * size);
      CHECK(!dequantised || difference > 0);
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

// A thread in a stream's place knows the words alone. One task serves any number of rows; a failure and a time-out free
// the stream, and what is posted next is answered as ever.
KTSERVE_TEST(moe_through_the_bridge) {
  struct Slow : Task {
    void run() const override { std::this_thread::sleep_for(std::chrono::milliseconds(50)); }
  } slow;
  Random random(6);
  World world(4, 64, 32, Format::i8, 2, random);
  MoeRunner runner(world.pool, best_isa(), false);
  Batch batches[2] = {Batch(world, 9, 2, random), Batch(world, 9, 2, random)};
  std::vector<float> wanted[2];
  for (int b = 0; b < 2; ++b) {
    runner.forward(world.layer, batches[b].buffers());
    wanted[b] = batches[b].out;
  }
  const Forward tasks[2] = {{runner, world.layer, batches[0].buffers()}, {runner, world.layer, batches[1].buffers()}};
  std::vector<int64_t> words(3 * 3);
  Bridge bridge(world.pool, words.data(), 3, 200, 500);
  for (const Forward& task : tasks) bridge.add(task);
  const int sleepy = bridge.add(slow);
  const auto word = [&](int kind, int channel) {
    return std::atomic_ref<int64_t>(words[static_cast<size_t>(3 * kind + channel)]);
  };
  std::vector<std::thread> streams;
  for (int c = 0; c < 2; ++c) {
    streams.emplace_back([&, c] {
      Random own(20 + static_cast<uint64_t>(c));
      Batch& batch = batches[c];
      for (int64_t number = 1; number <= 300; ++number) {
        const bool bad = own.below(20) == 0;
        batch.bsz = bad ? -1 : static_cast<int32_t>(own.below(10));
        if (own.below(4) == 0) bridge.wake();
        std::fill(batch.out.begin(), batch.out.end(), 0.0f);
        word(0, c).store(number, std::memory_order_release);
        int64_t done = 0;
        while ((done = word(1, c).load(std::memory_order_acquire)) / 2 < number) std::this_thread::yield();
        CHECK(done == 2 * number + (bad ? 1 : 0));
        const int64_t rows = bad ? 0 : batch.bsz;
        CHECK(std::equal(batch.out.begin(), batch.out.begin() + rows * world.hidden, wanted[c].begin()));
        for (size_t i = static_cast<size_t>(rows * world.hidden); i < batch.out.size(); ++i) CHECK(batch.out[i] == 0);
        for (const BridgeFailure& failure : bridge.take_failures()) {
          CHECK(failure.message.find("bsz: -1") != std::string::npos, "%s", failure.message.c_str());
        }
      }
    });
  }
  for (auto& stream : streams) stream.join();
  bridge.take_failures();
  bridge.post(sleepy);
  CHECK(bridge.wait(sleepy, 0.001) == Outcome::expired);
  const std::vector<BridgeFailure> failures = bridge.take_failures();
  CHECK(failures.size() == 1 && failures[0].channel == sleepy && failures[0].number == 1);
  bridge.post(sleepy);
  CHECK(bridge.wait(sleepy, 10) == Outcome::done);
}

}  // namespace
}  // namespace ktserve
