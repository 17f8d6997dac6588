#include "training/trainer.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "experts/moe.hpp"

namespace ktserve {
namespace {

constexpr int64_t kChunkRows = 4096;  // computed at a time, which bounds the scratch memory
constexpr int64_t kItemRows = 256;
constexpr int64_t kGatheredRows = 4;
constexpr int64_t kSliceBytes = 64 << 20;  // of y

std::string range_error(const char* what, int64_t value, int64_t low, int64_t high) {
  return std::string(what) + ": " + std::to_string(value) + "; allowed are " + std::to_string(low) + " to " +
         std::to_string(high);
}

}  // namespace

uint8_t* ExpertTrainer::Room::part(int index, int64_t bytes) {
  Arena& arena = parts[index];
  if (arena.bytes() < static_cast<size_t>(bytes)) arena = Arena(static_cast<size_t>(bytes));
  return arena.data();
}

ExpertTrainer::ExpertTrainer(WorkerPool& pool, Isa isa)
    : pool_(pool), kernels_(kernels(isa)), panels_(panel_kernels(isa)), rooms_(static_cast<size_t>(pool.threads())) {}

void ExpertTrainer::check(const ExpertLayer& layer, const std::vector<TrainLora>& loras,
                          const TrainBatch& batch) const {
  for (int64_t i = 0; i < batch.rows * batch.top_k; ++i) {
    if (batch.ids[i] < -1 || batch.ids[i] >= layer.shape().experts) {
      throw std::invalid_argument(range_error("ids", batch.ids[i], -1, layer.shape().experts - 1));
    }
  }
  for (int64_t r = 0; r < batch.rows; ++r) {
    const auto here = [&](const TrainLora& lora) { return lora.slot == batch.slots[r]; };
    if (batch.slots[r] != 0 && std::none_of(loras.begin(), loras.end(), here)) {
      throw std::invalid_argument("slots: " + std::to_string(batch.slots[r]) + " has no LoRA");
    }
  }
}

void ExpertTrainer::by_chunks(const ExpertLayer& layer, const std::vector<TrainLora>& loras, const TrainBatch& batch,
                              const std::function<void(const TrainBatch&, int64_t)>& call) {
  const std::lock_guard lock(running_);
  check(layer, loras, batch);
  pool_.begin_step();
  try {
    const int64_t chunks = std::max<int64_t>(1, (batch.rows + kChunkRows - 1) / kChunkRows);
    for (int64_t c = 0; c < chunks; ++c) {
      const int64_t first = batch.rows * c / chunks;
      TrainBatch part = batch;
      part.rows = batch.rows * (c + 1) / chunks - first;
      part.ids += first * batch.top_k;
      part.weights += first * batch.top_k;
      part.slots += first;
      part.hidden = static_cast<const uint8_t*>(batch.hidden) + first * layer.shape().hidden * (batch.bf16 ? 2 : 4);
      begin(layer, loras, part);
      call(part, first);
    }
  } catch (...) {
    pool_.end_step();
    throw;
  }
  pool_.end_step();
}

void ExpertTrainer::begin(const ExpertLayer& layer, const std::vector<TrainLora>& loras, const TrainBatch& batch) {
  const LayerShape& s = layer.shape();
  layer_ = &layer;
  product_ = s.lora_format();
  routed_.assign({batch.ids, batch.weights, batch.slots, batch.rows, batch.top_k, s.experts});
  groups_.clear();
  max_rank_ = 0;
  for (const RoutedGroup& group : routed_.groups()) {
    for (const TrainLora& lora : loras) {
      if (lora.slot != group.slot || group.slot == 0) continue;
      groups_.push_back({&lora, group.expert, group.first, group.last});
      max_rank_ = std::max(max_rank_, lora.rank);
    }
  }
  first_group_.assign(static_cast<size_t>(s.experts) + 1, 0);
  for (const Group& group : groups_) ++first_group_[static_cast<size_t>(group.expert) + 1];
  for (size_t e = 0; e < static_cast<size_t>(s.experts); ++e) first_group_[e + 1] += first_group_[e];

  int64_t least = 0;
  for (Format format : s.formats) least = std::max(least, kernels_.dequantised_from(format));
  dequantised_.assign(static_cast<size_t>(s.experts), 0);
  for (int64_t e = 0; e < s.experts && least > 0; ++e) {
    dequantised_[static_cast<size_t>(e)] = routed_.count(e) >= least ? 1 : 0;
  }
}

void ExpertTrainer::cut(int projection, int64_t first, int64_t last) {
  items_.clear();
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (int64_t column = first; column < last;) {
    int64_t end = std::min(last, column + kItemColumns);
    for (int shard = 1; projection >= 0 && shard < layer_->shape().shards; ++shard) {
      const int64_t begins = layer_->first_panel(projection, shard) * kPanel;
      if (begins > column) end = std::min(end, begins);
    }
    ranges.emplace_back(column, end);
    column = end;
  }
  ranges_ = static_cast<int64_t>(ranges.size());
  for (int64_t e = 0; e < layer_->shape().experts; ++e) {
    const int64_t m = routed_.count(e);
    const int64_t chunks = (m + kItemRows - 1) / kItemRows;
    for (int64_t c = 0; c < chunks; ++c) {
      for (size_t i = 0; i < ranges.size(); ++i) {
        items_.push_back({static_cast<int32_t>(e), static_cast<int32_t>(routed_.first(e) + m * c / chunks),
                          static_cast<int32_t>(routed_.first(e) + m * (c + 1) / chunks),
                          static_cast<int32_t>(ranges[i].first), static_cast<int32_t>(ranges[i].second),
                          static_cast<int32_t>(i)});
      }
    }
  }
}

void ExpertTrainer::each_item(const std::function<void(const Item&, Room&)>& body, int64_t jobs,
                              const std::function<void(int64_t, Room&)>& job) {
  const int64_t all = static_cast<int64_t>(items_.size()) + jobs;
  pool_.parallel_for(all, [&](int64_t i, int worker) {
    const int64_t before = i * jobs / all;  // jobs
    if ((i + 1) * jobs / all > before)
      job(before, room(worker));
    else
      body(items_[static_cast<size_t>(i - before)], room(worker));
  });
}

// Rows of the caller, by position, in a format; by_expert: in the dequantised form where an expert's products are. Each
// form of a row is made once, then copied.
void ExpertTrainer::gather(const TrainBatch& b, const void* rows, int64_t n, Format format, bool by_expert,
                           bool lora_only, ScratchRows& to) {
  const bool any = by_expert && std::find(dequantised_.begin(), dequantised_.end(), 1) != dequantised_.end();
  to.reserve(routed_.positions(),
             std::max(kernels_.row_bytes(format, n), kernels_.row_bytes_for(format, any && !plain(format), n)));
  const auto one = [&](int64_t row) {
    const uint8_t* done[2] = {};
    const int64_t* id = b.ids + row * b.top_k;
    for (int32_t at : routed_.positions_of(row)) {
      const int64_t expert = *id++;
      if (at < 0) continue;
      const bool form = by_expert && dequantised(expert, format);
      const uint8_t*& made = done[form ? 1 : 0];
      if (made != nullptr) {
        std::memcpy(to.at(at), made, static_cast<size_t>(kernels_.row_bytes_for(format, form, n)));
        continue;
      }
      made = to.at(at);
      if (b.bf16) {
        kernels_.pack(format, form, static_cast<const uint16_t*>(rows) + row * n, n, 0, n, to.at(at));
      } else {
        kernels_.pack(format, form, static_cast<const float*>(rows) + row * n, n, 0, n, to.at(at));
      }
    }
  };
  pool_.parallel_for((b.rows + kGatheredRows - 1) / kGatheredRows, [&](int64_t i, int) {
    for (int64_t row = i * kGatheredRows; row < std::min(b.rows, (i + 1) * kGatheredRows); ++row) {
      if (!lora_only || b.slots[row] != 0) one(row);
    }
  });
}

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

void ExpertTrainer::base_product(int projection, const Item& item, const ScratchRows& x, float* out, int64_t stride,
                                 const uint8_t* next, Fetch& fetch) const {
  const Format format = layer_->shape().formats[projection];
  const bool form = dequantised(item.expert, format);
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
                       panel + step < last ? nullptr : next};
    form ? kernels_.dot_dequantised(args) : kernels_.dot(args);
  }
}

