#include "experts/moe.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace ktserve {
namespace {

std::string range_error(const char* what, int64_t value, int64_t low, int64_t high) {
  return std::string(what) + ": " + std::to_string(value) + "; allowed are " + std::to_string(low) + " to " +
         std::to_string(high);
}

// Rows computed at a time, which bounds the scratch memory (110 KB a row for Qwen3-30B-A3B in bf16). The weights are
// read once for so many rows: on tiles, 1024 rows of 128 experts would take no longer than that reading.
int64_t chunk_rows(Isa isa) {
  return isa == Isa::amx ? 4096 : 1024;
}

// The buffers from row `first` on.
MoeBuffers from_row(MoeBuffers b, int64_t first, int64_t hidden) {
  const int64_t bytes = first * hidden * (b.bf16 ? 2 : 4);
  b.ids += first * b.top_k;
  b.weights += first * b.top_k;
  b.slots += first;
  b.hidden = static_cast<const uint8_t*>(b.hidden) + bytes;
  b.out = static_cast<uint8_t*>(b.out) + bytes;
  return b;
}

}  // namespace

MoeRunner::MoeRunner(WorkerPool& pool, Isa isa, bool deterministic)
    : pool_(pool),
      kernels_(kernels(isa)),
      deterministic_(deterministic),
      batch_(pool, kernels_, deterministic),
      counters_(static_cast<size_t>(pool.threads())) {}

int64_t MoeRunner::scratch_bytes(Isa isa, bool deterministic, int threads, const LayerShape& shape, int64_t rows,
                                 int64_t top_k, int64_t rank) {
  return MoeBatch::scratch_bytes(kernels(isa), deterministic, threads, shape, std::min(rows, chunk_rows(isa)), top_k,
                                 rank);
}

int64_t MoeRunner::weight_bytes_read() const {
  const std::lock_guard lock(running_);
  int64_t sum = 0;
  for (const Counter& counter : counters_) sum += counter.weight_bytes;
  return sum;
}

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
  const std::lock_guard lock(running_);
  const int64_t rows = *buffers.bsz;
  check(layer, buffers, rows);
  if (rows == 0) return;
  touched_.assign(static_cast<size_t>(layer.shape().experts), 0);
  pool_.begin_step();
  try {
    const int64_t most = chunk_rows(kernels_.isa);
    for (int64_t first = 0; first < rows; first += most) {
      run(layer, from_row(buffers, first, layer.shape().hidden), std::min(most, rows - first));
    }
  } catch (...) {
    pool_.end_step();
    throw;
  }
  pool_.end_step();
  if (buffers.touched != nullptr) *buffers.touched += std::count(touched_.begin(), touched_.end(), 1);
}

void MoeRunner::run(const ExpertLayer& layer, const MoeBuffers& b, int64_t rows) {
  batch_.begin(layer, {b.ids, b.weights, b.slots, rows, b.top_k, layer.shape().experts});
  for (int64_t e = 0; e < layer.shape().experts; ++e) {
    const int64_t chosen = batch_.routed().count(e);
    if (chosen == 0) continue;
    layer.count_choices(e, chosen);
    touched_[static_cast<size_t>(e)] = 1;
  }
  pack_hidden(b);
  if (batch_.has_adapters()) lora_a(false);
  batch_.cut(kGate, 0);
  pool_.parallel_for_groups(batch_.group_starts(),
                            [&](int64_t i, int worker) { gate_up(batch_.items()[static_cast<size_t>(i)], worker); });
  if (batch_.has_adapters()) lora_a(true);
  for (int64_t slice = 0; slice < batch_.slices(); ++slice) {
    batch_.cut(kDown, slice);
    pool_.parallel_for_groups(batch_.group_starts(), [&](int64_t i, int worker) {
      down(batch_.items()[static_cast<size_t>(i)], slice, worker);
    });
    combine(b, slice);
  }
}

void MoeRunner::product(int projection, const WorkItem& item, const ScratchRows& x, float* out, int64_t out_stride,
                        const uint8_t* next, int worker) {
  const ExpertLayer& layer = batch_.layer();
  const Format format = layer.shape().formats[projection];
  const int64_t k = layer.inner_of(projection);
  const int64_t panels = item.panel_end - item.panel;
  const bool dequantised = batch_.dequantised(item.expert) && !plain(format);
  (dequantised ? kernels_.dot_dequantised
               : kernels_.dot)({format, layer.panel(projection, item.expert, item.panel), panels, k, x.at(item.row),
                                x.stride, item.row_end - item.row, out, out_stride, next});
  counters_[static_cast<size_t>(worker)].weight_bytes += panels * panel_size(format, k);
}

