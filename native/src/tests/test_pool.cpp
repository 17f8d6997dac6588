#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "runtime/pool.hpp"
#include "tests/check.hpp"

namespace ktserve {
namespace {

using test::Random;

// One thread's share of the stress: random sizes, failures, nested calls, steps.
void hammer(std::vector<WorkerPool*> pools, uint64_t seed, int calls) {
  Random random(seed);
  for (int call = 0; call < calls; ++call) {
    WorkerPool& pool = *pools[static_cast<size_t>(random.below(static_cast<int64_t>(pools.size())))];
    const int64_t items = random.below(60);
    const int64_t fail = random.below(10) == 0 && items > 0 ? random.below(items) : -1;
    const bool step = random.below(8) == 0;
    const bool nested = random.below(8) == 0;
    std::vector<int64_t> sums(static_cast<size_t>(items) + 1, 0);  // plain memory: TSan sees a missing order
    std::vector<int64_t> first(static_cast<size_t>(pool.groups()) + 1, 0);
    for (int g = 1; g <= pool.groups(); ++g) {
      first[static_cast<size_t>(g)] = g == pool.groups() ? items : random.below(items + 1);
      if (first[static_cast<size_t>(g)] < first[static_cast<size_t>(g) - 1])
        first[static_cast<size_t>(g)] = first[static_cast<size_t>(g) - 1];
    }
    const auto body = [&](int64_t item, int worker) {
      CHECK(worker >= 0 && worker < pool.threads());
      if (item == fail) throw std::runtime_error("work item " + std::to_string(item));
      sums[static_cast<size_t>(item)] += item + 1;
      if (nested) {
        pool.parallel_for(3,
                          [&](int64_t, int inner) { sums[static_cast<size_t>(item)] += inner == worker ? 1 : 1000; });
      }
    };
    if (step) pool.begin_step();
    bool threw = false;
    try {
      if (random.below(2) == 0) {
        pool.parallel_for(items, body);
      } else {
        pool.parallel_for_groups(first, body);
      }
    } catch (const std::runtime_error& error) {
      threw = error.what() == "work item " + std::to_string(fail);
    }
    if (step) pool.end_step();
    CHECK(threw == (fail >= 0));
    for (int64_t i = 0; i < items && fail < 0; ++i) CHECK(sums[static_cast<size_t>(i)] == i + 1 + (nested ? 3 : 0));
  }
}

KTSERVE_TEST(pool_stress) {
  WorkerPool one(PoolOptions{{{0, 1}}});
  WorkerPool two(PoolOptions{{{0}, {1, 0}}, false, 0});
  WorkerPool alone(PoolOptions{{{0}}});
  std::vector<std::thread> threads;
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    threads.emplace_back([&, seed] { hammer({&one, &two, &alone}, seed, 2000); });
  }
  for (auto& thread : threads) thread.join();
}

KTSERVE_TEST(pool_comes_and_goes) {
  for (int i = 0; i < 50; ++i) {
    WorkerPool pool(PoolOptions{{{0, 1, 0}}});
    std::atomic<int64_t> sum{0};
    pool.parallel_for(i, [&](int64_t item, int) { sum += item; });
    CHECK(sum == i * (i - 1) / 2);
  }
}

}  // namespace
}  // namespace ktserve
