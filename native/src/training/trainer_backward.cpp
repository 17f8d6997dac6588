#include <algorithm>
#include <cstring>

#include "training/trainer.hpp"

namespace ktserve {
namespace {

constexpr int64_t kPair = 2 * kPanel;      // columns whose W^T is made at a time
constexpr int64_t kGradientColumns = 256;  // of a work item
constexpr int64_t kGradientRows = 256;     // whose products are summed at a time

RowView view(const ScratchRows& rows, int64_t row, int64_t column, Format format) {
  const bool bf16 = format == Format::bf16;
  return {rows.at(row) + column * (bf16 ? 2 : 4), rows.stride, bf16};
}

}  // namespace

void ExpertTrainer::backward(const ExpertLayer& layer, const std::vector<TrainLora>& loras, const TrainBatch& batch,
                             const void* kept, const void* grad_out, void* grad_hidden, float* grad_weights) {
  by_chunks(layer, loras, batch, [&](const TrainBatch& part, int64_t first) {
    const LayerShape& s = layer.shape();
    const int64_t element = batch.bf16 ? 2 : 4;
    const int64_t kept_bytes = batch.top_k * 2 * s.intermediate * element;
    const uint8_t* here = static_cast<const uint8_t*>(kept);
    if (here != nullptr) {
      here += first * kept_bytes;
    } else {
      if (kept_.bytes() < static_cast<size_t>(part.rows * kept_bytes)) {
        kept_ = Arena(static_cast<size_t>(part.rows * kept_bytes));
      }
      gate_up(part, kept_.data());
      here = kept_.data();
    }
    input_bf16_ = batch.bf16;
    gather(static_cast<const uint8_t*>(grad_out) + first * s.hidden * element, s.hidden, product_, false, false, d_);
    hidden_gradient(part, here);
    if (!groups_.empty()) {
      gather(part.hidden, s.hidden, product_, false, true, x_lora_);
      project({{kGate, false, &x_lora_, &t_[kGate]},
               {kUp, false, &x_lora_, &t_[kUp]},
               {kDown, false, &h_lora_, &t_[kDown]},
               {kGate, true, &d_gate_, &u_[kGate]},
               {kUp, true, &d_up_, &u_[kUp]}});
      lora_gradients();
    }
    weight_gradient(part, grad_weights + first * batch.top_k);
    if (grad_hidden != nullptr) {
      input_gradient(part, static_cast<uint8_t*>(grad_hidden) + first * s.hidden * element);
    }
  });
}

void ExpertTrainer::transposed_product(int projection, const Item& item, const ScratchRows& d, float* out,
                                       int64_t stride, bool adds, Room& room) const {
  const LayerShape& s = layer_->shape();
  const int64_t n = layer_->rows_of(projection);
  const int64_t k = layer_->inner_of(projection);
  const int64_t size = panel_size(product_, n);
  uint8_t* panels = room.part(kPanels, 2 * size);
  for (int64_t column = item.column; column < item.column_end; column += kPair) {
    for (int shard = 0; shard < s.shards; ++shard) {
      const int64_t first = layer_->first_panel(projection, shard);
      const int64_t count = layer_->first_panel(projection, shard + 1) - first;
      if (count == 0) continue;
      panels_.transpose(s.formats[projection], layer_->panel(projection, item.expert, first), count, k, column, kPair,
                        product_, panels + first * kPanel * (product_ == Format::f32 ? 64 : 32), size);
    }
    kernels_.dot({product_, panels, 2, n, d.at(item.row), d.stride, item.row_end - item.row, out + column - item.column,
                  stride, panels, adds});
  }
}

void ExpertTrainer::hidden_gradient(const TrainBatch& b, const void* kept) {
  const LayerShape& s = layer_->shape();
  if (!groups_.empty()) project({{kDown, true, &d_, &u_[kDown]}});
  const int64_t bytes = kernels_.row_bytes(product_, s.intermediate);
  d_gate_.reserve(routed_.positions(), bytes);
  d_up_.reserve(routed_.positions(), bytes);
  if (!groups_.empty()) h_lora_.reserve(routed_.positions(), bytes);
  cut(-1, 0, s.intermediate);
  weight_parts_.resize(static_cast<size_t>(routed_.positions() * ranges_));
  each_item([&](const Item& item, Room& room) { hidden_gradient_item(item, b, kept, room); });
}

void ExpertTrainer::hidden_gradient_item(const Item& item, const TrainBatch& b, const void* kept, Room& room) {
  const LayerShape& s = layer_->shape();
  const int64_t rows = item.row_end - item.row;
  const int64_t width = item.column_end - item.column;
  const int64_t stride = odd_lines(width * 4) / 4;
  const int64_t element = product_ == Format::f32 ? 4 : 2;
  auto* dh = reinterpret_cast<float*>(room.part(kTile, rows * stride * 4));
  transposed_product(kDown, item, d_, dh, stride, false, room);
  add_lora(kDown, true, item, u_[kDown], dh, stride, room);
  const auto pre = [&](int64_t at, int i) -> const void* {
    return static_cast<const uint8_t*>(kept) + ((at * 2 + i) * s.intermediate + item.column) * (b.bf16 ? 2 : 4);
  };
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = item.row + row;
    const int64_t offset = item.column * element;
    weight_parts_[static_cast<size_t>(at * ranges_ + item.range)] = panels_.gated_backward(
        {pre(at, 0), pre(at, 1), b.bf16, dh + row * stride, routed_.weight(at), width, product_,
         d_gate_.at(at) + offset, d_up_.at(at) + offset, groups_.empty() ? nullptr : h_lora_.at(at) + offset});
  }
}

