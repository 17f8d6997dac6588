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
// Every output is one chain of additions over k, then over the rank, in a fixed order: a row's result depends neither
// on its neighbours nor on how the work was cut. Base rows do no adapter work, and with none in the batch step 2 is
// gone.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/arena.hpp"
#include "core/kernels.hpp"
#include "core/pool.hpp"

namespace ktserve {

// On the heap: a model's adapters are too many for a mapping each.
struct alignas(64) Line {
  uint8_t bytes[64];
};

struct LoraWeights {
  int64_t rank = 0;
  float scale = 1;
  std::vector<Line> a;  // A [rank, k], packed as bf16, or as f32 for f32 weights
  std::vector<Line> b;  // B in panels of [rank][16], of the same type
};

// One projection's weights. Not changed after construction, but for its adapters.
class PackedLinear {
 public:
  // Packs `data` ([n, k] in a GGML type) over the pool. bias: n floats or null.
  PackedLinear(WorkerPool& pool, const std::string& source, const std::string& format, const uint8_t* data,
               int64_t data_bytes, int64_t n, int64_t k, const float* bias);

  int64_t n() const { return n_; }
  int64_t k() const { return k_; }
  Format format() const { return format_; }
  // Of the rows that an adapter's A multiplies, and of A.
  Format adapter_format() const { return format_ == Format::f32 ? Format::f32 : Format::bf16; }
  size_t bytes() const { return weights_.bytes(); }
  const uint8_t* panel(int64_t p) const { return weights_.data() + p * panel_bytes_; }
  int64_t panel_bytes() const { return panel_bytes_; }
  const float* bias() const { return bias_.empty() ? nullptr : bias_.data(); }

  // a [rank, k], b [n, rank]: both float32 or both bf16. No call in flight may use the slot.
  void set_adapter(int slot, const void* a, const void* b, bool is_bf16, int64_t rank, float scale);
  void clear_adapter(int slot);
  // What a slot holds now, or null.
  std::shared_ptr<const LoraWeights> adapter(int slot) const;
  bool has_adapters() const;
  std::vector<float> row(int64_t index) const;  // the weights of one output, as the kernels see them

 private:
  int64_t n_, k_;
  Format format_;
  int64_t panel_bytes_;
  Arena weights_;
  std::vector<float> bias_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<const LoraWeights>> adapters_;  // by slot
};

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
  LinearRunner(WorkerPool& pool, Isa isa);
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
    std::vector<std::shared_ptr<const LoraWeights>> held;  // keeps adapters alive while they are read
    std::vector<const LoraWeights*> by_row;                // per row: its adapter or null; empty if no row has one
    std::vector<const float*> t_by_row;
    int64_t first_piece;
    int64_t panels_per_piece;
  };

  void run_slab(const std::vector<LinearCall>& calls, const LinearInput& input);
  void pack_rows(const LinearInput& input, Format format, int64_t k, const std::vector<int64_t>* order, uint8_t* to);
  void run_adapters(const std::vector<LinearCall>& calls, const LinearInput& input, std::vector<CallState>& states);
  void run_piece(const LinearCall& call, const CallState& state, const LinearInput& input, int64_t piece, int worker);

  WorkerPool& pool_;
  const Kernels& kernels_;
  std::mutex mutex_;
  Arena packed_[kFormats];  // per format of weights: the rows of x as it reads them
  Arena sorted_[kFormats];  // the adapter rows, bf16 or f32
  std::vector<Arena> products_;
  Arena tiles_;  // per worker
};

}  // namespace ktserve
