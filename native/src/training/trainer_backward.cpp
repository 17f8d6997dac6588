#include <algorithm>
#include <cstring>

#include "training/trainer.hpp"

namespace ktserve {
namespace {

constexpr int64_t kPair = 2 * kPanel;
constexpr int64_t kSummedRows = 64;

// Of W^T that are made at a time, if that is more than a pair of panels: what leaves room for rows in the second-level
// cache. On AVX2 a pair was 1.1 times faster than 256 KB.
int64_t turned_bytes(Isa isa) {
  return isa == Isa::avx2 ? 0 : 256 << 10;
}

}  // namespace

void ExpertTrainer::backward(const ExpertLayer& layer, const std::vector<TrainLora>& loras, const TrainBatch& batch,
                             const void* kept, const void* grad_out, void* grad_hidden, float* grad_weights) {
  by_chunks(layer, loras, batch, [&](const TrainBatch& part, int64_t first) {
    const LayerShape& s = layer.shape();
    const int64_t element = batch.bf16 ? 2 : 4;
    kept_ = kept_of(layer, loras, batch, kept, first);
    const uint8_t* here = kept_.gate_up;
    if (here == nullptr) {
      const auto bytes = static_cast<size_t>(part.rows * batch.top_k * 2 * s.intermediate * element);
      if (again_.bytes() < bytes) again_ = Arena(bytes);
      gate_up(part, again_.data());
      here = again_.data();
    }
    grad_out_ = {static_cast<const uint8_t*>(grad_out) + first * s.hidden * element, s.hidden * element, batch.bf16};
    gather(part, grad_out_, s.hidden, product_, false, d_, {{{kDown}, true, nullptr, &grad_out_, {&u_[kDown]}}});
    hidden_gradient(part, here);
    weight_gradient(part, grad_weights + first * batch.top_k);
    project({{{kDown}, false, &h_lora_, nullptr, {&t_[kDown]}},
             {{kGate}, true, &d_gate_, nullptr, {&u_[kGate]}},
             {{kUp}, true, &d_up_, nullptr, {&u_[kUp]}}});
    if (first == 0) clear_gradients(loras);
    uint8_t* to = static_cast<uint8_t*>(grad_hidden);
    input_gradient(part, to == nullptr ? nullptr : to + first * s.hidden * element, first > 0);
  });
}

void ExpertTrainer::transposed_product(int projection, const Item& item, const ScratchRows& d, const ScratchRows& u,
                                       float* out, int64_t stride, bool adds, int next, const Item* next_item,
                                       Fetch& fetch, Room& room) const {
  const LayerShape& s = layer_->shape();
  NextColumns last{nullptr, 0, 0};
  if (next_item != nullptr && s.formats[next] == s.formats[projection]) {
    last = {layer_->panel(next, next_item->expert, 0), layer_->inner_of(next), next_item->column};
  }
  const int64_t n = layer_->rows_of(projection);
  const int64_t k = layer_->inner_of(projection);
  const int64_t rows = item.row_end - item.row;
  const auto each_shard = [&](const auto& call) {
    for (int shard = 0; shard < s.shards; ++shard) {
      const int64_t first = layer_->first_panel(projection, shard);
      const int64_t count = layer_->first_panel(projection, shard + 1) - first;
      const bool ends = first + count == layer_->first_panel(projection, s.shards);
      if (count > 0) call(layer_->panel(projection, item.expert, first), first, count, ends);
    }
  };
  if (few(projection, item)) {
    for (int64_t i = item.column; i < item.column_end; i += kPair) fetch.next();
    each_shard([&](const uint8_t* w, int64_t first, int64_t count, bool ends) {
      panels_.few_rows({s.formats[projection], w, count, k, item.column, item.column_end - item.column,
                        d.at(item.row) + first * kPanel * 2, d.stride, rows, out, stride, adds || first > 0,
                        room.part(kPanels, count * kFewRowsRoom), ends ? last : NextColumns{}});
    });
    add_lora(projection, true, item, u, out, stride, room);
    return;
  }
  DotTail tail = lora_tail(projection, true, item, u, room);
  const int64_t size = panel_size(product_, n);
  const int64_t most = std::clamp(turned_bytes(isa()) / (2 * size) * kPair, kPair, kItemColumns);
  uint8_t* panels = room.part(kPanels, most / kPanel * size);
  for (int64_t column = item.column; column < item.column_end; column += most) {
    const int64_t columns = std::min(most, item.column_end - column);
    const bool more = column + columns < item.column_end;
    const NextColumns then = more ? NextColumns{layer_->panel(projection, item.expert, 0), k, column + columns} : last;
    each_shard([&](const uint8_t* w, int64_t first, int64_t count, bool ends) {
      panels_.transpose(s.formats[projection], w, count, k, column, columns, product_,
                        panels + first * kPanel * (product_ == Format::f32 ? 64 : 32), size,
                        ends ? then : NextColumns{});
    });
    for (int64_t i = 0; i < columns; i += kPair) {
      fetch.next();
      const uint8_t* pair = panels + i / kPanel * size;
      kernels_.dot({product_, pair, 2, n, d.at(item.row), d.stride, rows, out + column + i - item.column, stride, pair,
                    adds, tail});
      if (tail.w != nullptr) tail.w += 2 * panel_size(product_, tail.k);
    }
  }
  if (tail.w == nullptr) add_lora(projection, true, item, u, out, stride, room);
}

void ExpertTrainer::hidden_gradient(const TrainBatch& b, const void* kept) {
  const LayerShape& s = layer_->shape();
  const int64_t bytes = kernels_.row_bytes(product_, s.intermediate);
  d_gate_.reserve(routed_.positions(), bytes);
  d_up_.reserve(routed_.positions(), bytes);
  if (!groups_.empty()) h_lora_.reserve(routed_.positions(), bytes);
  cut(-1, 0, s.intermediate);
  weight_parts_.resize(static_cast<size_t>(routed_.positions() * ranges_));
  if (kept_.gate_up != nullptr && !groups_.empty()) {
    for (int i : {kGate, kUp}) t_[i].reserve(routed_.positions(), kernels_.row_bytes(product_, max_rank_));
  }
  each_item([&](const Item& item, Room& room) { hidden_gradient_item(item, b, kept, room); },
            kept_.gate_up == nullptr ? 0 : static_cast<int64_t>(groups_.size()),
            [&](int64_t i, Room&) { restore(groups_[static_cast<size_t>(i)]); });
}

void ExpertTrainer::hidden_gradient_item(const Item& item, const TrainBatch& b, const void* kept, Room& room) {
  const LayerShape& s = layer_->shape();
  const int64_t rows = item.row_end - item.row;
  const int64_t width = item.column_end - item.column;
  const int64_t stride = odd_lines(width * 4) / 4;
  const int64_t element = product_ == Format::f32 ? 4 : 2;
  auto* dh = reinterpret_cast<float*>(room.part(kTile, rows * stride * 4));
  Fetch fetch(*this, item, {kDown}, true, width / kPair);
  transposed_product(kDown, item, d_, u_[kDown], dh, stride, false, kDown, behind(item), fetch, room);
  const auto pre = [&](int64_t at, int i) -> const void* {
    return static_cast<const uint8_t*>(kept) + ((at * 2 + i) * s.intermediate + item.column) * (b.bf16 ? 2 : 4);
  };
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = item.row + row;
    for (int i = 0; i < 2 && row + kRowsAhead < rows; ++i) {
      fetch_lines(static_cast<const uint8_t*>(pre(at + kRowsAhead, i)), width * (b.bf16 ? 2 : 4));
    }
    const int64_t offset = item.column * element;
    weight_parts_[static_cast<size_t>(at * ranges_ + item.range)] =
        panels_.gated_backward({pre(at, 0), pre(at, 1), b.bf16, dh + row * stride, routed_.weight(at), width, product_,
                                d_gate_.at(at) + offset, d_up_.at(at) + offset,
                                groups_.empty() ? nullptr : h_lora_.at(at) + offset, s.activation});
  }
}

