// What the instruction-set files give to the gated delta rule: the positions of one sequence, for one head of keys and
// the value heads that share it.
#pragma once

#include <cstdint>

namespace ktserve {

inline constexpr int kDeltaChunk = 64;  // positions that are computed at once
inline constexpr int kMaxConvolution = 8;

// Where something is of each value head: first, first + step, ...
struct DeltaPlaces {
  int64_t first;
  int64_t step;
};

// A copy of the states as they are behind so many of the positions.
struct DeltaSave {
  int64_t tokens;
  float* states;  // as DeltaWork's
  float* past;
};

// A layer's own weights.
struct DeltaVectors {
  const float* conv;     // [kernel][channels]
  const float* decay;    // [value_heads], 0 or below: -exp(A_log)
  const float* dt_bias;  // [value_heads]
  const float* norm;     // [value_dim]
  float norm_eps;
};

// Of the step's tokens: what the projections give, bf16 or float32 (gates: float32), and what comes out
// [tokens][value_heads * value_dim], null: nobody wants it. Fused: z is qkv, or a is b.
struct DeltaRows {
  const void* qkv;
  int64_t qkv_stride;
  const void* z;
  int64_t z_stride;
  const float* b;
  const float* a;
  int64_t gate_stride;
  void* out;
  int64_t out_stride;
  bool is_bf16;
};

struct DeltaWork {
  int64_t tokens;
  int64_t most;   // positions that are computed at once
  int64_t heads;  // value heads
  int64_t key_dim, value_dim, kernel, channels;
  DeltaRows rows;  // strides in elements
  DeltaVectors vectors;
  // Columns of qkv, channels of the convolution (which `past` has, too), and by value head columns of z, b and a;
  // `head`: states, values of decay and dt_bias, and value_dim columns of out; `state`: states that the work ends in.
  int64_t q, k, q_channel, k_channel;
  DeltaPlaces v, v_channel, z_column, gate, head, state;
  // States [value heads of the layer][key_dim][value_dim] and inputs of the last positions [kernel - 1][channels]. The
  // work begins from the former, null: from zeros, and ends in the latter, which may be the same; of `past`, null:
  // nobody wants it.
  const float* from;
  const float* from_past;
  float* states;
  float* past;
  float *kept, *kept_b, *kept_a;  // copies of what comes in [tokens][channels], [tokens][value heads]; null: nowhere
  int64_t kept_heads;             // value heads of the layer
  const DeltaSave* saves;         // rising
  int64_t num_saves;
  float* scratch;  // 64-byte aligned
};

struct DeltaKernels {
  void (*run[2])(const DeltaWork&);  // float32, bf16
  int64_t (*scratch_floats)(const DeltaWork&);
};

extern const DeltaKernels kDeltaAvx2;
extern const DeltaKernels kDeltaAvx512;

}  // namespace ktserve
