// What a step of the trainer does with LoRA's matrices.
#include <algorithm>
#include <cstring>

#include "training/trainer.hpp"

namespace ktserve {
namespace {

constexpr int64_t kProjectedRows = 256;
constexpr int64_t kMadeRows = 64;  // of the caller, in the form of a product

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

RowView ExpertTrainer::view(const ScratchRows& rows, int64_t position, int64_t column) const {
  const bool bf16 = product_ == Format::bf16;
  return {rows.at(position) + column * (bf16 ? 2 : 4), rows.stride, bf16};
}

RowView ExpertTrainer::caller_rows(const RowView& of, int64_t position) const {
  return {of.data, of.stride, of.bf16, routed_.rows_from(position)};
}

const float* ExpertTrainer::widened(const RowView& rows, int64_t count, int64_t n, Room& room) const {
  auto* const values = reinterpret_cast<float*>(room.part(kRows, count * n * 4));
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t* from = rows.row(i);
    if (rows.bf16)
      kernels_.from_bf16(reinterpret_cast<const uint16_t*>(from), n, values + i * n);
    else
      std::memcpy(values + i * n, from, static_cast<size_t>(n) * 4);
  }
  return values;
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
  const int64_t width = panels_of(r) * kPanel;
  const int64_t stride = count * width;
  auto* t = reinterpret_cast<float*>(room.part(kTile, (row_end - row) * stride * 4));
  if (row_end - row <= kFewDotsRows) {
    const float* x = widened(p.x != nullptr ? view(*p.x, row, 0) : caller_rows(*p.rows, row), row_end - row, k, room);
    for (int64_t i = 0; i < count; ++i) {
      const int matrix = p.matrices[static_cast<size_t>(i)];
      const float* m = (p.transposed ? lora.b : lora.a)[matrix] + g.expert * r * k;
      panels_.few_dots({m, p.transposed ? r : k, p.transposed, k, r, x, row_end - row, t + i * width, stride});
    }
    put_projected(segment, t, width);
    return;
  }
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
  put_projected(segment, t, width);
}

void ExpertTrainer::put_projected(const Segment& segment, float* t, int64_t width) {
  const auto& [projection, group, row, row_end] = segment;
  const Projection& p = *projection;
  const TrainLora& lora = *group->lora;
  const int64_t r = lora.rank;
  for (int64_t at = row; at < row_end; ++at) {
    for (size_t i = 0; i < p.matrices.size(); ++i, t += width) {
      for (int64_t j = 0; j < r; ++j) t[j] *= lora.scale;
      kernels_.pack_f32(product_, t, r, 0, r, p.out[i]->at(at));
      const int matrix = p.matrices[i];
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
      panels_.few_sums({transposed ? a : b, transposed ? width : r, !transposed, columns, r, view(t, row, 0),
                        row_end - row, out, stride});
      continue;
    }
    const uint8_t* panels = lora_panels(matrix, transposed, item, g, room);
    kernels_.dot(
        {product_, panels, panels_of(columns), r, t.at(row), t.stride, row_end - row, out, stride, panels, true});
  }
}

}  // namespace ktserve
