#include "experts/moe.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace ktserve {
namespace {

constexpr int64_t kMostPanels = 32;  // whose gate and up are computed before h is made from them, for 128 rows
constexpr int64_t kTileRows = 128;   // fewer panels for more rows
constexpr int64_t kTileFloats = 2 * (kTileRows * kMostPanels + kMostPieceRows) * kPanel;
constexpr int64_t kSliceBytes = 64 << 20;  // of y

void grow(Arena& arena, int64_t bytes) {
  if (arena.bytes() < static_cast<size_t>(bytes)) arena = Arena(static_cast<size_t>(bytes));
}

std::string range_error(const char* what, int64_t value, int64_t low, int64_t high) {
  return std::string(what) + ": " + std::to_string(value) + "; allowed are " + std::to_string(low) + " to " +
         std::to_string(high);
}

// Rows computed at a time, which bounds the scratch memory (110 KB a row for Qwen3-30B-A3B in bf16). The weights are
// read once for so many rows: on tiles, 1024 rows of 128 experts would take no longer than that reading.
int64_t chunk_rows(Isa isa) {
  return isa == Isa::amx ? 4096 : 1024;
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

// Floats from row to row of y.
int64_t y_stride(const LayerShape& s, int64_t slices) {
  return odd_lines(s.shards * shard_columns(s, slices) * 4) / 4;
}

}  // namespace

void MoeRunner::check(const ExpertLayer& layer, const MoeBuffers& b, int64_t rows) const {
  if (rows < 0 || rows > b.max_rows) throw std::invalid_argument(range_error("bsz", rows, 0, b.max_rows));
  for (int64_t i = 0; i < rows * b.top_k; ++i) {
    if (b.ids[i] < -1 || b.ids[i] >= layer.shape().experts) {
      throw std::invalid_argument(range_error("ids", b.ids[i], -1, layer.shape().experts - 1));
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    if (b.slots[r] < 0 || b.slots[r] > 65535) throw std::invalid_argument(range_error("slots", b.slots[r], 0, 65535));
  }
}

void MoeRunner::forward(const ExpertLayer& layer, const MoeBuffers& buffers) {
  std::lock_guard<std::mutex> lock(running_);
  const int64_t rows = *buffers.bsz;
  check(layer, buffers, rows);
  if (rows == 0) return;
  pool_.begin_step();
  try {
    const int64_t most = chunk_rows(kernels_.isa);
    for (int64_t first = 0; first < rows; first += most) {
      run(layer, buffers, first, std::min(most, rows - first));
    }
  } catch (...) {
    pool_.end_step();
    throw;
  }
  pool_.end_step();
}

void MoeRunner::run(const ExpertLayer& layer, const MoeBuffers& buffers, int64_t first, int64_t rows) {
  group(layer, buffers, first, rows);
  choose_wide(layer.shape());
  reserve(layer, buffers.top_k, rows);
  pack_hidden(layer, buffers, first, rows);
  if (!segments_.empty()) lora_a(layer, false);
  cut(layer, kGate, 0);
  pool_.parallel_for_groups(group_starts_, [&](int64_t piece, int worker) {
    gate_up(layer, pieces_[static_cast<size_t>(piece)], reinterpret_cast<float*>(tiles_.data()) + worker * kTileFloats);
  });
  if (!segments_.empty()) lora_a(layer, true);
  for (int64_t slice = 0; slice < slices_; ++slice) {
    cut(layer, kDown, slice);
    pool_.parallel_for_groups(group_starts_,
                              [&](int64_t piece, int) { down(layer, pieces_[static_cast<size_t>(piece)], slice); });
    combine(layer, buffers, first, rows, slice);
  }
}

void MoeRunner::product(Format format, bool wide, const DotArgs& args) const {
  (wide && !plain(format) ? kernels_.dot_wide : kernels_.dot)(args);
}

int64_t MoeRunner::scratch_bytes(Isa isa, bool deterministic, int threads, const LayerShape& s, int64_t rows,
                                 int64_t top_k, int64_t rank) {
  const Kernels& k = kernels(isa);
  const int64_t positions = std::min(rows, chunk_rows(isa)) * top_k;
  const auto widest = [&](Format format, int64_t inner) {
    const bool may_be_wide = !deterministic && k.wide_from(format) > 0;
    return std::max(k.row_bytes(format, inner), k.row_bytes_for(format, may_be_wide, inner));
  };
  int64_t each = widest(s.formats[kGate], s.hidden) + widest(s.formats[kDown], s.intermediate);
  if (s.formats[kUp] != s.formats[kGate]) each += widest(s.formats[kUp], s.hidden);
  each += y_stride(s, slices_of(positions, s.hidden)) * 4;
  if (rank > 0) {
    const Format lora = s.lora_format();
    if (s.formats[kGate] != lora) each += k.row_bytes(lora, s.hidden);
    if (s.formats[kDown] != lora) each += k.row_bytes(lora, s.intermediate);
    each += panels_of(2 * rank) * kPanel * 4;
  }
  return positions * each + threads * kTileFloats * 4;
}

void MoeRunner::reserve(const ExpertLayer& layer, int64_t top_k, int64_t rows) {
  const LayerShape& s = layer.shape();
  const int64_t positions = rows * top_k;
  lora_format_ = s.lora_format();
  up_differs_ = s.formats[kUp] != s.formats[kGate];
  const bool any_wide = std::find(wide_.begin(), wide_.end(), 1) != wide_.end();
  const auto stride = [&](Format format, int64_t k) {
    return std::max(kernels_.row_bytes(format, k), kernels_.row_bytes_for(format, any_wide && !plain(format), k));
  };
  for (int i = 0; i < (up_differs_ ? 2 : 1); ++i) {
    x_stride_[i] = stride(s.formats[i], s.hidden);
    grow(x_[i], positions * x_stride_[i]);
  }
  h_stride_ = stride(s.formats[kDown], s.intermediate);
  grow(h_, positions * h_stride_);
  slices_ = slices_of(positions, s.hidden);
  shard_columns_ = shard_columns(s, slices_);
  y_stride_ = y_stride(s, slices_);
  grow(y_, positions * y_stride_ * 4);
  grow(tiles_, pool_.threads() * kTileFloats * 4);
  if (segments_.empty()) return;
  xb_stride_ = kernels_.row_bytes(lora_format_, s.hidden);
  hb_stride_ = kernels_.row_bytes(lora_format_, s.intermediate);
  t_stride_ = panels_of(2 * max_rank_) * kPanel;
  if (s.formats[kGate] != lora_format_) grow(xb_, positions * xb_stride_);
  if (s.formats[kDown] != lora_format_) grow(hb_, positions * hb_stride_);
  grow(t_, positions * t_stride_ * 4);
}

void MoeRunner::pack_hidden(const ExpertLayer& layer, const MoeBuffers& b, int64_t first, int64_t rows) {
  const LayerShape& s = layer.shape();
  const auto pack = [&](Format format, bool wide, int64_t row, uint8_t* to) {
    const int64_t at = row * s.hidden;
    if (b.bf16) {
      kernels_.pack(format, wide, static_cast<const uint16_t*>(b.hidden) + at, s.hidden, 0, s.hidden, to);
    } else {
      kernels_.pack(format, wide, static_cast<const float*>(b.hidden) + at, s.hidden, 0, s.hidden, to);
    }
  };
  // A row's choices differ in form only between wide and other experts: each form is packed once, then copied.
  const auto fill = [&](Format format, int64_t row, Arena& arena, int64_t stride, bool lora_only) {
    const uint8_t* done[2] = {};
    for (int64_t j = 0; j < b.top_k; ++j) {
      const int64_t choice = row * b.top_k + j;
      const int32_t at = position_[static_cast<size_t>(choice)];
      if (at < 0 || (lora_only && row_lora_[static_cast<size_t>(at)] == nullptr)) continue;
      const bool is_wide = !plain(format) && wide(b.ids[first * b.top_k + choice]);
      const uint8_t*& made = done[is_wide ? 1 : 0];
      uint8_t* to = arena.data() + at * stride;
      if (made == nullptr) {
        pack(format, is_wide, first + row, to);
        made = to;
      } else {
        std::memcpy(to, made, static_cast<size_t>(kernels_.row_bytes_for(format, is_wide, s.hidden)));
      }
    }
  };
  const auto one = [&](int64_t row) {
    fill(s.formats[kGate], row, x_[0], x_stride_[0], false);
    if (up_differs_) fill(s.formats[kUp], row, x_[1], x_stride_[1], false);
    if (!segments_.empty() && s.formats[kGate] != lora_format_) fill(lora_format_, row, xb_, xb_stride_, true);
  };
  if (rows <= 2) {  // cheaper than waking anyone
    for (int64_t row = 0; row < rows; ++row) one(row);
    return;
  }
  const int64_t step = rows >= 64 ? 4 : 1;
  pool_.parallel_for((rows + step - 1) / step, [&](int64_t piece, int) {
    for (int64_t row = piece * step; row < std::min(rows, (piece + 1) * step); ++row) one(row);
  });
}

void MoeRunner::lora_a(const ExpertLayer& layer, bool down) {
  const LayerShape& s = layer.shape();
  const int64_t k = down ? s.intermediate : s.hidden;
  const bool own = s.formats[down ? kDown : kGate] == lora_format_;  // the base product's rows are bf16 already
  const Arena& rows = down ? (own ? h_ : hb_) : (own ? x_[0] : xb_);
  const int64_t stride = down ? (own ? h_stride_ : hb_stride_) : (own ? x_stride_[0] : xb_stride_);
  pool_.parallel_for(static_cast<int64_t>(segments_.size()), [&](int64_t piece, int) {
    const auto a = [&](const Segment& of) {
      return of.lora->part(of.expert, down ? of.lora->a_down : of.lora->a_gate_up);
    };
    const Segment& g = segments_[static_cast<size_t>(piece)];
    const int64_t r = g.lora->rank;
    float* t = reinterpret_cast<float*>(t_.data()) + g.row * t_stride_;
    const uint8_t* next = piece + 1 < static_cast<int64_t>(segments_.size()) ? a(*(&g + 1)) : nullptr;
    kernels_.dot({lora_format_, a(g), panels_of(down ? r : 2 * r), k, rows.data() + g.row * stride, stride,
                  g.row_end - g.row, t, t_stride_, next});
    for (int64_t row = g.row; row < g.row_end; ++row, t += t_stride_) {
      for (int64_t i = 0; i < (down ? r : 2 * r); ++i) t[i] *= g.lora->scales[down ? kDown : i < r ? kGate : kUp];
    }
  });
}

void MoeRunner::fetch_lora(int projection, const Piece& p) const {
  if (segments_.empty()) return;
  const int64_t element = lora_format_ == Format::bf16 ? 2 : 4;
  const LayerLora* last = nullptr;
  for (int64_t row = p.row; row < p.row_end; ++row) {
    const LayerLora* lora = row_lora_[static_cast<size_t>(row)];
    if (lora == nullptr || lora == last) continue;
    last = lora;
    const int64_t panel_bytes = kPanel * lora->rank * element;
    const uint8_t* b = lora->part(p.expert, lora->b[projection]) + p.panel * panel_bytes;
    for (int64_t i = 0; i < (p.panel_end - p.panel) * panel_bytes; i += 64) __builtin_prefetch(b + i, 0, 2);
  }
}

void MoeRunner::add_lora(int projection, const Piece& p, float* tile, int64_t stride, int64_t t_half) {
  if (segments_.empty()) return;
  for (int64_t row = p.row; row < p.row_end; ++row) {
    const LayerLora* lora = row_lora_[static_cast<size_t>(row)];
    if (lora == nullptr) continue;
    const uint8_t* b = lora->part(p.expert, lora->b[projection]);
    const float* t = reinterpret_cast<const float*>(t_.data()) + row * t_stride_ + t_half * lora->rank;
    const int64_t skip = p.panel * kPanel * lora->rank;
    float* out = tile + (row - p.row) * stride;
    if (lora_format_ == Format::bf16) {
      kernels_.lora_b(reinterpret_cast<const uint16_t*>(b) + skip, p.panel_end - p.panel, lora->rank, t, out);
    } else {
      kernels_.lora_b_f32(reinterpret_cast<const float*>(b) + skip, p.panel_end - p.panel, lora->rank, t, out);
    }
  }
}

void MoeRunner::gate_up(const ExpertLayer& layer, const Piece& p, float* scratch) {
  const int64_t room = kTileRows * kMostPanels / (p.row_end - p.row) / 2 * 2;
  const int64_t panels = std::clamp<int64_t>(room, 2, kMostPanels);
  for (int64_t panel = p.panel; panel < p.panel_end; panel += panels) {
    Piece part = p;
    part.panel = static_cast<int32_t>(panel);
    part.panel_end = static_cast<int32_t>(std::min<int64_t>(panel + panels, p.panel_end));
    if (part.panel_end < p.panel_end) part.next = layer.panel(kGate, p.expert, part.panel_end);
    gate_up_panels(layer, part, scratch);
  }
}

void MoeRunner::gate_up_panels(const ExpertLayer& layer, const Piece& p, float* gate) {
  const LayerShape& s = layer.shape();
  const int64_t rows = p.row_end - p.row;
  const int64_t panels = p.panel_end - p.panel;
  const int64_t width = panels * kPanel;
  const int64_t stride = odd_lines(width * 4) / 4;
  float* up = gate + rows * stride;
  const int up_form = up_differs_ ? 1 : 0;
  const bool is_wide = wide(p.expert);
  const uint8_t* up_panels = layer.panel(kUp, p.expert, p.panel);
  fetch_lora(kGate, p);
  fetch_lora(kUp, p);
  product(s.formats[kGate], is_wide,
          {s.formats[kGate], layer.panel(kGate, p.expert, p.panel), panels, s.hidden,
           x_[0].data() + p.row * x_stride_[0], x_stride_[0], rows, gate, stride, up_panels});
  product(s.formats[kUp], is_wide,
          {s.formats[kUp], up_panels, panels, s.hidden, x_[up_form].data() + p.row * x_stride_[up_form],
           x_stride_[up_form], rows, up, stride, p.next});
  add_lora(kGate, p, gate, stride, 0);
  add_lora(kUp, p, up, stride, 1);
  const int64_t first = p.panel * kPanel;
  const bool down_wide = is_wide && !plain(s.formats[kDown]);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = p.row + row;
    float* h = gate + row * stride;
    kernels_.silu_mul(h, up + row * stride, width);
    kernels_.pack(s.formats[kDown], down_wide, h, s.intermediate, first, first + width, h_.data() + at * h_stride_);
    if (s.formats[kDown] != lora_format_ && row_lora_[static_cast<size_t>(at)] != nullptr) {
      kernels_.pack_f32(lora_format_, h, s.intermediate, first, first + width, hb_.data() + at * hb_stride_);
    }
  }
}

void MoeRunner::down(const ExpertLayer& layer, const Piece& p, int64_t slice) {
  const LayerShape& s = layer.shape();
  int shard = 0;
  while (p.panel >= layer.first_panel(kDown, shard + 1)) ++shard;
  const int64_t column = shard * shard_columns_ + (p.panel - first_panel(layer, kDown, shard, slice)) * kPanel;
  float* y = reinterpret_cast<float*>(y_.data()) + p.row * y_stride_ + column;
  fetch_lora(kDown, p);
  product(s.formats[kDown], wide(p.expert),
          {s.formats[kDown], layer.panel(kDown, p.expert, p.panel), p.panel_end - p.panel, s.intermediate,
           h_.data() + p.row * h_stride_, h_stride_, p.row_end - p.row, y, y_stride_, p.next});
  add_lora(kDown, p, y, y_stride_, 0);
}

void MoeRunner::combine(const ExpertLayer& layer, const MoeBuffers& b, int64_t first, int64_t rows, int64_t slice) {
  const LayerShape& s = layer.shape();
  struct Run {
    int64_t column, from, count;  // of out, of y
  };
  const int64_t widest = rows >= 4 * pool_.threads() ? 16384 : 512;
  std::vector<Run> runs;
  for (int shard = 0; shard < s.shards; ++shard) {
    const int64_t begin = first_panel(layer, kDown, shard, slice) * kPanel;
    const int64_t end = std::min(first_panel(layer, kDown, shard, slice + 1) * kPanel, s.hidden);
    for (int64_t c = begin; c < end; c += widest) {
      runs.push_back({c, shard * shard_columns_ + c - begin, std::min(widest, end - c)});
    }
  }
  const auto cuts = static_cast<int64_t>(runs.size());
  pool_.parallel_for(rows * cuts, [&](int64_t piece, int worker) {
    const int64_t row = piece / cuts;
    const Run& run = runs[static_cast<size_t>(piece % cuts)];
    const float* sources[kMostTopK];
    for (int64_t j = 0; j < b.top_k; ++j) {
      const int32_t at = position_[static_cast<size_t>(row * b.top_k + j)];
      sources[j] = at < 0 ? nullptr : reinterpret_cast<const float*>(y_.data()) + at * y_stride_ + run.from;
    }
    const float* weights = b.weights + (first + row) * b.top_k;
    const int64_t to = (first + row) * s.hidden + run.column;
    if (!b.bf16) {
      kernels_.combine(sources, weights, b.top_k, run.count, static_cast<float*>(b.out) + to);
      return;
    }
    float* sums = reinterpret_cast<float*>(tiles_.data()) + worker * kTileFloats;
    kernels_.combine(sources, weights, b.top_k, run.count, sums);
    kernels_.to_bf16(sums, run.count, static_cast<uint16_t*>(b.out) + to);
  });
}

}  // namespace ktserve