void ExpertTrainer::combine(const TrainBatch& b, bool weighted, int64_t first, int64_t last, void* out) {
  const std::vector<float> ones(static_cast<size_t>(b.top_k), 1.0f);
  pool_.parallel_for(b.rows, [&](int64_t row, int worker) {
    const float* sources[kMostTopK];
    const float** next = sources;
    for (int32_t at : routed_.positions_of(row)) *next++ = at < 0 ? nullptr : y_.floats(at);
    const float* weights = weighted ? b.weights + row * b.top_k : ones.data();
    const int64_t to = row * layer_->shape().hidden + first;
    if (!b.bf16) {
      kernels_.combine(sources, weights, b.top_k, last - first, static_cast<float*>(out) + to);
      return;
    }
    auto* sums = reinterpret_cast<float*>(room(worker).part(kTile, (last - first) * 4));
    kernels_.combine(sources, weights, b.top_k, last - first, sums);
    kernels_.to_bf16(sums, last - first, static_cast<uint16_t*>(out) + to);
  });
}

int64_t ExpertTrainer::slice_columns() const {
  const int64_t hidden = layer_->shape().hidden;
  const int64_t slices = std::max<int64_t>(1, (routed_.positions() * hidden * 4 + kSliceBytes - 1) / kSliceBytes);
  return std::max(kItemColumns, round_up((hidden + slices - 1) / slices, kItemColumns));
}

