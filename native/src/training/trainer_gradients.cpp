// The gradients of LoRA's matrices.
#include <xmmintrin.h>

#include <algorithm>

#include "training/trainer.hpp"

namespace ktserve {
namespace {

constexpr int64_t kGradientBytes = 128 << 10;  // of rows, and of sums, of a work item of gradients
constexpr int64_t kGradientRows = 256;         // whose products are summed at a time

// Past the caches, which would read the lines first.
void stream_zeros(float* to, int64_t count) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0 || count % 4 != 0) {
    std::fill_n(to, count, 0.0f);
    return;
  }
  for (int64_t i = 0; i < count; i += 4) _mm_stream_ps(to + i, _mm_setzero_ps());
}

}  // namespace

std::vector<ExpertTrainer::GradientJob> ExpertTrainer::gradient_jobs() const {
  const LayerShape& s = layer_->shape();
  const int64_t widths[5] = {s.hidden, s.intermediate, s.intermediate, s.intermediate, s.hidden};
  std::vector<GradientJob> jobs;
  for (const Group& g : groups_) {
    // As many columns as possible: gradients are then long runs of memory.
    const int64_t rows = std::max(padded_k(std::min<int64_t>(kGradientRows, g.row_end - g.row)), 2 * g.lora->rank);
    const int64_t most = std::max(kGradientBytes / 2 / rows / kItemColumns, int64_t{1}) * kItemColumns;
    for (int kind = 0; kind < 5; ++kind) {
      for (int64_t column = 0; column < widths[kind]; column += most) {
        jobs.push_back({&g, kind, column, std::min(most, widths[kind] - column)});
      }
    }
  }
  return jobs;
}

void ExpertTrainer::lora_gradient(const GradientJob& job, bool adds, Room& room) {
  struct Product {
    int matrix;
    bool of_a;
    const ScratchRows* rows;     // whose sums over positions with
    const ScratchRows* columns;  // are the gradient; null: rows of the caller
  };
  static constexpr int kCounts[5] = {2, 1, 1, 1, 1};
  const Product products[5][2] = {{{kGate, true, &u_[kGate], nullptr}, {kUp, true, &u_[kUp], nullptr}},
                                  {{kDown, true, &u_[kDown], &h_lora_}, {}},
                                  {{kGate, false, &t_[kGate], &d_gate_}, {}},
                                  {{kUp, false, &t_[kUp], &d_up_}, {}},
                                  {{kDown, false, &t_[kDown], nullptr}, {}}};
  const auto columns_of = [&](const Product& p, int64_t row, int64_t column) -> RowView {
    if (p.columns != nullptr) return view(*p.columns, row, column);
    RowView of = caller_rows(p.of_a ? hidden_ : grad_out_, row);
    of.data += column * (of.bf16 ? 2 : 4);
    return of;
  };
  const auto& [group, kind, column, columns] = job;
  const Group& g = *group;
  const int64_t r = g.lora->rank;
  const int64_t stride = odd_lines(columns * 4) / 4;
  const int64_t m = g.row_end - g.row;
  const auto gradient_of = [&](const Product& p) -> float* {
    float* of = (p.of_a ? g.lora->grad_a : g.lora->grad_b)[p.matrix];
    if (of == nullptr) return nullptr;
    return of + (p.of_a ? g.expert * r * layer_->inner_of(p.matrix) + column
                        : (g.expert * layer_->rows_of(p.matrix) + column) * r);
  };
  float weights[kGradientRows];
  if (m <= kFewGradientRows && r <= kFewSumsRank) {
    for (int64_t i = 0; i < m; ++i) weights[i] = routed_.weight(g.row + i);
    for (int i = 0; i < kCounts[kind]; ++i) {
      const Product& p = products[kind][i];
      float* const to = gradient_of(p);
      if (to == nullptr) continue;
      panels_.few_gradient({view(*p.rows, g.row, 0), p.matrix == kDown ? weights : nullptr,
                            columns_of(p, g.row, column), m, r, columns, to, p.of_a ? layer_->inner_of(p.matrix) : r,
                            !p.of_a, adds});
    }
    _mm_sfence();
    return;
  }
  const int64_t most = std::min(kGradientRows, m);
  const int64_t row_bytes = kernels_.row_bytes(product_, most);
  uint8_t* panels = room.part(kPanels, packed_size(product_, columns, most));
  uint8_t* transposed = room.part(kRows, r * row_bytes);
  float* tiles[2] = {reinterpret_cast<float*>(room.part(kTile, r * stride * 4)),
                     reinterpret_cast<float*>(room.part(kSecondTile, r * stride * 4))};
  for (int64_t first = 0; first < m; first += most) {
    const int64_t count = std::min(most, m - first);
    const int64_t row = g.row + first;
    for (int64_t i = 0; i < count; ++i) weights[i] = routed_.weight(row + i);
    panels_.pack_transpose(columns_of(products[kind][0], row, column), columns, count, product_, panels);
    for (int i = 0; i < kCounts[kind]; ++i) {
      const Product& p = products[kind][i];
      // What comes from d lacks the router's weight.
      panels_.transpose_rows(view(*p.rows, row, 0), count, r, p.matrix == kDown ? weights : nullptr, product_,
                             transposed, row_bytes);
      kernels_.dot(
          {product_, panels, panels_of(columns), count, transposed, row_bytes, r, tiles[i], stride, panels, first > 0});
    }
  }
  for (int i = 0; i < kCounts[kind]; ++i) {
    const Product& p = products[kind][i];
    float* const to = gradient_of(p);
    if (to == nullptr) continue;
    if (!p.of_a) {
      panels_.put_transposed(tiles[i], stride, r, columns, to, adds);
      continue;
    }
    for (int64_t j = 0; j < r; ++j)
      panels_.put(tiles[i] + j * stride, columns, to + j * layer_->inner_of(p.matrix), adds);
  }
  _mm_sfence();
}

void ExpertTrainer::clear_gradients(const std::vector<TrainLora>& loras) {
  const LayerShape& s = layer_->shape();
  std::vector<uint8_t> present(loras.size() * static_cast<size_t>(s.experts));
  for (const Group& g : groups_) present[static_cast<size_t>((g.lora - loras.data()) * s.experts + g.expert)] = 1;
  pool_.parallel_for(static_cast<int64_t>(present.size()), [&](int64_t i, int) {
    if (present[static_cast<size_t>(i)] != 0) return;
    const TrainLora& lora = loras[static_cast<size_t>(i / s.experts)];
    for (int p = 0; p < 3; ++p) {
      const auto clear = [&](float* gradient, int64_t side) {
        if (gradient == nullptr) return;
        const int64_t count = lora.rank * side;
        stream_zeros(gradient + i % s.experts * count, count);
      };
      clear(lora.grad_a[p], layer_->inner_of(p));
      clear(lora.grad_b[p], layer_->rows_of(p));
    }
    _mm_sfence();
  });
}

}  // namespace ktserve