// dA of gate and up, which read the same x; dA of down; dB of gate, up, down.
void ExpertTrainer::lora_gradients() {
  struct Job {
    const Group* group;
    int job;
    int64_t column, columns;
  };
  const LayerShape& s = layer_->shape();
  const int64_t widths[5] = {s.hidden, s.intermediate, s.intermediate, s.intermediate, s.hidden};
  std::vector<Job> jobs;
  for (const Group& g : groups_) {
    for (int job = 0; job < 5; ++job) {
      for (int64_t column = 0; column < widths[job]; column += kGradientColumns) {
        jobs.push_back({&g, job, column, std::min(kGradientColumns, widths[job] - column)});
      }
    }
  }
  pool_.parallel_for(static_cast<int64_t>(jobs.size()), [&](int64_t i, int worker) {
    const Job& j = jobs[static_cast<size_t>(i)];
    lora_gradient(*j.group, j.job, j.column, j.columns, room(worker));
  });
}

void ExpertTrainer::lora_gradient(const Group& g, int job, int64_t column, int64_t columns, Room& room) {
  struct Product {
    int matrix;
    bool of_a;
    const ScratchRows* rows;     // whose sums over positions with
    const ScratchRows* columns;  // are the gradient
  };
  static constexpr int kCounts[5] = {2, 1, 1, 1, 1};
  const Product products[5][2] = {{{kGate, true, &u_[kGate], &x_lora_}, {kUp, true, &u_[kUp], &x_lora_}},
                                  {{kDown, true, &u_[kDown], &h_lora_}, {}},
                                  {{kGate, false, &t_[kGate], &d_gate_}, {}},
                                  {{kUp, false, &t_[kUp], &d_up_}, {}},
                                  {{kDown, false, &t_[kDown], &d_}, {}}};
  const int64_t r = g.lora->rank;
  const int64_t stride = odd_lines(columns * 4) / 4;
  const int64_t m = g.row_end - g.row;
  const int64_t most = std::min(kGradientRows, m);
  const int64_t row_bytes = kernels_.row_bytes(product_, most);
  uint8_t* panels = room.part(kPanels, packed_size(product_, columns, most));
  uint8_t* transposed = room.part(kRows, r * row_bytes);
  float* tiles[2] = {reinterpret_cast<float*>(room.part(kTile, r * stride * 4)),
                     reinterpret_cast<float*>(room.part(kSecondTile, r * stride * 4))};
  float weights[kGradientRows];
  for (int64_t first = 0; first < m; first += most) {
    const int64_t count = std::min(most, m - first);
    const int64_t row = g.row + first;
    for (int64_t i = 0; i < count; ++i) weights[i] = routed_.weight(row + i);
    panels_.pack_transpose(view(*products[job][0].columns, row, column, product_), columns, count, product_, panels);
    for (int i = 0; i < kCounts[job]; ++i) {
      const Product& p = products[job][i];
      // What comes from d lacks the router's weight.
      panels_.transpose_rows(view(*p.rows, row, 0, product_), count, r, p.matrix == kDown ? weights : nullptr, product_,
                             transposed, row_bytes);
      kernels_.dot(
          {product_, panels, panels_of(columns), count, transposed, row_bytes, r, tiles[i], stride, panels, first > 0});
    }
  }
  for (int i = 0; i < kCounts[job]; ++i) {
    const Product& p = products[job][i];
    const int64_t out = layer_->rows_of(p.matrix);
    const int64_t in = layer_->inner_of(p.matrix);
    if (p.of_a && g.lora->grad_a[p.matrix] != nullptr) {
      float* to = g.lora->grad_a[p.matrix] + g.expert * r * in + column;
      for (int64_t j = 0; j < r; ++j) panels_.add(tiles[i] + j * stride, columns, to + j * in);
    } else if (!p.of_a && g.lora->grad_b[p.matrix] != nullptr) {
      float* to = g.lora->grad_b[p.matrix] + (g.expert * out + column) * r;
      panels_.add_transposed(tiles[i], stride, r, columns, to, r);
    }
  }
}

void ExpertTrainer::input_gradient(const TrainBatch& b, void* grad_hidden) {
  const LayerShape& s = layer_->shape();
  const int64_t columns = slice_columns();
  y_.reserve(routed_.positions(), odd_lines(columns * 4));
  for (int64_t first = 0; first < s.hidden; first += columns) {
    const int64_t last = std::min(s.hidden, first + columns);
    cut(-1, first, last);
    each_item([&](const Item& item, Room& room) {
      float* dx = y_.floats(item.row) + item.column - first;
      const int64_t stride = y_.stride_floats();
      transposed_product(kGate, item, d_gate_, dx, stride, false, room);
      transposed_product(kUp, item, d_up_, dx, stride, true, room);
      add_lora(kGate, true, item, u_[kGate], dx, stride, room);
      add_lora(kUp, true, item, u_[kUp], dx, stride, room);
    });
    combine(b, false, first, last, grad_hidden);
  }
}

void ExpertTrainer::weight_gradient(const TrainBatch& b, float* grad_weights) const {
  const auto ranges = static_cast<int64_t>(weight_parts_.size()) / std::max<int64_t>(1, routed_.positions());
  for (int64_t row = 0; row < b.rows; ++row) {
    for (int32_t at : routed_.positions_of(row)) {
      float sum = 0;
      for (int64_t i = 0; at >= 0 && i < ranges; ++i) sum += weight_parts_[static_cast<size_t>(at * ranges + i)];
      *grad_weights++ = sum;
    }
  }
}

}  // namespace ktserve
