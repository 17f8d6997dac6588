// How an expert call is cut into work items.
#include <algorithm>

#include "experts/moe_batch.hpp"

namespace ktserve {
namespace {

constexpr double kItemUs = 30;
constexpr double kLargeItemUs = 500;    // of calls that have many such
constexpr double kItemsPerWorker = 16;  // that many calls have at least
constexpr double kLeastItemUs = 7;      // of calls of a few experts
constexpr double kFiner = 0.9;          // each size that is tried for them, of the one before
constexpr double kMostIdle = 0.12;      // of their time, that workers wait for the last ones

// Rough speed of one core, to size work items by: bytes of weights and operations per microsecond.
constexpr double kBytesPerUs = 10e3;
double operations_per_us(Isa isa, Format format) {
  if (isa == Isa::avx2) return 50e3;
  if (isa == Isa::amx) return plain(format) && format != Format::bf16 ? 100e3 : 1000e3;
  return 400e3;
}

// Rows of a work item: what the second-level cache holds beside a pair of panels.
int64_t item_rows(Isa isa) {
  return isa == Isa::amx ? kMostItemRows : 48;
}

}  // namespace

// Work items grow with the call: long ones find their rows in a cache more often, a few per worker are enough to share
// them evenly. A call of a few experts would have so few that workers wait for the last ones: 32 work items of 14
// workers take as long as 42. Those are cut smaller, as far as that helps.
void MoeBatch::cut(int projection, int64_t slice) {
  const LayerShape& s = layer_->shape();
  const Format format = s.formats[projection];
  const int64_t k = layer_->inner_of(projection);
  const int matrices = projection == kDown ? 1 : 2;
  const auto pairs_of = [&](int shard) {
    return (first_panel(projection, shard, slice + 1) - first_panel(projection, shard, slice)) / 2;
  };
  const auto pair_us = [&](int64_t rows) {
    const double bytes = static_cast<double>(2 * matrices * panel_size(format, k));
    const double work = static_cast<double>(2 * matrices * kPanel * 2 * k * rows);
    return std::max(bytes / kBytesPerUs, work / operations_per_us(kernels_.isa, format));
  };
  // How the pairs of panels of an expert with m rows are cut: into `cuts` runs of units, for `row_chunks` ranges of
  // rows.
  struct Cut {
    int64_t unit, units, cuts, row_chunks;
  };
  const auto cut_of = [&](int64_t m, int64_t pairs, double item_us) {
    const int64_t row_chunks = (m + item_rows(kernels_.isa) - 1) / item_rows(kernels_.isa);
    const auto wanted = static_cast<int64_t>(item_us / pair_us((m + row_chunks - 1) / row_chunks));
    // Pairs that a kernel reads side by side: a work item holds whole units, unless it is to be smaller than one.
    const int64_t unit = m == 1 && (wanted > 1 || item_us >= kItemUs) ? 2 : 1;
    const int64_t units = (pairs + unit - 1) / unit;
    const int64_t each = std::max<int64_t>(1, wanted / unit);
    return Cut{unit, units, (units + each - 1) / each, row_chunks};
  };
  // How much longer than shared out evenly, if each worker takes one work item after another and all take as long.
  const auto idle = [&](double item_us) {
    int64_t items = 0;
    for (int shard = 0; shard < s.shards; ++shard) {
      const int64_t pairs = pairs_of(shard);
      for (int64_t e = 0; e < s.experts; ++e) {
        if (routed_.count(e) == 0) continue;
        const Cut c = cut_of(routed_.count(e), pairs, item_us);
        items += c.cuts * c.row_chunks;
      }
    }
    const int64_t rounds = (items + pool_.threads() - 1) / pool_.threads();
    return items == 0 ? 0.0 : static_cast<double>(rounds * pool_.threads()) / static_cast<double>(items) - 1;
  };
  double all_us = 0;
  for (int64_t e = 0; e < s.experts; ++e) {
    const int64_t rows = routed_.count(e);
    if (rows > 0) all_us += pair_us(rows) * static_cast<double>(panels_of(layer_->rows_of(projection)) / 2);
  }
  const double each_us = all_us / static_cast<double>(slices_) / pool_.threads() / kItemsPerWorker;
  double item_us = kernels_.isa == Isa::amx ? std::clamp(each_us, kItemUs, kLargeItemUs) : kItemUs;
  double least = idle(item_us);
  for (double us = item_us * kFiner; least > kMostIdle && us >= kLeastItemUs; us *= kFiner) {
    const double then = idle(us);
    if (then >= least) continue;
    least = then;
    item_us = us;
  }
  items_.clear();
  group_starts_.assign(static_cast<size_t>(pool_.groups()) + 1, 0);
  for (int shard = 0; shard < s.shards; ++shard) {
    const int64_t panel_first = first_panel(projection, shard, slice);
    const int64_t pairs = pairs_of(shard);
    for (int64_t e = 0; e < s.experts; ++e) {
      const int64_t row_first = routed_.first(e);
      const int64_t m = routed_.count(e);
      if (m == 0) continue;
      const auto [unit, units, cuts, row_chunks] = cut_of(m, pairs, item_us);
      for (int64_t c = 0; c < cuts; ++c) {
        const int64_t from = panel_first + units * c / cuts * unit * 2;
        const int64_t to = panel_first + std::min(pairs, units * (c + 1) / cuts * unit) * 2;
        for (int64_t i = 0; i < row_chunks; ++i) {
          items_.push_back({static_cast<int32_t>(e), static_cast<int32_t>(row_first + m * i / row_chunks),
                            static_cast<int32_t>(row_first + m * (i + 1) / row_chunks), static_cast<int32_t>(from),
                            static_cast<int32_t>(to)});
          if (items_.size() > 1) (items_.end() - 2)->next = layer_->panel(projection, e, from);
        }
      }
    }
    // With as many groups as shards each takes its own; any other number shares all work items evenly.
    if (s.shards == pool_.groups()) {
      group_starts_[static_cast<size_t>(shard) + 1] = static_cast<int64_t>(items_.size());
    }
  }
  if (s.shards != pool_.groups()) {
    for (int g = 1; g <= pool_.groups(); ++g) {
      group_starts_[static_cast<size_t>(g)] = static_cast<int64_t>(items_.size()) * g / pool_.groups();
    }
  }
}

}  // namespace ktserve
