// A batch on its way through a layer's experts: which rows meet which weights and adapters, in which form, cut into
// which work items, in which memory. The memory is kept from batch to batch and grows with the largest.
#pragma once

#include <cstdint>
#include <vector>

#include "experts/layer.hpp"
#include "experts/routed_batch.hpp"
#include "gemm/kernels.hpp"
#include "runtime/arena.hpp"
#include "runtime/pool.hpp"

namespace ktserve {

constexpr int64_t kMostItemRows = 320;
constexpr int64_t kTilePanels = 32;      // whose gate and up are computed before h is made from them, for 128 rows
constexpr int64_t kFullPanelRows = 128;  // fewer panels for more rows
constexpr int64_t kTileFloats = 2 * (kFullPanelRows * kTilePanels + kMostItemRows) * kPanel;  // of a worker

// A range of an expert's panels for a range of its rows.
struct WorkItem {
  int32_t expert;
  int32_t row, row_end;  // positions
  int32_t panel, panel_end;
  const uint8_t* next = nullptr;  // weights of the next work item, fetched while this one's end is computed
};

// At most 64 rows of one expert with one adapter: positions [row, row_end).
struct LoraSegment {
  const LayerLora* lora;
  int32_t expert;
  int32_t row, row_end;
};

// Scratch rows by position, `stride` bytes apart.
struct ScratchRows {
  Arena memory;
  int64_t stride = 0;

  void reserve(int64_t rows, int64_t row_bytes);
  uint8_t* at(int64_t row) const { return memory.data() + row * stride; }
  float* floats(int64_t row) const { return reinterpret_cast<float*>(at(row)); }
  int64_t stride_floats() const { return stride / 4; }
};

class MoeBatch {
 public:
  MoeBatch(const WorkerPool& pool, const Kernels& kernels, bool deterministic)
      : pool_(pool), kernels_(kernels), deterministic_(deterministic) {}

  // The most scratch memory that a batch of `rows` rows takes with a pool of `threads`, in bytes. rank: the largest of
  // their adapters, 0: none.
  static int64_t scratch_bytes(const Kernels& kernels, bool deterministic, int threads, const LayerShape& shape,
                               int64_t rows, int64_t top_k, int64_t rank);

  // Begins with another batch; the work items are still to be cut. The layer must outlive what is done with it.
  void begin(const ExpertLayer& layer, const Routing& routing);
  // The work items of gate and up (kGate) or of a slice of down, by shard: the pool's group g begins with those of
  // shard g.
  void cut(int projection, int64_t slice);

  const ExpertLayer& layer() const { return *layer_; }
  const RoutedBatch& routed() const { return routed_; }
  bool has_adapters() const { return !segments_.empty(); }
  const std::vector<LoraSegment>& segments() const { return segments_; }
  // The adapter whose part of its expert a position's row goes through, or null.
  const LayerLora* lora(int64_t position) const {
    return segments_.empty() ? nullptr : lora_[static_cast<size_t>(position)];
  }
  // Whether an expert has rows enough for its weights to be dequantised.
  bool dequantised(int64_t expert) const { return dequantised_[static_cast<size_t>(expert)] != 0; }
  const std::vector<WorkItem>& items() const { return items_; }
  const std::vector<int64_t>& group_starts() const { return group_starts_; }
  // Down's output is computed in equal slices of columns, one after the other in the same y, so that y stays in a
  // cache. The first panel that a shard computes of a slice, and the column of y where panel p of it lies.
  int64_t slices() const { return slices_; }
  int64_t first_panel(int projection, int shard, int64_t slice) const;
  int64_t column_of(int64_t panel, int64_t slice) const;

  // Activations by position, in the forms of gate, up (if another) and LoRA (if any); h likewise; t = s A x; y.
  ScratchRows x[2], x_lora, h, h_lora, t, y;
  bool up_differs = false;
  Format lora_format = Format::bf16;
  float* tile(int worker) const { return reinterpret_cast<float*>(tiles_.data()) + worker * kTileFloats; }

 private:
  void find_adapters();
  void choose_dequantised();
  void reserve();

  const WorkerPool& pool_;
  const Kernels& kernels_;
  bool deterministic_;
  const ExpertLayer* layer_ = nullptr;
  RoutedBatch routed_;
  std::vector<LoraSegment> segments_;
  std::vector<const LayerLora*> lora_;  // [positions], if there are segments
  int64_t max_rank_ = 0;
  std::vector<uint8_t> dequantised_;  // [experts]
  std::vector<WorkItem> items_;
  std::vector<int64_t> group_starts_;
  int64_t slices_ = 1, shard_columns_ = 0;
  Arena tiles_;
};

}  // namespace ktserve
