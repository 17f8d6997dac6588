// What a step of the trainer does with LoRA's matrices.
#include <xmmintrin.h>

#include <algorithm>
#include <cstring>

#include "training/trainer.hpp"

namespace ktserve {
namespace {

constexpr int64_t kProjectedRows = 256;
constexpr int64_t kMadeRows = 64;              // of the caller, in the form of a product
constexpr int64_t kGradientBytes = 128 << 10;  // of rows, and of sums, of a work item of gradients
constexpr int64_t kGradientRows = 256;         // whose products are summed at a time

RowView view(const ScratchRows& rows, int64_t row, int64_t column, Format format) {
  const bool bf16 = format == Format::bf16;
  return {rows.at(row) + column * (bf16 ? 2 : 4), rows.stride, bf16};
}

// Past the caches, which would read the lines first.
void stream_zeros(float* to, int64_t count) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0 || count % 4 != 0) {
    std::fill_n(to, count, 0.0f);
    return;
  }
  for (int64_t i = 0; i < count; i += 4) _mm_stream_ps(to + i, _mm_setzero_ps());
}

}  // namespace

void ExpertTrainer::project(const std::vector<Projection>& projections) {
  const std::vector<Segment> all = segments(projections);
  pool_.parallel_for(static_cast<int64_t>(all.size()),
                     [&](int64_t i, int worker) { project_rows(all[static_cast<size_t>(i)], room(worker)); });
}

std::vector<ExpertTrainer::Segment> ExpertTrainer::segments(const std::vector<Projection>& projections) {
  std::vector<Segment> all;
  if (groups_.empty()) return all;
  for (const Projection& p : projections) {
    for (size_t i = 0; i < p.matrices.size(); ++i) {
      p.out[i]->reserve(routed_.positions(), kernels_.row_bytes(product_, max_rank_));
    }
    for (const Group& g : groups_) {
      const int64_t m = g.row_end - g.row;
      const int64_t chunks = (m + kProjectedRows - 1) / kProjectedRows;
      for (int64_t c = 0; c < chunks; ++c) {
        all.push_back({&p, &g, g.row + m * c / chunks, g.row + m * (c + 1) / chunks});
      }
    }
  }
  return all;
}

void ExpertTrainer::project_rows(const Segment& segment, Room& room) {
  const auto& [projection, group, row, row_end] = segment;
  const Projection& p = *projection;
  const Group& g = *group;
  const TrainLora& lora = *g.lora;
  const int64_t r = lora.rank;
  const int64_t k = p.transposed ? layer_->rows_of(p.matrices[0]) : layer_->inner_of(p.matrices[0]);
  const int64_t size = packed_size(product_, r, k);
  const auto count = static_cast<int64_t>(p.matrices.size());
  uint8_t* panels = room.part(kLoraPanels, count * size);
  for (int64_t i = 0; i < count; ++i) {
    const int matrix = p.matrices[static_cast<size_t>(i)];
    if (p.transposed) {
      const float* b = lora.b[matrix] + g.expert * k * r;
      panels_.pack_transpose({reinterpret_cast<const uint8_t*>(b), r * 4, false}, r, k, product_, panels + i * size);
    } else {
      panels_.pack(lora.a[matrix] + g.expert * r * k, k, r, k, product_, panels + i * size);
    }
  }
  const int64_t width = panels_of(r) * kPanel;
  const int64_t stride = count * width;
  auto* t = reinterpret_cast<float*>(room.part(kTile, (row_end - row) * stride * 4));
  const int64_t x_stride = p.x != nullptr ? p.x->stride : kernels_.row_bytes(product_, k);
  const int64_t step = p.x != nullptr ? row_end - row : std::min(kMadeRows, row_end - row);
  for (int64_t first = row; first < row_end; first += step) {
    const int64_t rows = std::min(step, row_end - first);
    const uint8_t* x = p.x != nullptr ? p.x->at(first) : nullptr;
    if (x == nullptr) {
      uint8_t* made = room.part(kRows, step * x_stride);
      for (int64_t i = 0; i < rows; ++i) {
        pack_row(*p.rows, routed_.row(first + i), k, product_, false, made + i * x_stride);
      }
      x = made;
    }
    kernels_.dot(
        {product_, panels, count * panels_of(r), k, x, x_stride, rows, t + (first - row) * stride, stride, panels});
  }
  for (int64_t at = row; at < row_end; ++at) {
    for (int64_t i = 0; i < count; ++i, t += width) {
      for (int64_t j = 0; j < r; ++j) t[j] *= lora.scale;
      kernels_.pack_f32(product_, t, r, 0, r, p.out[i]->at(at));
      const int matrix = p.matrices[static_cast<size_t>(i)];
      if (p.transposed || matrix == kDown || kept_.gate_up == nullptr) continue;
      uint8_t* const to = kept_.t_of(matrix, at);
      if (kept_.bf16)
        kernels_.to_bf16(t, r, reinterpret_cast<uint16_t*>(to));
      else
        std::memcpy(to, t, static_cast<size_t>(r) * 4);
    }
  }
}

