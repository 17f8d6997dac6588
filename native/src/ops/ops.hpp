// The row operations over a pool: sizes are checked, rows are cut into work items of about 16 K elements, and small
// calls stay on the caller's thread. All throw std::invalid_argument naming the argument, its value and what is
// allowed.
#pragma once

#include "ops/ops_kernels.hpp"
#include "ops/router.hpp"
#include "runtime/isa.hpp"
#include "runtime/pool.hpp"

namespace ktserve {

struct Embed {
  const int64_t* ids;
  int64_t rows;
  const void* table;  // [vocab, dim]
  int64_t vocab;
  int64_t dim;
  void* out;  // [rows, dim]
  int64_t out_stride;
};

struct CopyHeads {
  const void* x;  // [tokens][heads][dim], strides in elements from token to token and from head to head
  int64_t x_stride;
  int64_t x_head_stride;
  void* out;  // [tokens][heads * dim]
  int64_t out_stride;
  int64_t tokens;
  int64_t heads;
  int64_t dim;
};

struct Argmax {
  const void* logits;  // [rows, n]
  int64_t stride;
  int64_t rows;
  int64_t n;
  int64_t* out;  // [rows]
};

class Ops {
 public:
  Ops(WorkerPool& pool, Isa isa);

  void norm(const Norm& n, bool is_bf16) const;
  void qk_norm_rope(const QkNormRope& r, bool is_bf16) const;
  void rotate(const Rotate& r, bool is_bf16) const;
  void silu_mul(const SiluMul& s, bool is_bf16) const;
  void add_gated(const AddGated& g, bool is_bf16) const;
  void gate_heads(const GateHeads& g, bool is_bf16) const;
  void copy_heads(const CopyHeads& c, int64_t element_bytes) const;
  void router_topk(const RouterTopK& r, bool is_bf16) const;
  void embed(const Embed& e, int64_t element_bytes) const;
  // The place of each row's largest value, the first of equals; -1 if it is infinite or a value is NaN.
  void argmax(const Argmax& l, bool is_bf16) const;

 private:
  template <class F>
  void split(int64_t rows, int64_t row_elements, const F& body) const;

  WorkerPool& pool_;
  const OpsKernels& kernels_;
};

}  // namespace ktserve
