#include "experts/moe_batch.hpp"

#include <algorithm>

namespace ktserve {
namespace {

constexpr int64_t kSliceBytes = 64 << 20;  // of y
constexpr int32_t kSegmentRows = 64;

void grow(Arena& arena, int64_t bytes) {
  if (arena.bytes() < static_cast<size_t>(bytes)) arena = Arena(static_cast<size_t>(bytes));
}

// Equal slices of down's columns, each of whole pairs of panels, that keep y within kSliceBytes.
int64_t slices_of(int64_t positions, int64_t hidden) {
  const int64_t wanted = (positions * hidden * 4 + kSliceBytes - 1) / kSliceBytes;
  return std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, hidden / (2 * kPanel) / 4));
}

// The most columns of a slice that one shard computes.
int64_t shard_columns(const LayerShape& s, int64_t slices) {
  const int64_t pairs = (panels_of(s.hidden) / 2 + s.shards - 1) / s.shards;
  return (pairs + slices - 1) / slices * 2 * kPanel;
}

// Bytes from row to row of y.
int64_t y_stride(const LayerShape& s, int64_t slices) {
  return odd_lines(s.shards * shard_columns(s, slices) * 4);
}

}  // namespace

void ScratchRows::reserve(int64_t rows, int64_t row_bytes) {
  stride = row_bytes;
  grow(memory, rows * row_bytes);
}

int64_t MoeBatch::scratch_bytes(const Kernels& k, bool deterministic, int threads, const LayerShape& s, int64_t rows,
                                int64_t top_k, int64_t rank) {
  const int64_t positions = rows * top_k;
  const auto widest = [&](Format format, int64_t inner) {
    const bool may_dequantise = !deterministic && k.dequantised_from(format) > 0;
    return std::max(k.row_bytes(format, inner), k.row_bytes_for(format, may_dequantise, inner));
  };
  int64_t each = widest(s.formats[kGate], s.hidden) + widest(s.formats[kDown], s.intermediate);
  if (s.formats[kUp] != s.formats[kGate]) each += widest(s.formats[kUp], s.hidden);
  each += y_stride(s, slices_of(positions, s.hidden));
  if (rank > 0) {
    const Format lora = s.lora_format();
    if (s.formats[kGate] != lora) each += k.row_bytes(lora, s.hidden);
    if (s.formats[kDown] != lora) each += k.row_bytes(lora, s.intermediate);
    each += panels_of(2 * rank) * kPanel * 4;
  }
  return positions * each + threads * kTileFloats * 4;
}

void MoeBatch::begin(const ExpertLayer& layer, const Routing& routing) {
  layer_ = &layer;
  routed_.assign(routing);
  find_adapters();
  choose_dequantised();
  reserve();
}

void MoeBatch::find_adapters() {
  segments_.clear();
  max_rank_ = 0;
  for (const RoutedGroup& group : routed_.groups()) {
    const LayerLora* lora = layer_->lora(group.slot);
    if (lora == nullptr || lora->present[static_cast<size_t>(group.expert)] == 0) continue;
    if (segments_.empty()) lora_.assign(static_cast<size_t>(routed_.positions()), nullptr);
    max_rank_ = std::max(max_rank_, lora->rank);
    std::fill(lora_.begin() + group.first, lora_.begin() + group.last, lora);
    for (int32_t row = group.first; row < group.last; row += kSegmentRows) {
      segments_.push_back({lora, group.expert, row, std::min(group.last, row + kSegmentRows)});
    }
  }
}

// Experts whose rows are enough for the slowest of the formats.
void MoeBatch::choose_dequantised() {
  const LayerShape& s = layer_->shape();
  int64_t least = 0;
  for (Format format : s.formats) least = std::max(least, kernels_.dequantised_from(format));
  dequantised_.assign(static_cast<size_t>(s.experts), 0);
  if (deterministic_ || least == 0) return;
  for (int64_t e = 0; e < s.experts; ++e) dequantised_[static_cast<size_t>(e)] = routed_.count(e) >= least ? 1 : 0;
}

void MoeBatch::reserve() {
  const LayerShape& s = layer_->shape();
  const int64_t positions = routed_.rows() * routed_.top_k();
  lora_format = s.lora_format();
  up_differs = s.formats[kUp] != s.formats[kGate];
  const bool any_dequantised = std::find(dequantised_.begin(), dequantised_.end(), 1) != dequantised_.end();
  const auto bytes = [&](Format format, int64_t k) {
    return std::max(kernels_.row_bytes(format, k),
                    kernels_.row_bytes_for(format, any_dequantised && !plain(format), k));
  };
  for (int i = 0; i < (up_differs ? 2 : 1); ++i) x[i].reserve(positions, bytes(s.formats[i], s.hidden));
  h.reserve(positions, bytes(s.formats[kDown], s.intermediate));
  slices_ = slices_of(positions, s.hidden);
  shard_columns_ = shard_columns(s, slices_);
  y.reserve(positions, y_stride(s, slices_));
  grow(tiles_, pool_.threads() * kTileFloats * 4);
  if (!has_adapters()) return;
  if (s.formats[kGate] != lora_format) x_lora.reserve(positions, kernels_.row_bytes(lora_format, s.hidden));
  if (s.formats[kDown] != lora_format) h_lora.reserve(positions, kernels_.row_bytes(lora_format, s.intermediate));
  t.reserve(positions, panels_of(2 * max_rank_) * kPanel * 4);
}

int64_t MoeBatch::first_panel(int projection, int shard, int64_t slice) const {
  const int64_t first = layer_->first_panel(projection, shard);
  if (projection != kDown) return slice == 0 ? first : layer_->first_panel(projection, shard + 1);
  return first + (layer_->first_panel(projection, shard + 1) - first) / 2 * slice / slices_ * 2;
}

int64_t MoeBatch::column_of(int64_t panel, int64_t slice) const {
  int shard = 0;
  while (panel >= layer_->first_panel(kDown, shard + 1)) ++shard;
  return shard * shard_columns_ + (panel - first_panel(kDown, shard, slice)) * kPanel;
}

}  // namespace ktserve