ExpertTrainer::Kept ExpertTrainer::kept_of(const ExpertLayer& layer, const std::vector<TrainLora>& loras,
                                           const TrainBatch& batch, const void* kept, int64_t first) const {
  if (kept == nullptr) return {};
  int64_t rank = 0;
  for (const TrainLora& lora : loras) rank = std::max(rank, lora.rank);
  const int64_t element = batch.bf16 ? 2 : 4;
  const int64_t gate_up = batch.top_k * 2 * layer.shape().intermediate * element;
  uint8_t* const all = static_cast<uint8_t*>(const_cast<void*>(kept));
  return {all + first * gate_up, all + batch.rows * gate_up + first * batch.top_k * 2 * rank * element, rank,
          batch.bf16};
}

void ExpertTrainer::restore(const Group& group) {
  const int64_t r = group.lora->rank;
  for (int64_t at = group.row; at < group.row_end; ++at) {
    for (int matrix : {kGate, kUp}) {
      const uint8_t* from = kept_.t_of(matrix, at);
      uint8_t* const to = t_[matrix].at(at);
      if (kept_.bf16)
        kernels_.pack_bf16(product_, reinterpret_cast<const uint16_t*>(from), r, 0, r, to);
      else
        kernels_.pack_f32(product_, reinterpret_cast<const float*>(from), r, 0, r, to);
    }
  }
}

std::span<const ExpertTrainer::Group> ExpertTrainer::groups_of(const Item& item) const {
  const Group* first = groups_.data() + first_group_[static_cast<size_t>(item.expert)];
  const Group* last = groups_.data() + first_group_[static_cast<size_t>(item.expert) + 1];
  while (first != last && first->row_end <= item.row) ++first;
  while (first != last && (last - 1)->row >= item.row_end) --last;
  return {first, last};
}

ExpertTrainer::Fetch::Fetch(const ExpertTrainer& trainer, const Item& item, std::initializer_list<int> matrices,
                            bool transposed, int64_t shares)
    : trainer_(trainer),
      item_(trainer.has_tail(*matrices.begin(), transposed, item) ? trainer.behind(item) : &item),
      groups_(item_ == nullptr ? std::span<const Group>() : trainer.groups_of(*item_)),
      transposed_(transposed),
      slices_(static_cast<int64_t>(matrices.size() * groups_.size())),
      shares_(shares) {
  std::copy(matrices.begin(), matrices.end(), matrices_);
}

void ExpertTrainer::Fetch::next() {
  const auto groups = static_cast<int64_t>(groups_.size());
  for (int64_t i = slices_ * done_ / shares_; i < slices_ * (done_ + 1) / shares_; ++i) {
    slice(matrices_[i / groups], groups_[static_cast<size_t>(i % groups)]);
  }
  ++done_;
}

void ExpertTrainer::Fetch::slice(int matrix, const Group& g) const {
  const auto fetch = [](const float* from, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(from + i, 0, 2);
  };
  const ExpertLayer& layer = *trainer_.layer_;
  const int64_t r = g.lora->rank;
  const int64_t columns = item_->column_end - item_->column;
  const int64_t width = layer.inner_of(matrix);
  if (transposed_) {
    for (int64_t i = 0; i < r; ++i) fetch(g.lora->a[matrix] + (item_->expert * r + i) * width + item_->column, columns);
  } else {
    fetch(g.lora->b[matrix] + (item_->expert * layer.rows_of(matrix) + item_->column) * r, columns * r);
  }
}

bool ExpertTrainer::has_tail(int matrix, bool transposed, const Item& item) const {
  const std::span<const Group> groups = groups_of(item);
  if (!kernels_.tails || product_ != Format::bf16 || groups.size() != 1) return false;
  const Group& g = groups.front();
  const int64_t rows = item.row_end - item.row;
  if (g.row > item.row || g.row_end < item.row_end) return false;
  if (rows <= kFewSumsRows && g.lora->rank <= kFewSumsRank) return false;
  return transposed ? !few(matrix, item) : layer_->shape().formats[matrix] == Format::bf16;
}

