// One layer's routed experts in the packed layout, and the adapters that act inside them.
//
//   shard 0 (node 0):  gate | expert 0: panels [0, P/S) | expert 1 | ... | up | ... | down | ...
//   shard 1 (node 1):  gate | expert 0: panels [P/S, 2P/S) | ...
//
// Behind the panels of a shard lie the float32 biases of their rows, if experts have some, in the same order.
//
// Every expert is split over all NUMA nodes by output panels (gate and up by the intermediate size, down by the hidden
// size), so that one token's eight experts load every node's memory equally. An expert's panels of one shard and
// projection are one contiguous run.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "gemm/activation.hpp"
#include "packing/format.hpp"
#include "packing/pack.hpp"
#include "packing/packed_file.hpp"
#include "runtime/arena.hpp"
#include "runtime/pool.hpp"

namespace ktserve {

enum Projection : int { kGate = 0, kUp = 1, kDown = 2 };

struct LayerShape {
  int64_t experts;
  int64_t hidden;        // multiple of 32
  int64_t intermediate;  // multiple of 32
  Format formats[3];     // gate, up, down
  int shards;
  bool biased = false;  // each projection adds a bias
  Activation activation = {};

  // LoRA is computed as exactly as the base allows: float32 beside float32 weights, bf16 beside all others.
  Format lora_format() const { return formats[kGate] == Format::f32 ? Format::f32 : Format::bf16; }
};

// An adapter's part of a layer. Expert e without LoRA (all of its B are zero) is not computed.
struct LayerLora {
  int64_t rank;
  float scales[3];
  Arena memory;
  // Bytes from expert to expert, and of each part within an expert.
  int64_t expert_bytes;
  int64_t a_gate_up;  // panels of [2 rank, hidden]: gate's rows, then up's
  int64_t a_down;     // panels of [rank, intermediate]
  int64_t b[3];       // panels of [rank][16]
  std::vector<uint8_t> present;

  const uint8_t* part(int64_t expert, int64_t offset) const { return memory.data() + expert * expert_bytes + offset; }
};

// Addresses of an adapter's tensors: A [E, r, in], B [E, out, r], all float32 or all bf16.
struct LoraSource {
  const void* a[3];
  const void* b[3];
  float scales[3];
  int64_t rank;
  bool bf16;
};

class ExpertLayer {
 public:
  // nodes: the memory node of each shard (WorkerPool::nodes), or nothing: wherever it is touched first.
  explicit ExpertLayer(const LayerShape& shape, const std::vector<int>& nodes = {});
  ExpertLayer(const ExpertLayer&) = delete;
  ExpertLayer& operator=(const ExpertLayer&) = delete;

  const LayerShape& shape() const { return shape_; }
  int64_t rows_of(int projection) const { return projection == kDown ? shape_.hidden : shape_.intermediate; }
  int64_t inner_of(int projection) const { return projection == kDown ? shape_.intermediate : shape_.hidden; }
  int64_t first_panel(int projection, int shard) const;
  // Panel `panel` of an expert; the following ones of the same shard lie behind it.
  uint8_t* panel(int projection, int64_t expert, int64_t panel) const;
  // The biases of a panel's rows; those of the following panels of the same shard lie behind them. Null: there are
  // none.
  float* bias(int projection, int64_t expert, int64_t panel) const;
  int64_t bytes() const;
  int64_t shard_bytes(int index) const { return bias_offset(index, 3); }
  std::vector<Span> spans() const;  // all of it, shard by shard
  const Arena& shard(int index) const { return shards_[static_cast<size_t>(index)]; }

  // Packs experts [first, first + count) of a projection; data[i] is where expert first + i's rows begin.
  void load(WorkerPool& pool, int projection, const SourceType& source, int64_t first,
            const std::vector<SourceRows>& data);

  // Copies the biases of a projection of all experts, [experts, rows_of(projection)]. Throws std::invalid_argument if
  // the layer has none, or a value is NaN or infinite.
  void load_bias(int projection, const float* values);

  // In place of `load`: read-only, of a mapped file (adopt_file); the checksum of the bytes.
  uint64_t adopt(WorkerPool& pool, const std::shared_ptr<MappedFile>& file, int64_t offset) {
    return adopt_file(pool, shards_, file, offset, bytes());
  }

  // Into a slot, or out of it, that no task in flight uses; tasks may use other slots meanwhile.
  void set_lora(WorkerPool& pool, int slot, const LoraSource& source);
  void clear_lora(int slot);
  const LayerLora* lora(int slot) const;

  // How often rows have chosen each expert in all tasks so far: for people to look at.
  void count_choices(int64_t expert, int64_t rows) const {
    choices_[static_cast<size_t>(expert)].fetch_add(rows, std::memory_order_relaxed);
  }
  std::vector<int64_t> choices() const { return {choices_.begin(), choices_.end()}; }

 private:
  int shard_of(int projection, int64_t panel) const;
  int64_t shard_panels(int projection, int shard) const {
    return first_panel(projection, shard + 1) - first_panel(projection, shard);
  }
  int64_t projection_offset(int shard, int projection) const;
  int64_t bias_offset(int shard, int projection) const;

  LayerShape shape_;
  std::vector<Arena> shards_;
  mutable std::mutex mutex_;                           // of the next
  std::vector<std::unique_ptr<LayerLora>> loras_;      // by slot; 0 stays empty
  mutable std::vector<std::atomic<int64_t>> choices_;  // by expert
};

}  // namespace ktserve