void MoeRunner::pack_hidden(const MoeBuffers& b) {
  const LayerShape& s = batch_.layer().shape();
  const RoutedBatch& routed = batch_.routed();
  const auto pack = [&](Format format, bool dequantised, int64_t row, uint8_t* to) {
    const int64_t at = row * s.hidden;
    if (b.bf16) {
      kernels_.pack(format, dequantised, static_cast<const uint16_t*>(b.hidden) + at, s.hidden, 0, s.hidden, to);
    } else {
      kernels_.pack(format, dequantised, static_cast<const float*>(b.hidden) + at, s.hidden, 0, s.hidden, to);
    }
  };
  // A row's choices differ in form only between dequantised and other experts: each form is packed once, then copied.
  const auto fill = [&](Format format, int64_t row, const ScratchRows& rows, bool lora_only) {
    const uint8_t* done[2] = {};
    const int64_t* ids = b.ids + row * b.top_k;
    for (int32_t at : routed.positions_of(row)) {
      const int64_t id = *ids++;
      if (at < 0 || (lora_only && batch_.lora(at) == nullptr)) continue;
      const bool dequantised = !plain(format) && batch_.dequantised(id);
      const uint8_t*& made = done[dequantised ? 1 : 0];
      if (made == nullptr) {
        pack(format, dequantised, row, rows.at(at));
        made = rows.at(at);
      } else {
        std::memcpy(rows.at(at), made, static_cast<size_t>(kernels_.row_bytes_for(format, dequantised, s.hidden)));
      }
    }
  };
  const auto one = [&](int64_t row) {
    fill(s.formats[kGate], row, batch_.x[0], false);
    if (batch_.up_differs) fill(s.formats[kUp], row, batch_.x[1], false);
    if (batch_.has_adapters() && s.formats[kGate] != batch_.lora_format) {
      fill(batch_.lora_format, row, batch_.x_lora, true);
    }
  };
  const int64_t rows = routed.rows();
  if (rows <= 2) {  // cheaper than waking anyone
    for (int64_t row = 0; row < rows; ++row) one(row);
    return;
  }
  const int64_t step = rows >= 64 ? 4 : 1;
  pool_.parallel_for((rows + step - 1) / step, [&](int64_t item, int) {
    for (int64_t row = item * step; row < std::min(rows, (item + 1) * step); ++row) one(row);
  });
}

void MoeRunner::lora_a(bool down) {
  const LayerShape& s = batch_.layer().shape();
  const int64_t k = down ? s.intermediate : s.hidden;
  // Where the base product reads the adapters' format, its rows serve both.
  const bool own = s.formats[down ? kDown : kGate] == batch_.lora_format;
  const ScratchRows& rows = down ? (own ? batch_.h : batch_.h_lora) : (own ? batch_.x[0] : batch_.x_lora);
  const std::vector<LoraSegment>& segments = batch_.segments();
  const int64_t t_stride = batch_.t.stride_floats();
  pool_.parallel_for(static_cast<int64_t>(segments.size()), [&](int64_t item, int) {
    const auto a = [&](const LoraSegment& of) {
      return of.lora->part(of.expert, down ? of.lora->a_down : of.lora->a_gate_up);
    };
    const LoraSegment& g = segments[static_cast<size_t>(item)];
    const int64_t r = g.lora->rank;
    float* t = batch_.t.floats(g.row);
    const uint8_t* next = item + 1 < static_cast<int64_t>(segments.size()) ? a(*(&g + 1)) : nullptr;
    kernels_.dot({batch_.lora_format, a(g), panels_of(down ? r : 2 * r), k, rows.at(g.row), rows.stride,
                  g.row_end - g.row, t, t_stride, next});
    for (int64_t row = g.row; row < g.row_end; ++row, t += t_stride) {
      for (int64_t i = 0; i < (down ? r : 2 * r); ++i) t[i] *= g.lora->scales[down ? kDown : i < r ? kGate : kUp];
    }
  });
}

void MoeRunner::fetch_lora(int projection, const WorkItem& p) const {
  if (!batch_.has_adapters()) return;
  const int64_t element = batch_.lora_format == Format::bf16 ? 2 : 4;
  const LayerLora* last = nullptr;
  for (int64_t row = p.row; row < p.row_end; ++row) {
    const LayerLora* lora = batch_.lora(row);
    if (lora == nullptr || lora == last) continue;
    last = lora;
    const int64_t panel_bytes = kPanel * lora->rank * element;
    const uint8_t* b = lora->part(p.expert, lora->b[projection]) + p.panel * panel_bytes;
    for (int64_t i = 0; i < (p.panel_end - p.panel) * panel_bytes; i += 64) __builtin_prefetch(b + i, 0, 2);
  }
}

void MoeRunner::add_lora(int projection, const WorkItem& p, float* tile, int64_t stride, int64_t t_half) const {
  if (!batch_.has_adapters()) return;
  for (int64_t row = p.row; row < p.row_end; ++row) {
    const LayerLora* lora = batch_.lora(row);
    if (lora == nullptr) continue;
    const uint8_t* b = lora->part(p.expert, lora->b[projection]);
    const float* t = batch_.t.floats(row) + t_half * lora->rank;
    const int64_t skip = p.panel * kPanel * lora->rank;
    float* out = tile + (row - p.row) * stride;
    if (batch_.lora_format == Format::bf16) {
      kernels_.lora_b(reinterpret_cast<const uint16_t*>(b) + skip, p.panel_end - p.panel, lora->rank, t, out);
    } else {
      kernels_.lora_b_f32(reinterpret_cast<const float*>(b) + skip, p.panel_end - p.panel, lora->rank, t, out);
    }
  }
}

