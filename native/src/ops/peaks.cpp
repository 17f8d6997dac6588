#include "ops/peaks.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "runtime/arena.hpp"

namespace ktserve {
namespace {

const Peaks& peaks(Isa isa) {
  if (isa == Isa::amx) return kPeaksAmx;
  return isa == Isa::avx512 ? kPeaksAvx512 : kPeaksAvx2;
}

template <class F>
double seconds(const F& f) {
  const auto begin = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

double read_bandwidth(WorkerPool& pool, Isa isa, int64_t bytes, int repeats) {
  constexpr int64_t item = 1 << 20;
  const int64_t items = std::max<int64_t>(1, bytes / item);
  const Arena memory(static_cast<size_t>(items * item));
  std::atomic<uint64_t> sink{0};
  pool.parallel_for(items, [&](int64_t i, int) { std::memset(memory.data() + i * item, 1, item); });
  pool.begin_step();
  double best = 0;
  for (int r = 0; r < repeats; ++r) {
    const double s = seconds([&] {
      pool.parallel_for(items, [&](int64_t i, int) {
        const uint8_t* begin = memory.data() + i * item;
        sink.fetch_xor(peaks(isa).read(begin, begin + item), std::memory_order_relaxed);
      });
    });
    best = std::max(best, static_cast<double>(items * item) / s);
  }
  pool.end_step();
  return best;
}

double peak_operations(WorkerPool& pool, Isa isa, const std::string& type, int repeats) {
  if (type != "f32" && type != "bf16" && type != "int8")
    throw std::invalid_argument("type: '" + type + "'; allowed are f32, bf16, int8");
  const Peaks& table = peaks(isa);
  const auto loop = type == "f32" ? table.f32 : type == "bf16" ? table.bf16 : table.int8;
  if (loop == nullptr) return 0;
  constexpr int64_t rounds = 1 << 20;
  std::vector<double> operations(static_cast<size_t>(pool.threads()) * 8);
  pool.begin_step();
  double best = 0;
  for (int r = 0; r < repeats; ++r) {
    std::fill(operations.begin(), operations.end(), 0.0);
    const double s = seconds([&] {
      pool.parallel_for(pool.threads(), [&](int64_t i, int) { operations[static_cast<size_t>(i) * 8] = loop(rounds); });
    });
    double total = 0;
    for (double one : operations) total += one;
    best = std::max(best, total / s);
  }
  pool.end_step();
  return best;
}

}  // namespace ktserve
