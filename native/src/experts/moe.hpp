// The routed experts of a batch: out = sum_j w_j expert_{id_j}(x), each row with its own adapter inside the experts.
//
//   group    choices (row, j) sorted by expert, then adapter, then row: one run of rows per expert
//   pack     each row's activations into the form of the gate/up weights, once per choice
//   lora A   rows with an adapter: t = s A x (from bf16)                    | only if the batch has adapters
//   gate up  h = silu(gate + Bg t) * (up + Bu t), packed for the down weights
//   lora A   t = s A h                                                      | only if the batch has adapters
//   down     y = down h + Bd t, one float32 row per choice                 | as many columns at a time as
//   combine  out = sum over j, in the order of j                            | y may take memory
//
// Each line is one parallel_for; a piece is a range of an expert's panels for a range of its rows, sized to some tens
// of microseconds. Nothing is added across pieces, so results do not depend on threads.
//
// An expert with many rows of quantised weights is "wide": its weights are dequantised to bf16 and meet bf16
// activations (Kernels::dot_wide). A row's result then depends, within rounding, on how many rows chose its experts;
// a deterministic runner has no wide experts, and a row never sees the others.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "core/arena.hpp"
#include "core/kernels.hpp"
#include "core/pool.hpp"
#include "experts/layer.hpp"

namespace ktserve {

constexpr int64_t kMostTopK = 64;
constexpr int64_t kMostPieceRows = 320;

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
};

// Computes tasks on a pool, one at a time; holds the scratch memory that they share.
class MoeRunner {
 public:
  MoeRunner(WorkerPool& pool, Isa isa, bool deterministic)
      : pool_(pool), kernels_(kernels(isa)), deterministic_(deterministic) {}

  // The most scratch memory that a pool of `threads` takes for calls of up to `rows` rows, in bytes. rank: the largest
  // of their adapters, 0: none.
  static int64_t scratch_bytes(Isa isa, bool deterministic, int threads, const LayerShape& shape, int64_t rows,
                               int64_t top_k, int64_t rank);

  // Throws std::invalid_argument for a bsz, id or slot out of range; nothing has been written then.
  void forward(const ExpertLayer& layer, const MoeBuffers& buffers);

  WorkerPool& pool() const { return pool_; }
  Isa isa() const { return kernels_.isa; }
  bool deterministic() const { return deterministic_; }

 private:
  struct Piece {
    int32_t expert;
    int32_t row, row_end;  // sorted positions
    int32_t panel, panel_end;
    const uint8_t* next = nullptr;  // weights of the piece behind this one, fetched while this one's end is computed
  };
  struct Segment {  // rows of one expert with one adapter
    const LayerLora* lora;
    int32_t expert;
    int32_t row, row_end;
  };

  void check(const ExpertLayer& layer, const MoeBuffers& buffers, int64_t rows) const;
  void run(const ExpertLayer& layer, const MoeBuffers& buffers, int64_t first, int64_t rows);
  void group(const ExpertLayer& layer, const MoeBuffers& buffers, int64_t first, int64_t rows);
  void choose_wide(const LayerShape& shape);
  void reserve(const ExpertLayer& layer, int64_t top_k, int64_t rows);
  bool wide(int64_t expert) const { return wide_[static_cast<size_t>(expert)] != 0; }
  void product(Format format, bool wide, const DotArgs& args) const;
  void cut(const ExpertLayer& layer, int projection, int64_t slice);
  void pack_hidden(const ExpertLayer& layer, const MoeBuffers& buffers, int64_t first, int64_t rows);
  void lora_a(const ExpertLayer& layer, bool down);
  void gate_up(const ExpertLayer& layer, const Piece& piece, float* scratch);
  void gate_up_panels(const ExpertLayer& layer, const Piece& piece, float* gate);
  void down(const ExpertLayer& layer, const Piece& piece, int64_t slice);
  int64_t first_panel(const ExpertLayer& layer, int projection, int shard, int64_t slice) const;
  void combine(const ExpertLayer& layer, const MoeBuffers& buffers, int64_t first, int64_t rows, int64_t slice);
  // The adapters' B of a piece, while its base product is computed.
  void fetch_lora(int projection, const Piece& piece) const;
  void add_lora(int projection, const Piece& piece, float* tile, int64_t stride, int64_t t_half);

  WorkerPool& pool_;
  const Kernels& kernels_;
  bool deterministic_;
  std::mutex running_;

  // Of the batch being computed.
  std::vector<int32_t> position_;      // [rows * top_k]: sorted position of a choice, -1 if skipped
  std::vector<int32_t> choice_;        // [positions]: the choice at a position
  std::vector<int32_t> expert_first_;  // [experts + 1]
  std::vector<uint8_t> wide_;          // [experts]
  std::vector<int32_t> by_slot_;       // rows ordered by slot
  std::vector<Segment> segments_;
  std::vector<const LayerLora*> row_lora_;  // [positions]
  std::vector<Piece> pieces_;
  std::vector<int64_t> group_starts_;
  int64_t max_rank_ = 0;
  Format lora_format_ = Format::bf16;

  // Scratch: activations per position, in the forms of gate, up (if another), LoRA (if any); h; t; y. Down's output is
  // computed in `slices_` equal slices of columns, one after the other in the same y, so that y stays in a cache.
  int64_t slices_ = 1, shard_columns_ = 0, y_stride_ = 0;
  int64_t x_stride_[2] = {}, xb_stride_ = 0, h_stride_ = 0, hb_stride_ = 0, t_stride_ = 0;
  bool up_differs_ = false;
  Arena x_[2], xb_, h_, hb_, t_, y_, tiles_;
};

}  // namespace ktserve
