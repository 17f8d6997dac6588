// The attention half of a decoder layer in one call, so that a step is two calls a layer (this and the experts):
//
//   residual += delta ─ norm ─┬─ q,k,v projections ─ QK-norm, rotation ─ attention ─ o projection ─┐
//                             │                                                                    │
//   hidden, ids, weights ◄─ top-k ◄─ router ◄─ norm ◄─ residual += ◄───────────────────────────────┘
//
// Each part is the very function that can be called alone; nothing is computed differently here.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/attention.hpp"
#include "linear/linear.hpp"
#include "ops/ops.hpp"

namespace ktserve {

struct DecoderShape {
  int64_t hidden;
  int heads;
  int kv_heads;
  int head_dim;
  int top_k;
  bool normalise;  // the top-k weights are divided by their sum
  float eps;
  bool is_bf16;      // activations
  bool weight_bf16;  // norm weights
};

struct DecoderLayer {
  const void* input_norm;
  const void* post_norm;
  const void* q_norm;
  const void* k_norm;
  const PackedLinear* q;
  const PackedLinear* k;
  const PackedLinear* v;
  const PackedLinear* o;
  const PackedLinear* router;  // null for a layer without experts
};

struct DecoderStep {
  int64_t tokens;
  void* residual;     // [tokens, hidden], contiguous
  const void* delta;  // the former layer's part, still to be added; or null
  int64_t delta_stride;
  const float* cos;
  const float* sin;
  int64_t table_rows;
  const int64_t* positions;
  const int32_t* slots;  // or null
  void* hidden;          // out [tokens, hidden], contiguous
  int64_t* ids;          // out [tokens, top_k]; unused without a router
  float* weights;
};

class Decoder {
 public:
  Decoder(const Ops& ops, LinearRunner& linear, PagedAttention& attention, DecoderShape shape);
  // Throws std::invalid_argument if a projection's size does not fit the shape.
  void add_layer(const DecoderLayer& layer);
  // After PagedAttention::plan. Throws what the parts throw.
  void attend(int layer, const DecoderStep& step);

 private:
  uint8_t* rows(Arena& arena, int64_t tokens, int64_t width, int64_t element_bytes);

  const Ops& ops_;
  LinearRunner& linear_;
  PagedAttention& attention_;
  DecoderShape shape_;
  std::vector<DecoderLayer> layers_;
  Arena hidden_;
  Arena qkv_;
  Arena attended_;
  Arena logits_;
};

}  // namespace ktserve