void ExpertTrainer::forward(const ExpertLayer& layer, const std::vector<TrainLora>& loras, const TrainBatch& batch,
                            void* out, void* kept) {
  by_chunks(layer, loras, batch, [&](const TrainBatch& part, int64_t first) {
    const int64_t element = batch.bf16 ? 2 : 4;
    const LayerShape& s = layer.shape();
    uint8_t* here = static_cast<uint8_t*>(kept);
    if (here != nullptr) here += first * batch.top_k * 2 * s.intermediate * element;
    gate_up(part, here);
    down(part, static_cast<uint8_t*>(out) + first * s.hidden * element);
  });
}

void ExpertTrainer::gate_up(const TrainBatch& b, void* kept) {
  const LayerShape& s = layer_->shape();
  gather(b, b.hidden, s.hidden, s.formats[kGate], true, false, x_[0]);
  if (s.formats[kUp] != s.formats[kGate]) gather(b, b.hidden, s.hidden, s.formats[kUp], true, false, x_[1]);
  if (!groups_.empty()) {
    const bool own = s.formats[kGate] == product_;
    if (!own) gather(b, b.hidden, s.hidden, product_, false, true, x_lora_);
    const ScratchRows* x = own ? &x_[0] : &x_lora_;
    project({{{kGate, kUp}, false, x, {&t_[kGate], &t_[kUp]}}});
  }
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
  base_product(kGate, item, x_[0], gate, stride, ups, fetch);
  base_product(kUp, item, x_[s.formats[kUp] != s.formats[kGate] ? 1 : 0], up, stride, nullptr, fetch);
  add_lora(kGate, false, item, t_[kGate], gate, stride, room);
  add_lora(kUp, false, item, t_[kUp], up, stride, room);
  const Format format = s.formats[kDown];
  const bool form = dequantised(item.expert, format);
  const bool both = !groups_.empty() && format != product_;
  for (int64_t row = 0; row < rows; ++row, gate += stride, up += stride) {
    const int64_t at = item.row + row;
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
    kernels_.silu_mul(gate, up, width);
    kernels_.pack(format, form, gate, s.intermediate, item.column, item.column_end, h_.at(at));
    if (both) kernels_.pack_f32(product_, gate, s.intermediate, item.column, item.column_end, h_lora_.at(at));
  }
}

void ExpertTrainer::down(const TrainBatch& b, void* out) {
  const LayerShape& s = layer_->shape();
  if (!groups_.empty()) project({{{kDown}, false, s.formats[kDown] == product_ ? &h_ : &h_lora_, {&t_[kDown]}}});
  const int64_t columns = slice_columns();
  y_.reserve(routed_.positions(), odd_lines(columns * 4));
  for (int64_t first = 0; first < s.hidden; first += columns) {
    const int64_t last = std::min(s.hidden, first + columns);
    cut(kDown, first, last);
    each_item([&](const Item& item, Room& room) {
      float* y = y_.floats(item.row) + item.column - first;
      Fetch fetch(*this, item, {kDown}, false, base_shares(kDown, item));
      base_product(kDown, item, h_, y, y_.stride_floats(), nullptr, fetch);
      add_lora(kDown, false, item, t_[kDown], y, y_.stride_floats(), room);
    });
    combine(b, true, first, last, out);
  }
}

}  // namespace ktserve
