// y = x W^T (+ bias) + scale_s (x A_s^T) B_s^T for each row's adapter slot s, on packed weights (core/format.hpp).
//
//   1. rows of x  -> the form each weight format reads (bf16, or int8 with scales), once for all projections of a call
//   2. rows with an adapter, sorted by slot:   t = x A^T            (bf16 or float32, never from the int8 form)
//   3. pieces of (projection, rows, panels):
//
//                      panels ->  p .. p+3      p+4 .. p+7
//        rows  0 ..  95           [ piece  ]    [ piece  ]     dot -> += t B^T for rows with an adapter -> + bias
//        rows 96 .. 191           [ piece  ]    [ piece  ]         -> rounded once into out
//
// The pieces of a NUMA node's panels are begun by its own workers.
//
// Every output is one chain of additions over k, then over the rank, in a fixed order: a row's result depends neither
// on its neighbours nor on how the work was cut. Base rows do no adapter work, and with none in the batch step 2 is
// gone.
//
// In calls of many rows quantised weights are dequantised to bf16 and meet bf16 rows (Kernels::dot_wide): the number
// of rows then shows, within rounding. A deterministic runner never does that.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/arena.hpp"
#include "core/kernels.hpp"
#include "core/pool.hpp"
#include "linear/packed_linear.hpp"

namespace ktserve {

struct LinearCall {
  const PackedLinear* linear;
  void* out;
  int64_t out_stride;  // elements
};

struct LinearInput {
  const void* x;
  int64_t stride;  // elements
  int64_t rows;
  bool is_bf16;
  bool out_bf16;         // of every out
  const int32_t* slots;  // per row, 0 = base; or null
};

// Runs projections that share an input. One at a time: a second caller waits.
class LinearRunner {
 public:
  LinearRunner(WorkerPool& pool, Isa isa, bool deterministic);
  bool deterministic() const { return deterministic_; }
  void run(const std::vector<LinearCall>& calls, const LinearInput& input);

 private:
  struct LoraUnit {  // rows [begin, begin + count) of the sorted adapter rows, through one A
    const LoraWeights* lora;
    const PackedLinear* linear;
    int64_t begin;
    int64_t count;
    float* t;
  };
  struct CallState {
    bool wide;                                             // many rows meet dequantised weights
    std::vector<std::shared_ptr<const LoraWeights>> held;  // keeps adapters alive while they are read
    std::vector<const LoraWeights*> by_row;                // per row: its adapter or null; empty if no row has one
    std::vector<const float*> t_by_row;
  };
  struct Part {  // the panels of one projection that one node's workers begin
    size_t call;
    int64_t panel;
    int64_t panels;
    int64_t panels_per_piece;
    int64_t row_blocks;
    int64_t first_piece;
  };

  void run_slab(const std::vector<LinearCall>& calls, const LinearInput& input);
  void pack_rows(const LinearInput& input, Format format, bool wide, int64_t k, const std::vector<int64_t>* order,
                 uint8_t* to);
  void run_adapters(const std::vector<LinearCall>& calls, const LinearInput& input, std::vector<CallState>& states);
  // The parts of all projections, node by node; begin: where each node's pieces begin, and how many there are.
  std::vector<Part> share_out(const std::vector<LinearCall>& calls, const std::vector<CallState>& states, int64_t rows,
                              std::vector<int64_t>* begin) const;
  void run_piece(const LinearCall& call, const CallState& state, const LinearInput& input, const Part& part,
                 int64_t piece, int worker);

  WorkerPool& pool_;
  const Kernels& kernels_;
  bool deterministic_;
  std::mutex mutex_;
  // The rows of x as a projection of that format reads them; the last: as wide ones do.
  Arena packed_[kFormats + 1];
  Arena sorted_[kFormats];  // the adapter rows, bf16 or f32
  std::vector<Arena> products_;
  Arena tiles_;  // per worker
};

}  // namespace ktserve
