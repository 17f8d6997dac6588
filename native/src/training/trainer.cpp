#include "training/trainer.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "experts/moe.hpp"

namespace ktserve {
namespace {

constexpr int64_t kChunkRows = 4096;  // computed at a time, which bounds the scratch memory
constexpr int64_t kItemRows = 320;    // what the second-level cache of an AMX machine holds beside panels
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
  hidden_ = {static_cast<const uint8_t*>(batch.hidden), s.hidden * (batch.bf16 ? 2 : 4), batch.bf16};
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

void ExpertTrainer::side_by_side(int64_t count, const Job& body, int64_t jobs, const Job& job) {
  const int64_t all = count + jobs;
  pool_.parallel_for(all, [&](int64_t i, int worker) {
    const int64_t before = i * jobs / all;  // jobs
    if ((i + 1) * jobs / all > before)
      job(before, room(worker));
    else
      body(i - before, room(worker));
  });
}

void ExpertTrainer::each_item(const std::function<void(const Item&, Room&)>& body, int64_t jobs, const Job& job) {
  side_by_side(
      static_cast<int64_t>(items_.size()), [&](int64_t i, Room& room) { body(items_[static_cast<size_t>(i)], room); },
      jobs, job);
}

void ExpertTrainer::pack_row(const RowView& rows, int64_t row, int64_t n, Format format, bool dequantised,
                             uint8_t* to) const {
  const uint8_t* from = rows.row(row);
  if (rows.bf16) {
    kernels_.pack(format, dequantised, reinterpret_cast<const uint16_t*>(from), n, 0, n, to);
  } else {
    kernels_.pack(format, dequantised, reinterpret_cast<const float*>(from), n, 0, n, to);
  }
}

// Rows of the caller, by position, in a format; by_expert: in the dequantised form where an expert's products are. Each
// form of a row is made once, then copied.
void ExpertTrainer::gather(const TrainBatch& b, const RowView& rows, int64_t n, Format format, bool by_expert,
                           ScratchRows& to, const std::vector<Projection>& projections) {
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
      pack_row(rows, row, n, format, form, to.at(at));
    }
  };
  const std::vector<Segment> beside = segments(projections);
  side_by_side((b.rows + kGatheredRows - 1) / kGatheredRows,
               [&](int64_t i, Room&) {
                 for (int64_t row = i * kGatheredRows; row < std::min(b.rows, (i + 1) * kGatheredRows); ++row) one(row);
               },
               static_cast<int64_t>(beside.size()),
               [&](int64_t i, Room& room) { project_rows(beside[static_cast<size_t>(i)], room); });
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

}  // namespace ktserve