DotTail ExpertTrainer::lora_tail(int matrix, bool transposed, const Item& item, const ScratchRows& t,
                                 Room& room) const {
  if (!has_tail(matrix, transposed, item)) return {};
  const Group& g = groups_of(item).front();
  return {lora_panels(matrix, transposed, item, g, room), g.lora->rank, t.at(item.row), t.stride};
}

uint8_t* ExpertTrainer::lora_panels(int matrix, bool transposed, const Item& item, const Group& g, Room& room) const {
  const int64_t columns = item.column_end - item.column;
  const int64_t r = g.lora->rank;
  const int64_t width = layer_->inner_of(matrix);
  uint8_t* panels = room.part(kLoraPanels, packed_size(product_, columns, r));
  if (transposed) {
    const float* a = g.lora->a[matrix] + item.expert * r * width + item.column;
    panels_.pack_transpose({reinterpret_cast<const uint8_t*>(a), width * 4, false}, columns, r, product_, panels);
  } else {
    const float* b = g.lora->b[matrix] + (item.expert * layer_->rows_of(matrix) + item.column) * r;
    panels_.pack(b, r, columns, r, product_, panels);
  }
  return panels;
}

void ExpertTrainer::add_lora(int matrix, bool transposed, const Item& item, const ScratchRows& t, float* tile,
                             int64_t stride, Room& room) const {
  const int64_t columns = item.column_end - item.column;
  for (const Group& g : groups_of(item)) {
    const int64_t row = std::max<int64_t>(g.row, item.row);
    const int64_t row_end = std::min<int64_t>(g.row_end, item.row_end);
    const int64_t r = g.lora->rank;
    const int64_t width = layer_->inner_of(matrix);
    const float* const a = g.lora->a[matrix] + item.expert * r * width + item.column;
    const float* const b = g.lora->b[matrix] + (item.expert * layer_->rows_of(matrix) + item.column) * r;
    float* const out = tile + (row - item.row) * stride;
    if (row_end - row <= kFewSumsRows && r <= kFewSumsRank) {
      panels_.few_sums({transposed ? a : b, transposed ? width : r, !transposed, columns, r, view(t, row, 0, product_),
                        row_end - row, out, stride});
      continue;
    }
    const uint8_t* panels = lora_panels(matrix, transposed, item, g, room);
    kernels_.dot(
        {product_, panels, panels_of(columns), r, t.at(row), t.stride, row_end - row, out, stride, panels, true});
  }
}

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
    if (p.columns != nullptr) return view(*p.columns, row, column, product_);
    const RowView& of = p.of_a ? hidden_ : grad_out_;
    return {of.data + column * (of.bf16 ? 2 : 4), of.stride, of.bf16, routed_.rows_from(row)};
  };
  const auto& [group, kind, column, columns] = job;
  const Group& g = *group;
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
    panels_.pack_transpose(columns_of(products[kind][0], row, column), columns, count, product_, panels);
    for (int i = 0; i < kCounts[kind]; ++i) {
      const Product& p = products[kind][i];
      // What comes from d lacks the router's weight.
      panels_.transpose_rows(view(*p.rows, row, 0, product_), count, r, p.matrix == kDown ? weights : nullptr, product_,
                             transposed, row_bytes);
      kernels_.dot(
          {product_, panels, panels_of(columns), count, transposed, row_bytes, r, tiles[i], stride, panels, first > 0});
    }
  }
  for (int i = 0; i < kCounts[kind]; ++i) {
    const Product& p = products[kind][i];
    const int64_t out = layer_->rows_of(p.matrix);
    const int64_t in = layer_->inner_of(p.matrix);
    if (p.of_a && g.lora->grad_a[p.matrix] != nullptr) {
      float* to = g.lora->grad_a[p.matrix] + g.expert * r * in + column;
      for (int64_t j = 0; j < r; ++j) panels_.put(tiles[i] + j * stride, columns, to + j * in, adds);
    } else if (!p.of_a && g.lora->grad_b[p.matrix] != nullptr) {
      float* to = g.lora->grad_b[p.matrix] + (g.expert * out + column) * r;
      panels_.put_transposed(tiles[i], stride, r, columns, to, adds);
    }
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