// As a B of rank 1 is added.
void MoeRunner::add_bias(int projection, const WorkItem& p, float* tile, int64_t stride) const {
  const float* bias = batch_.layer().bias(projection, p.expert, p.panel);
  if (bias == nullptr) return;
  constexpr float one = 1;
  for (int64_t row = 0; row < p.row_end - p.row; ++row) {
    kernels_.lora_b_f32(bias, p.panel_end - p.panel, 1, &one, tile + row * stride);
  }
}

void MoeRunner::gate_up(const WorkItem& p, int worker) {
  const int64_t room = kFullPanelRows * kTilePanels / (p.row_end - p.row) / 2 * 2;
  const int64_t panels = std::clamp<int64_t>(room, 2, kTilePanels);
  for (int64_t panel = p.panel; panel < p.panel_end; panel += panels) {
    WorkItem part = p;
    part.panel = static_cast<int32_t>(panel);
    part.panel_end = static_cast<int32_t>(std::min<int64_t>(panel + panels, p.panel_end));
    if (part.panel_end < p.panel_end) part.next = batch_.layer().panel(kGate, p.expert, part.panel_end);
    gate_up_panels(part, worker);
  }
}

void MoeRunner::gate_up_panels(const WorkItem& p, int worker) {
  const LayerShape& s = batch_.layer().shape();
  const int64_t rows = p.row_end - p.row;
  const int64_t width = (p.panel_end - p.panel) * kPanel;
  const int64_t stride = odd_lines(width * 4) / 4;
  float* gate = batch_.tile(worker);
  float* up = gate + rows * stride;
  fetch_lora(kGate, p);
  fetch_lora(kUp, p);
  product(kGate, p, batch_.x[0], gate, stride, batch_.layer().panel(kUp, p.expert, p.panel), worker);
  product(kUp, p, batch_.x[batch_.up_differs ? 1 : 0], up, stride, p.next, worker);
  add_bias(kGate, p, gate, stride);
  add_bias(kUp, p, up, stride);
  add_lora(kGate, p, gate, stride, 0);
  add_lora(kUp, p, up, stride, 1);
  const int64_t first = p.panel * kPanel;
  const Format format = s.formats[kDown];
  const bool dequantised = batch_.dequantised(p.expert) && !plain(format);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = p.row + row;
    float* h = gate + row * stride;
    kernels_.activate(s.activation, h, up + row * stride, width);
    kernels_.pack(format, dequantised, h, s.intermediate, first, first + width, batch_.h.at(at));
    if (format != batch_.lora_format && batch_.lora(at) != nullptr) {
      kernels_.pack_f32(batch_.lora_format, h, s.intermediate, first, first + width, batch_.h_lora.at(at));
    }
  }
}

void MoeRunner::down(const WorkItem& p, int64_t slice, int worker) {
  float* y = batch_.y.floats(p.row) + batch_.column_of(p.panel, slice);
  const int64_t stride = batch_.y.stride_floats();
  fetch_lora(kDown, p);
  product(kDown, p, batch_.h, y, stride, p.next, worker);
  add_bias(kDown, p, y, stride);
  add_lora(kDown, p, y, stride, 0);
}

void MoeRunner::combine(const MoeBuffers& b, int64_t slice) {
  const LayerShape& s = batch_.layer().shape();
  const RoutedBatch& routed = batch_.routed();
  const int64_t rows = routed.rows();
  struct Run {
    int64_t column, from, count;  // of out, of y
  };
  const int64_t widest = rows >= 4 * pool_.threads() ? 16384 : 512;
  std::vector<Run> runs;
  for (int shard = 0; shard < s.shards; ++shard) {
    const int64_t panel = batch_.first_panel(kDown, shard, slice);
    const int64_t begin = panel * kPanel;
    const int64_t end = std::min(batch_.first_panel(kDown, shard, slice + 1) * kPanel, s.hidden);
    for (int64_t c = begin; c < end; c += widest) {
      runs.push_back({c, batch_.column_of(panel, slice) + c - begin, std::min(widest, end - c)});
    }
  }
  const auto cuts = static_cast<int64_t>(runs.size());
  pool_.parallel_for(rows * cuts, [&](int64_t item, int worker) {
    const int64_t row = item / cuts;
    const Run& run = runs[static_cast<size_t>(item % cuts)];
    const float* sources[kMostTopK];
    const float** next = sources;
    for (int32_t at : routed.positions_of(row)) *next++ = at < 0 ? nullptr : batch_.y.floats(at) + run.from;
    const float* weights = b.weights + row * b.top_k;
    const int64_t to = row * s.hidden + run.column;
    if (!b.bf16) {
      kernels_.combine(sources, weights, b.top_k, run.count, static_cast<float*>(b.out) + to);
      return;
    }
    float* sums = batch_.tile(worker);
    kernels_.combine(sources, weights, b.top_k, run.count, sums);
    kernels_.to_bf16(sums, run.count, static_cast<uint16_t*>(b.out) + to);
  });
}

}  // namespace ktserve