void ExpertTrainer::input_gradient(const TrainBatch& b, void* grad_hidden, bool adds) {
  const LayerShape& s = layer_->shape();
  const std::vector<GradientJob> jobs = gradient_jobs();
  const auto all = static_cast<int64_t>(jobs.size());
  const auto gradient = [&](int64_t i, Room& room) { lora_gradient(jobs[static_cast<size_t>(i)], adds, room); };
  if (grad_hidden == nullptr) {
    pool_.parallel_for(all, [&](int64_t i, int worker) { gradient(i, room(worker)); });
    return;
  }
  const int64_t columns = slice_columns();
  y_.reserve(routed_.positions(), odd_lines(columns * 4));
  for (int64_t first = 0; first < s.hidden; first += columns) {
    const int64_t last = std::min(s.hidden, first + columns);
    cut(-1, first, last);
    const int64_t done = all * first / s.hidden;  // jobs, in slices of them
    each_item(
        [&](const Item& item, Room& room) {
          float* dx = y_.floats(item.row) + item.column - first;
          const int64_t stride = y_.stride_floats();
          Fetch fetch(*this, item, {kGate, kUp}, true, 2 * (item.column_end - item.column) / kPair);
          transposed_product(kGate, item, d_gate_, u_[kGate], dx, stride, false, kUp, &item, fetch, room);
          transposed_product(kUp, item, d_up_, u_[kUp], dx, stride, true, kGate, behind(item), fetch, room);
        },
        all * last / s.hidden - done, [&](int64_t i, Room& room) { gradient(done + i, room); });
    combine(b, false, first, last, grad_hidden);
  }
}

float ExpertTrainer::bias_product(int64_t expert, const RowView& d, Room& room) const {
  const float* x = widened(d, 1, layer_->shape().hidden, room);
  float sum = 0;
  for (int shard = 0; shard < layer_->shape().shards; ++shard) {
    const int64_t first = layer_->first_panel(kDown, shard);
    const int64_t k = (layer_->first_panel(kDown, shard + 1) - first) * kPanel;
    if (k == 0) continue;
    float part = 0;
    panels_.few_dots({layer_->bias(kDown, expert, first), k, false, k, 1, x + first * kPanel, 1, &part, 1});
    sum += part;
  }
  return sum;
}

void ExpertTrainer::weight_gradient(const TrainBatch& b, float* grad_weights) {
  const auto ranges = static_cast<int64_t>(weight_parts_.size()) / std::max<int64_t>(1, routed_.positions());
  const bool biased = layer_->shape().biased;
  pool_.parallel_for((b.rows + kSummedRows - 1) / kSummedRows, [&](int64_t item, int worker) {
    for (int64_t row = item * kSummedRows; row < std::min(b.rows, (item + 1) * kSummedRows); ++row) {
      const RowView d{grad_out_.row(row), grad_out_.stride, grad_out_.bf16};
      const int64_t* expert = b.ids + row * b.top_k;
      float* to = grad_weights + row * b.top_k;
      for (int32_t at : routed_.positions_of(row)) {
        float sum = 0;
        for (int64_t i = 0; at >= 0 && i < ranges; ++i) sum += weight_parts_[static_cast<size_t>(at * ranges + i)];
        if (at >= 0 && biased) sum += bias_product(*expert, d, room(worker));
        ++expert;
        *to++ = sum;
      }
    }
  });
}

}  // namespace ktserve
