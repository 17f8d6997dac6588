#include <algorithm>
#include <cstring>

#include "training/trainer.hpp"

namespace ktserve {

// Panels at a time: all if nothing is fetched beside them, or if weights are dequantised, which begins slowly; four of
// quantised weights for one row are read side by side.
int64_t ExpertTrainer::base_step(int projection, const Item& item) const {
  const Format format = layer_->shape().formats[projection];
  const int64_t all = (item.column_end - item.column) / kPanel;
  if (groups_of(item).empty() || dequantised(item.expert, format)) return all;
  return item.row_end - item.row == 1 ? 4 : 2;
}

int64_t ExpertTrainer::base_shares(int projection, const Item& item) const {
  const int64_t step = base_step(projection, item);
  return ((item.column_end - item.column) / kPanel + step - 1) / step;
}

void ExpertTrainer::add_bias(int projection, const Item& item, float* tile, int64_t stride) const {
  const float* bias = layer_->bias(projection, item.expert, item.column / kPanel);
  if (bias == nullptr) return;
  constexpr float one = 1;  // as a B of rank 1 is added
  for (int64_t row = 0; row < item.row_end - item.row; ++row) {
    kernels_.lora_b_f32(bias, (item.column_end - item.column) / kPanel, 1, &one, tile + row * stride);
  }
}

void ExpertTrainer::base_product(int projection, const Item& item, const ScratchRows& x, const ScratchRows& t,
                                 float* out, int64_t stride, const uint8_t* next, Fetch& fetch, Room& room) const {
  const Format format = layer_->shape().formats[projection];
  const bool form = dequantised(item.expert, format);
  float* const first = out;
  DotTail tail = lora_tail(projection, false, item, t, room);
  const int64_t step = base_step(projection, item);
  const int64_t last = item.column_end / kPanel;
  for (int64_t panel = item.column / kPanel; panel < last; panel += step, out += step * kPanel) {
    fetch.next();
    const DotArgs args{format,
                       layer_->panel(projection, item.expert, panel),
                       std::min(step, last - panel),
                       layer_->inner_of(projection),
                       x.at(item.row),
                       x.stride,
                       item.row_end - item.row,
                       out,
                       stride,
                       panel + step < last ? nullptr : next,
                       false,
                       tail};
    form ? kernels_.dot_dequantised(args) : kernels_.dot(args);
    if (tail.w != nullptr) tail.w += step * panel_size(product_, tail.k);
  }
  add_bias(projection, item, first, stride);
  if (tail.w == nullptr) add_lora(projection, false, item, t, first, stride, room);
}

void ExpertTrainer::forward(const ExpertLayer& layer, const std::vector<TrainLora>& loras, const TrainBatch& batch,
                            void* out, void* kept) {
  by_chunks(layer, loras, batch, [&](const TrainBatch& part, int64_t first) {
    kept_ = kept_of(layer, loras, batch, kept, first);
    gate_up(part, kept_.gate_up);
    down(part, static_cast<uint8_t*>(out) + first * layer.shape().hidden * (batch.bf16 ? 2 : 4));
  });
}

void ExpertTrainer::gate_up(const TrainBatch& b, void* kept) {
  const LayerShape& s = layer_->shape();
  gather(b, hidden_, s.hidden, s.formats[kGate], true, x_[0],
         {{{kGate, kUp}, false, nullptr, &hidden_, {&t_[kGate], &t_[kUp]}}});
  if (s.formats[kUp] != s.formats[kGate]) gather(b, hidden_, s.hidden, s.formats[kUp], true, x_[1], {});
  const bool any = std::find(dequantised_.begin(), dequantised_.end(), 1) != dequantised_.end();
  const Format format = s.formats[kDown];
  h_.reserve(routed_.positions(), std::max(kernels_.row_bytes(format, s.intermediate),
                                           kernels_.row_bytes_for(format, any && !plain(format), s.intermediate)));
  if (!groups_.empty()) h_lora_.reserve(routed_.positions(), kernels_.row_bytes(product_, s.intermediate));
  cut(kGate, 0, s.intermediate);
  each_item([&](const Item& item, Room& room) { gate_up_item(item, kept, b.bf16, room); });
}

void ExpertTrainer::gate_up_item(const Item& item, void* kept, bool kept_bf16, Room& room) {
  const LayerShape& s = layer_->shape();
  const int64_t rows = item.row_end - item.row;
  const int64_t width = item.column_end - item.column;
  const int64_t stride = odd_lines(width * 4) / 4;
  auto* gate = reinterpret_cast<float*>(room.part(kTile, rows * stride * 4));
  auto* up = reinterpret_cast<float*>(room.part(kSecondTile, rows * stride * 4));
  Fetch fetch(*this, item, {kGate, kUp}, false, base_shares(kGate, item) + base_shares(kUp, item));
  const uint8_t* ups = layer_->panel(kUp, item.expert, item.column / kPanel);
  base_product(kGate, item, x_[0], t_[kGate], gate, stride, ups, fetch, room);
  base_product(kUp, item, x_[s.formats[kUp] != s.formats[kGate] ? 1 : 0], t_[kUp], up, stride, next_panels(kGate, item),
               fetch, room);
  const Format format = s.formats[kDown];
  const bool form = dequantised(item.expert, format);
  const bool both = !groups_.empty() && format != product_;
  const int64_t element = kept_bf16 ? 2 : 4;
  for (int64_t row = 0; row < rows; ++row, gate += stride, up += stride) {
    const int64_t at = item.row + row;
    for (int i = 0; i < 2 && kept != nullptr && row + kRowsAhead < rows; ++i) {
      const int64_t to = ((at + kRowsAhead) * 2 + i) * s.intermediate + item.column;
      fetch_lines(static_cast<const uint8_t*>(kept) + to * element, width * element);
    }
    if (kept != nullptr) {
      for (int i = 0; i < 2; ++i) {
        const float* values = i == 0 ? gate : up;
        const int64_t to = (at * 2 + i) * s.intermediate + item.column;
        if (kept_bf16)
          kernels_.to_bf16(values, width, static_cast<uint16_t*>(kept) + to);
        else
          std::memcpy(static_cast<float*>(kept) + to, values, static_cast<size_t>(width) * 4);
      }
    }
    kernels_.activate(s.activation, gate, up, width);
    kernels_.pack(format, form, gate, s.intermediate, item.column, item.column_end, h_.at(at));
    if (both) kernels_.pack_f32(product_, gate, s.intermediate, item.column, item.column_end, h_lora_.at(at));
  }
}

void ExpertTrainer::down(const TrainBatch& b, void* out) {
  const LayerShape& s = layer_->shape();
  project({{{kDown}, false, s.formats[kDown] == product_ ? &h_ : &h_lora_, nullptr, {&t_[kDown]}}});
  const int64_t columns = slice_columns();
  y_.reserve(routed_.positions(), odd_lines(columns * 4));
  for (int64_t first = 0; first < s.hidden; first += columns) {
    const int64_t last = std::min(s.hidden, first + columns);
    cut(kDown, first, last);
    each_item([&](const Item& item, Room& room) {
      float* y = y_.floats(item.row) + item.column - first;
      Fetch fetch(*this, item, {kDown}, false, base_shares(kDown, item));
      base_product(kDown, item, h_, t_[kDown], y, y_.stride_floats(), next_panels(kDown, item), fetch, room);
    });
    combine(b, true, first, last, out);
  }
}

}  // namespace ktserve
