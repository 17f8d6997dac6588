// A decoder's layers as few calls: the attention half of one layer (`attend`), or all layers and the head (`run`).
//
//   attend   residual += delta ─ norm ─┬─ q,k,v projections ─ QK-norm, rotation ─ attention ─ o projection ─┐
//                                      │                                                                    │
//            hidden, ids, weights ◄─ top-k ◄─ router ◄─ norm ◄─ residual += ◄───────────────────────────────┘
//
//   run      [attend ─ experts (+ the shared one), or a dense MLP] x layers ─ norm ─ lm_head ─ greedy token
//                                │
//            behind the last attention only the rows that somebody reads go on
//
// Each part is the very function that can be called alone; nothing is computed differently here.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention/attention.hpp"
#include "linear/linear.hpp"
#include "ops/ops.hpp"
#include "runtime/task.hpp"

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
  const void* q_norm;  // both null: no norm
  const void* k_norm;
  const PackedLinear* q;
  const PackedLinear* k;
  const PackedLinear* v;
  const PackedLinear* o;
  const PackedLinear* router;  // null for a layer without experts
};

struct DenseMlp {
  const PackedLinear* gate;
  const PackedLinear* up;
  const PackedLinear* down;
};

// An expert that takes every row, behind a sigmoid gate.
struct SharedExpert {
  DenseMlp mlp;
  const PackedLinear* gate;  // to one value
};

// The memory that every layer's experts read and write (engine/experts/base.py).
struct ExpertMemory {
  int32_t* bsz;
  int64_t* ids;
  float* weights;
  int32_t* slots;
  void* hidden;
  const void* out;
  int64_t max_rows;
};

struct Rotation {
  const float* cos;
  const float* sin;
  int64_t rows;  // of the tables
};

struct DecoderStep {
  int64_t tokens;
  void* residual;     // [tokens, hidden], contiguous
  const void* delta;  // the former layer's part, still to be added; or null
  int64_t delta_stride;
  const int64_t* positions;
  const int32_t* slots;  // or null
  void* hidden;          // out [tokens, hidden], contiguous
  int64_t* ids;          // out [tokens, top_k]; unused without a router
  float* weights;
};

struct ModelStep {
  int64_t tokens;
  void* residual;  // [tokens, hidden], contiguous: the embeddings; overwritten
  const int64_t* positions;
  const int32_t* slots;  // or null
  const int64_t* keep;   // rising [kept]: the rows whose final hidden state is wanted; null for all
  int64_t kept;
  void* hidden;     // out [kept, hidden] behind the final norm
  int64_t* greedy;  // out [kept], or null
  int64_t* seen;    // out, per layer with experts [rows, top_k] one after the other: the chosen experts; or null
};

// What a layer's experts threw.
struct ExpertsFailed : std::runtime_error {
  ExpertsFailed(int64_t layer, const std::string& what)
      : std::runtime_error("layer " + std::to_string(layer) + ", native experts: " + what) {}
};

class Decoder {
 public:
  Decoder(const Ops& ops, LinearRunner& linear, PagedAttention& attention, Rotation rotation, DecoderShape shape);
  // Throws std::invalid_argument if a projection's size does not fit the shape.
  void add_layer(const DecoderLayer& layer);
  // What `run` needs beyond `attend`: of each layer what follows its attention, then the rest. Each throws
  // std::invalid_argument for what does not fit, and sets nothing then.
  void set_experts(int layer, const Task& experts);
  void set_dense(int layer, const DenseMlp& mlp);
  void set_shared(int layer, const SharedExpert& shared);  // beside the experts of a layer that has one
  void set_head(const void* final_norm, const PackedLinear& lm_head, const ExpertMemory& memory);
  // After PagedAttention::plan. Throws what the parts throw.
  void attend(int layer, const DecoderStep& step);
  // The same for a whole step; returns the seconds spent in experts. Throws std::invalid_argument, ExpertsFailed, and
  // what else the parts throw.
  double run(const ModelStep& step);

 private:
  struct Layer : DecoderLayer {
    const Task* experts = nullptr;
    DenseMlp dense{};
    SharedExpert shared{};
  };

  Layer& layer(int index);
  uint8_t* rows(Arena& arena, int64_t tokens, int64_t width, int64_t element_bytes);
  int64_t element() const { return shape_.is_bf16 ? 2 : 4; }
  int64_t q_width() const { return static_cast<int64_t>(shape_.heads) * shape_.head_dim; }
  void norm(const DecoderStep& s, const void* delta, int64_t stride, const void* weight, void* out) const;
  void mix(int index, const Layer& layer, const DecoderStep& step);      // up to the attention: fills attended_
  void route(const Layer& layer, const DecoderStep& step);               // from attended_ on
  void dense(const DenseMlp& mlp, const DecoderStep& step);              // fills mlp_
  void add_shared(const SharedExpert& shared, const DecoderStep& step);  // mlp_ becomes the experts' output with it
  double run_experts(int index, const Task& experts, const DecoderStep& step);
  void drop_rows(const ModelStep& step, DecoderStep& rest);  // of attended_, the residual and the slots
  void check(const ModelStep& step) const;

  const Ops& ops_;
  LinearRunner& linear_;
  PagedAttention& attention_;
  Rotation rotation_;
  DecoderShape shape_;
  std::vector<Layer> layers_;
  const void* final_norm_ = nullptr;
  const PackedLinear* lm_head_ = nullptr;
  ExpertMemory memory_{};
  std::vector<int32_t> kept_slots_;
  Arena hidden_;
  Arena qkv_;
  Arena attended_;
  Arena logits_;
  Arena gate_;
  Arena up_;
  Arena mlp_;
  Arena head_;
};

}  // namespace ktserve
