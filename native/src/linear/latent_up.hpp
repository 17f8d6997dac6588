// The projection from latents to keys and values of all heads, by heads, beside attention over latents:
//
//   absorb   q [tokens][heads][nope]          -> K_h^T q    [tokens][heads][latent]
//   values   mixed [tokens][heads][latent]    -> V_h mixed  [tokens][heads][value]
//
// A row's adapter changes K_h and V_h by s B_h A, of which only products with vectors are made, through A's few rows.
//
// Work items are (head, panels, rows), begun by the workers of the NUMA node where the panels lie; of few rows the
// heads' weights are read once, as they lie. As in linear.hpp, quantised weights meet rows in int8, but in calls of
// many rows they are dequantised to bf16 and meet bf16 rows, unless `deterministic`.
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

// Rows [tokens][heads][n] of bf16 or float32: strides in elements.
template <class T>
struct HeadRows {
  T* data;
  int64_t token_stride;
  int64_t head_stride;
};

// An adapter's pair of the projection: a [rank, latent], keys [heads, nope, rank], values [heads, value, rank], all
// float32 or all bf16.
struct LatentPair {
  const void* a;
  const void* keys;
  const void* values;
  bool is_bf16;
  int64_t rank;
  float scale;
};

class LatentUp {
 public:
  // `keys` [heads * latent, nope]: of each head K_h^T; `values` [heads * value, latent]; each in its own format. Throws
  // std::invalid_argument for sizes that do not go together.
  LatentUp(WorkerPool& pool, Isa isa, bool deterministic, const PackedLinear& keys, const PackedLinear& values,
           int heads);

  int heads() const { return heads_; }
  int64_t nope() const { return keys_.k(); }
  int64_t latent() const { return values_.k(); }
  int64_t value() const { return values_.n() / heads_; }

  // `slots` [tokens], 0: none; or null. in and out are bf16, or float32. One call at a time.
  void absorb(HeadRows<const void> in, HeadRows<void> out, int64_t tokens, bool is_bf16, const int32_t* slots);
  void values(HeadRows<const void> in, HeadRows<void> out, int64_t tokens, bool is_bf16, const int32_t* slots);

  // No call in flight may use the slot.
  void set_adapter(int slot, const LatentPair& pair);
  void clear_adapter(int slot);

 private:
  // By a head's first product and its second one, as Kernels::lora_b takes them.
  struct Half {
    std::vector<Line> first, second;
    int64_t first_bytes, second_bytes;  // from head to head; 0: all heads share it
  };
  struct Adapter {
    Half keys, values;
    int64_t rank;  // padded to whole panels
    float scale;
    bool floats;
  };
  using Held = std::vector<std::shared_ptr<const Adapter>>;  // by token, null without

  // How a call is cut into work items.
  struct Cut {
    int64_t panels;       // of a head
    int64_t item_panels;  // of a work item, at most
    int64_t per_head;     // so many parts of a head's panels
    int64_t row_blocks;
    int64_t items;
  };
  Cut cut(const PackedLinear& weights, int64_t tokens) const;
  // The first work item of each node's panels, and how many there are.
  std::vector<int64_t> begins(const PackedLinear& weights, const Cut& cut) const;
  void run(const PackedLinear& weights, bool keys, HeadRows<const void> in, HeadRows<void> out, int64_t tokens,
           bool is_bf16, const int32_t* slots);
  void add(const Adapter& adapter, const Half& half, int64_t head, int64_t panel, int64_t panels, int64_t k,
           const float* x, float* small, float* out) const;
  Held held(const int32_t* slots, int64_t tokens) const;

  WorkerPool& pool_;
  const Kernels& kernels_;
  bool deterministic_;
  const PackedLinear& keys_;
  const PackedLinear& values_;
  int heads_;
  int64_t scratch_bytes_;  // of a worker
  Arena scratch_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<const Adapter>> adapters_;  // by slot
};

}  // namespace ktserve
