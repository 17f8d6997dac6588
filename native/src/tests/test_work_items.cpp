#include <algorithm>
#include <vector>

#include "experts/moe_batch.hpp"
#include "tests/check.hpp"

namespace ktserve {
namespace {

constexpr int64_t kExperts = 16;

// A batch of `rows` rows that choose the same `chosen` experts, on a pool of so many threads.
struct World {
  WorkerPool pool;
  ExpertLayer layer;
  std::vector<int64_t> ids;
  std::vector<float> weights;
  std::vector<int32_t> slots;

  World(int threads, Format format, int64_t chosen, int64_t rows, int shards)
      : pool(PoolOptions{std::vector<std::vector<int>>(1, std::vector<int>(static_cast<size_t>(threads)))}),
        layer(LayerShape{kExperts, 2048, 768, {format, format, format}, shards}),
        weights(static_cast<size_t>(rows * chosen), 1.0f),
        slots(static_cast<size_t>(rows)) {
    for (int64_t i = 0; i < rows * chosen; ++i) ids.push_back(2 * (i % chosen));
  }

  Routing routing() const {
    const auto rows = static_cast<int64_t>(slots.size());
    return {ids.data(), weights.data(), slots.data(), rows, static_cast<int64_t>(ids.size()) / rows, kExperts};
  }
};

// Work items depend on what the instruction set is, not on whether this machine has it: the kernels are never called.
Kernels named(Isa isa) {
  Kernels made = kernels(Isa::avx2);
  made.isa = isa;
  return made;
}

// How often each panel of each expert is computed for each of the expert's rows.
std::vector<int64_t> coverage(const MoeBatch& batch, int projection, int64_t rows) {
  const int64_t panels = panels_of(batch.layer().rows_of(projection));
  std::vector<int64_t> times(static_cast<size_t>(kExperts * panels * rows));
  for (const WorkItem& item : batch.items()) {
    const int64_t first = batch.routed().first(item.expert);
    for (int64_t panel = item.panel; panel < item.panel_end; ++panel) {
      for (int64_t row = item.row - first; row < item.row_end - first; ++row) {
        ++times[static_cast<size_t>((item.expert * panels + panel) * rows + row)];
      }
    }
  }
  return times;
}

KTSERVE_TEST(work_items_cover_each_panel_once_and_few_of_them_are_even) {
  for (Format format : {Format::bf16, Format::i8, Format::i4m}) {
    for (int64_t chosen : {1, 2, 3, 4, 5, 8}) {
      for (int64_t rows : {1, 3, 60}) {
        for (int shards : {1, 3}) {
          World world(14, format, chosen, rows, shards);
          for (Isa isa : {Isa::avx2, Isa::avx512, Isa::amx}) {
            const Kernels table = named(isa);
            MoeBatch batch(world.pool, table, false);
            batch.begin(world.layer, world.routing());
            for (int projection : {kGate, kDown}) {
              std::vector<int64_t> times(coverage(batch, projection, rows).size());
              for (int64_t slice = 0; slice < (projection == kDown ? batch.slices() : 1); ++slice) {
                batch.cut(projection, slice);
                const std::vector<int64_t> more = coverage(batch, projection, rows);
                for (size_t i = 0; i < times.size(); ++i) times[i] += more[i];
                const auto items = static_cast<int64_t>(batch.items().size());
                if (chosen > 1) CHECK((items + 13) / 14 * 14 * 10 <= items * 12);
              }
              const int64_t each = static_cast<int64_t>(times.size()) / kExperts;
              for (int64_t e = 0; e < kExperts; ++e) {
                const bool is_chosen = e % 2 == 0 && e / 2 < chosen;
                for (int64_t i = 0; i < each; ++i)
                  CHECK(times[static_cast<size_t>(e * each + i)] == (is_chosen ? 1 : 0));
              }
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace ktserve
