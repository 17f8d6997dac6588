// Which rows meet which experts, and the pieces of work that this makes.
#include <algorithm>

#include "experts/moe.hpp"

namespace ktserve {
namespace {

constexpr double kPieceUs = 30;
constexpr double kLargePieceUs = 500;    // of calls that have many such
constexpr double kPiecesPerWorker = 16;  // that many calls have at least

// Rough speed of one core, to size pieces by: bytes of weights and operations per microsecond.
constexpr double kBytesPerUs = 10e3;
double operations_per_us(Isa isa, Format format) {
  if (isa == Isa::avx2) return 50e3;
  if (isa == Isa::amx) return format == Format::f32 ? 100e3 : 1000e3;
  return 400e3;
}

// Rows of a piece: what the second-level cache holds beside a pair of panels.
int64_t piece_rows(Isa isa) {
  return isa == Isa::amx ? kMostPieceRows : 48;
}

}  // namespace

void MoeRunner::group(const ExpertLayer& layer, const MoeBuffers& b, int64_t first, int64_t rows) {
  const int64_t experts = layer.shape().experts;
  const int64_t* ids = b.ids + first * b.top_k;
  const int32_t* slots = b.slots + first;
  by_slot_.resize(static_cast<size_t>(rows));
  bool adapters = false;
  for (int64_t r = 0; r < rows; ++r) {
    by_slot_[static_cast<size_t>(r)] = static_cast<int32_t>(r);
    adapters = adapters || layer.lora(slots[r]) != nullptr;
  }
  if (adapters) {
    std::stable_sort(by_slot_.begin(), by_slot_.end(), [&](int32_t x, int32_t y) { return slots[x] < slots[y]; });
  }
  expert_first_.assign(static_cast<size_t>(experts) + 1, 0);
  for (int64_t i = 0; i < rows * b.top_k; ++i) {
    if (ids[i] >= 0) ++expert_first_[static_cast<size_t>(ids[i]) + 1];
  }
  for (int64_t e = 0; e < experts; ++e) {
    expert_first_[static_cast<size_t>(e) + 1] += expert_first_[static_cast<size_t>(e)];
  }
  position_.assign(static_cast<size_t>(rows * b.top_k), -1);
  choice_.resize(static_cast<size_t>(expert_first_.back()));
  std::vector<int32_t>& next = expert_first_;  // counts up to the end of each expert, then is shifted back
  for (int32_t r : by_slot_) {
    for (int64_t j = 0; j < b.top_k; ++j) {
      const int64_t c = r * b.top_k + j;
      if (ids[c] < 0) continue;
      const int32_t at = next[static_cast<size_t>(ids[c])]++;
      position_[static_cast<size_t>(c)] = at;
      choice_[static_cast<size_t>(at)] = static_cast<int32_t>(c);
    }
  }
  for (int64_t e = experts; e > 0; --e)
    expert_first_[static_cast<size_t>(e)] = expert_first_[static_cast<size_t>(e) - 1];
  expert_first_[0] = 0;

  segments_.clear();
  row_lora_.assign(choice_.size(), nullptr);
  max_rank_ = 0;
  if (!adapters) return;
  for (int64_t e = 0; e < experts; ++e) {
    for (int32_t p = expert_first_[static_cast<size_t>(e)]; p < expert_first_[static_cast<size_t>(e) + 1]; ++p) {
      const LayerLora* lora = layer.lora(slots[choice_[static_cast<size_t>(p)] / b.top_k]);
      if (lora == nullptr || lora->present[static_cast<size_t>(e)] == 0) continue;
      row_lora_[static_cast<size_t>(p)] = lora;
      max_rank_ = std::max(max_rank_, lora->rank);
      Segment* last = segments_.empty() ? nullptr : &segments_.back();
      if (last != nullptr && last->lora == lora && last->expert == e && last->row_end == p && p - last->row < 64) {
        ++last->row_end;
      } else {
        segments_.push_back({lora, static_cast<int32_t>(e), p, p + 1});
      }
    }
  }
}

// Those whose rows are enough for the slowest of the formats.
void MoeRunner::choose_wide(const LayerShape& s) {
  int64_t least = 0;
  for (Format format : s.formats) least = std::max(least, kernels_.wide_from(format));
  wide_.assign(static_cast<size_t>(s.experts), 0);
  if (deterministic_ || least == 0) return;
  for (size_t e = 0; e < wide_.size(); ++e) wide_[e] = expert_first_[e + 1] - expert_first_[e] >= least ? 1 : 0;
}

int64_t MoeRunner::first_panel(const ExpertLayer& layer, int projection, int shard, int64_t slice) const {
  const int64_t first = layer.first_panel(projection, shard);
  if (projection != kDown) return slice == 0 ? first : layer.first_panel(projection, shard + 1);
  return first + (layer.first_panel(projection, shard + 1) - first) / 2 * slice / slices_ * 2;
}

// Pieces of gate/up or of a slice of down, by shard: the pool's group g begins with those of shard g. They grow with
// the call: long ones find their rows in a cache more often, a few per worker are enough to share them evenly.
void MoeRunner::cut(const ExpertLayer& layer, int projection, int64_t slice) {
  const LayerShape& s = layer.shape();
  const Format format = s.formats[projection];
  const int64_t k = layer.inner_of(projection);
  const int matrices = projection == kDown ? 1 : 2;
  const auto pair_us = [&](int64_t rows) {
    const double bytes = static_cast<double>(2 * matrices * panel_size(format, k));
    const double work = static_cast<double>(2 * matrices * kPanel * 2 * k * rows);
    return std::max(bytes / kBytesPerUs, work / operations_per_us(kernels_.isa, format));
  };
  const auto rows_of = [&](int64_t e) {
    return static_cast<int64_t>(expert_first_[static_cast<size_t>(e) + 1] - expert_first_[static_cast<size_t>(e)]);
  };
  double all_us = 0;
  for (int64_t e = 0; e < s.experts; ++e) {
    if (rows_of(e) > 0) all_us += pair_us(rows_of(e)) * static_cast<double>(panels_of(layer.rows_of(projection)) / 2);
  }
  const double each_us = all_us / static_cast<double>(slices_) / pool_.threads() / kPiecesPerWorker;
  const double piece_us = kernels_.isa == Isa::amx ? std::clamp(each_us, kPieceUs, kLargePieceUs) : kPieceUs;
  pieces_.clear();
  group_starts_.assign(static_cast<size_t>(pool_.groups()) + 1, 0);
  for (int shard = 0; shard < s.shards; ++shard) {
    const int64_t panel_first = first_panel(layer, projection, shard, slice);
    const int64_t all_pairs = (first_panel(layer, projection, shard, slice + 1) - panel_first) / 2;
    for (int64_t e = 0; e < s.experts; ++e) {
      const int64_t row_first = expert_first_[static_cast<size_t>(e)];
      const int64_t m = rows_of(e);
      if (m == 0) continue;
      const int64_t row_chunks = (m + piece_rows(kernels_.isa) - 1) / piece_rows(kernels_.isa);
      const int64_t chunk = (m + row_chunks - 1) / row_chunks;
      const int64_t wanted = static_cast<int64_t>(piece_us / pair_us(chunk));
      const int64_t unit = m == 1 ? 2 : 1;  // pairs that a kernel reads side by side: a piece holds whole units
      const int64_t units = (all_pairs + unit - 1) / unit;
      const int64_t each = std::max<int64_t>(1, wanted / unit);
      const int64_t cuts = (units + each - 1) / each;
      for (int64_t c = 0; c < cuts; ++c) {
        const int64_t from = panel_first + units * c / cuts * unit * 2;
        const int64_t to = panel_first + std::min(all_pairs, units * (c + 1) / cuts * unit) * 2;
        for (int64_t i = 0; i < row_chunks; ++i) {
          pieces_.push_back({static_cast<int32_t>(e), static_cast<int32_t>(row_first + m * i / row_chunks),
                             static_cast<int32_t>(row_first + m * (i + 1) / row_chunks), static_cast<int32_t>(from),
                             static_cast<int32_t>(to), nullptr});
          if (pieces_.size() > 1) (pieces_.end() - 2)->next = layer.panel(projection, e, from);
        }
      }
    }
    // With as many groups as shards each takes its own; any other number shares all pieces evenly.
    if (s.shards == pool_.groups())
      group_starts_[static_cast<size_t>(shard) + 1] = static_cast<int64_t>(pieces_.size());
  }
  if (s.shards != pool_.groups()) {
    for (int g = 1; g <= pool_.groups(); ++g) {
      group_starts_[static_cast<size_t>(g)] = static_cast<int64_t>(pieces_.size()) * g / pool_.groups();
    }
  }
}

}  // namespace ktserve
