// The small operations between projections: what each reads and writes, and the table of an instruction set's versions.
// Activations are bf16 or float32 in rows with a stride (in elements); norm weights either.
// Tables of cos and sin are float32.
#pragma once

#include <cstdint>

namespace ktserve {

struct Norm {
  const void* x;
  int64_t x_stride;
  void* residual;  // null, or rows to which x is added first; the sum (rounded) is written back and normalised
  int64_t residual_stride;
  const void* weight;  // dim
  bool weight_bf16;
  void* out;  // may be x
  int64_t out_stride;
  int64_t rows;
  int64_t dim;
  float eps;
};

struct QkNormRope {  // in place
  void* q;
  int64_t q_stride;  // from token to token
  void* k;
  int64_t k_stride;
  const void* q_weight;  // head_dim; both null: no norm
  const void* k_weight;
  bool weight_bf16;
  const float* cos;  // [positions, rotary_dim / 2]
  const float* sin;
  const int64_t* positions;  // per token
  int64_t table_rows;
  int64_t tokens;
  int heads;
  int kv_heads;
  int head_dim;
  int rotary_dim;  // even: the first values of a head, which are rotated
  float eps;
};

struct Rotate {
  const void* x;  // [tokens][heads][dim], strides from token to token and from head to head
  int64_t x_stride;
  int64_t x_head_stride;
  void* out;  // may be x
  int64_t out_stride;
  int64_t out_head_stride;
  const float* cos;  // [positions, dim / 2]
  const float* sin;
  const int64_t* positions;  // per token
  int64_t table_rows;
  int64_t tokens;
  int64_t heads;
  int dim;           // even, at most kMaxRotary
  bool interleaved;  // neighbours are rotated together, and come out as halves; else halves
};
inline constexpr int kMaxRotary = 256;

struct SiluMul {
  const void* gate;
  int64_t gate_stride;
  const void* up;
  int64_t up_stride;
  void* out;
  int64_t out_stride;
  int64_t rows;
  int64_t dim;
};

struct AddGated {  // out = base + sigmoid(gate) x, or base + x
  const void* base;
  int64_t base_stride;
  const void* x;
  int64_t x_stride;
  const float* gate;  // one per row, or null
  void* out;          // may be base or x
  int64_t out_stride;
  int64_t rows;
  int64_t dim;
};

struct GateHeads {   // x = x sigmoid(gate)
  const void* gate;  // [tokens][heads][dim], strides from token to token and from head to head
  int64_t gate_stride;
  int64_t gate_head_stride;
  void* x;  // [tokens][heads * dim]
  int64_t x_stride;
  int64_t tokens;
  int64_t heads;
  int64_t dim;
};

struct OpsKernels {
  // Each works on rows [begin, end). Index 0: float32, 1: bf16.
  void (*norm[2])(const Norm&, int64_t begin, int64_t end);
  void (*qk_norm_rope[2])(const QkNormRope&, int64_t begin, int64_t end);
  void (*rotate[2])(const Rotate&, int64_t begin, int64_t end);
  void (*silu_mul[2])(const SiluMul&, int64_t begin, int64_t end);
  void (*add_gated[2])(const AddGated&, int64_t begin, int64_t end);
  void (*gate_heads[2])(const GateHeads&, int64_t begin, int64_t end);
  void (*softmax[2])(const void* x, float* out, int64_t n);  // one row
  void (*sigmoid[2])(const void* x, float* out, int64_t n);  // one row
  int64_t (*largest[2])(const void* x, int64_t n);           // first place of a row's largest value, or of its NaN
};

extern const OpsKernels kOpsAvx2;
extern const OpsKernels kOpsAvx512;

}  // namespace ktserve
