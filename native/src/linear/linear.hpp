// y = x W^T (+ bias) + scale_s (x A_s^T) B_s^T for each row's adapter slot s, on packed weights (packing/format.hpp).
//
//   1. rows of x  -> the form each weight format reads (bf16, or int8 with scales), once for all projections of a call
//   2. rows with an adapter, sorted by slot:   t = x A^T            (bf16 or float32, never from the int8 form)
//   3. work items of (projection, rows, panels):
//
//                      panels ->  p .. p+3      p+4 .. p+7
//        rows  0 ..  95           [ item   ]    [ item   ]     dot -> += t B^T for rows with an adapter -> + bias
//        rows 96 .. 191           [ item   ]    [ item   ]         -> rounded once into out
//
// The work items of a NUMA node's panels are begun by its own workers.
//
// Every output is one chain of additions over k, then over the rank, in a fixed order: a row's result depends neither
// on its neighbours nor on how the work was cut. Base rows do no adapter work, and with none in the batch step 2 is
// gone.
//
// In calls of many rows quantised weights are dequantised to bf16 and meet bf16 rows (Kernels::dot_dequantised): the
// number of rows then shows, within rounding. A deterministic runner never does that.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "gemm/kernels.hpp"
#include "linear/packed_linear.hpp"
#include "runtime/arena.hpp"
#include "runtime/pool.hpp"

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
    bool dequantised;                                      // many rows meet dequantised weights
    std::vector<std::shared_ptr<const LoraWeights>> held;  // keeps adapters alive while they are read
    std::vector<const LoraWeights*> by_row;                // per row: its adapter or null; empty if no row has one
    std::vector<const float*> t_by_row;
  };
  struct Part {  // the panels of one projection that one node's workers begin
    size_t call;
    int64_t panel;
    int64_t panels;
    int64_t panels_per_item;
    int64_t row_blocks;
    int64_t first_item;
  };

  void run_slab(const std::vector<LinearCall>& calls, const LinearInput& input);
  void pack_rows(const LinearInput& input, Format format, bool dequantised, int64_t k,
                 const std::vector<int64_t>* order, uint8_t* to);
  void run_adapters(const std::vector<LinearCall>& calls, const LinearInput& input, std::vector<CallState>& states);
  int64_t item_rows(const PackedLinear& linear, const CallState& state) const;  // of a work item, at most
  // The parts of all projections, node by node; begin: where each node's work items begin, and how many there are.
  std::vector<Part> share_out(const std::vector<LinearCall>& calls, const std::vector<CallState>& states, int64_t rows,
                              std::vector<int64_t>* begin) const;
  void run_item(const LinearCall& call, const CallState& state, const LinearInput& input, const Part& part,
                int64_t item, int worker);

  WorkerPool& pool_;
  const Kernels& kernels_;
  bool deterministic_;
  std::mutex mutex_;
  // The rows of x as a projection of that format reads them; the last: as dot_dequantised does.
  Arena packed_[kFormats + 1];
  Arena sorted_[kFormats];  // the adapter rows, bf16 or f32
  std::vector<Arena> products_;
  Arena tiles_;  // per worker
};

}  // namespace ktserve
