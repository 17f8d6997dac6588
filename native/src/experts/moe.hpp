// The routed experts of a batch: out = sum_j w_j expert_{id_j}(x), each row with its own adapter inside the experts.
//
//   route    choices (row, j) sorted by expert, then adapter slot, then row (RoutedBatch)
//   pack     each row's activations into the form of the gate/up weights, once per choice
//   lora A   rows with an adapter: t = s A x (from bf16)                    | only if the batch has adapters
//   gate up  h = silu(gate + Bg t) * (up + Bu t), packed for the down weights; or what the layer's activation says
//   lora A   t = s A h                                                      | only if the batch has adapters
//   down     y = down h + Bd t, one float32 row per choice                 | as many columns at a time as
//   combine  out = sum over j, in the order of j                            | y may take memory
//
// Gate, up and y get their biases with the adapters' part, where experts have some.
//
// Each line is one parallel_for; a work item is a range of an expert's panels for a range of its rows, sized to some
// tens of microseconds. Nothing is added across work items, so results do not depend on threads.
//
// The weights of an expert with many rows are dequantised to bf16 and meet bf16 activations, if they are quantised
// (Kernels::dot_dequantised). A row's result then depends, within rounding, on how many rows chose its experts; a
// deterministic runner never does that, and a row never sees the others.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "experts/layer.hpp"
#include "experts/moe_batch.hpp"
#include "gemm/kernels.hpp"
#include "runtime/pool.hpp"

namespace ktserve {

constexpr int64_t kMostTopK = 64;

struct MoeBuffers {
  const int32_t* bsz;    // [1], read when the task runs
  const int64_t* ids;    // [max_rows, top_k], -1 is skipped
  const float* weights;  // [max_rows, top_k]
  const int32_t* slots;  // [max_rows], 0 = base
  const void* hidden;    // [max_rows, hidden], float32 or bf16
  void* out;             // the same; rows >= bsz are not written
  int64_t max_rows;
  int64_t top_k;
  bool bf16;
  // Each call adds how many distinct experts its rows have chosen; null: nobody asks.
  int64_t* touched = nullptr;
};

// Computes tasks on a pool, one at a time; holds the scratch memory that they share.
class MoeRunner {
 public:
  MoeRunner(WorkerPool& pool, Isa isa, bool deterministic);

  // The most scratch memory that a pool of `threads` takes for calls of up to `rows` rows, in bytes. rank: the largest
  // of their adapters, 0: none.
  static int64_t scratch_bytes(Isa isa, bool deterministic, int threads, const LayerShape& shape, int64_t rows,
                               int64_t top_k, int64_t rank);

  // Throws std::invalid_argument for a bsz, id or slot out of range; nothing has been written then.
  void forward(const ExpertLayer& layer, const MoeBuffers& buffers);

  WorkerPool& pool() const { return pool_; }
  Isa isa() const { return kernels_.isa; }
  bool deterministic() const { return deterministic_; }
  // Bytes of base weights that all calls so far have gone through: an expert's once for all rows of a work item,
  // whatever adapters they have.
  int64_t weight_bytes_read() const;

 private:
  struct alignas(64) Counter {
    int64_t weight_bytes = 0;
  };

  void check(const ExpertLayer& layer, const MoeBuffers& buffers, int64_t rows) const;
  // Of a call, rows that are computed at a time: `buffers` begin with the first of them.
  void run(const ExpertLayer& layer, const MoeBuffers& buffers, int64_t rows);
  void product(int projection, const WorkItem& item, const ScratchRows& x, float* out, int64_t out_stride,
               const uint8_t* next, int worker);
  void pack_hidden(const MoeBuffers& buffers);
  void lora_a(bool down);
  void gate_up(const WorkItem& item, int worker);
  void gate_up_panels(const WorkItem& item, int worker);
  void down(const WorkItem& item, int64_t slice, int worker);
  void combine(const MoeBuffers& buffers, int64_t slice);
  // The adapters' B of a work item, while its base product is computed.
  void fetch_lora(int projection, const WorkItem& item) const;
  void add_lora(int projection, const WorkItem& item, float* tile, int64_t stride, int64_t t_half) const;
  void add_bias(int projection, const WorkItem& item, float* tile, int64_t stride) const;

  WorkerPool& pool_;
  const Kernels& kernels_;
  bool deterministic_;
  mutable std::mutex running_;
  MoeBatch batch_;
  std::vector<uint8_t> touched_;   // by expert: whether a row of the call has chosen it
  std::vector<Counter> counters_;  // by worker
};

}  // namespace ktserve
