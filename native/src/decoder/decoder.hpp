// A decoder's layers as few calls: the attention half of one layer (`attend`), or all layers and the head (`run`).
//
//   attend   residual += delta ─ norm ─ attention part ─┐
//            hidden ◄──── route ◄── norm ◄── residual += ◄┘
//
//   run      [attend ─ MLP part] x layers ─ norm ─ lm_head ─ greedy token
//
// Layers are parts (decoder/part.hpp) that need not be alike. Each part calls the very functions that can be called
// alone; nothing is computed differently here.
#pragma once

#include <cstdint>
#include <vector>

#include "decoder/part.hpp"

namespace ktserve {

struct DecoderLayer {
  const void* input_norm;  // weights, [hidden]
  const AttentionPart* attention;
  const void* post_norm;
  const MlpPart* mlp;  // null: computed elsewhere
};

struct DecoderStep {
  int64_t tokens;
  void* residual;     // [tokens, hidden], contiguous
  const void* delta;  // the former layer's part, still to be added; or null
  int64_t delta_stride;
  const int64_t* positions;
  const int32_t* slots;  // or null
  void* hidden;          // out [tokens, hidden], contiguous
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

class Decoder {
 public:
  // weight_bf16: norm weights; float32 otherwise.
  Decoder(const Ops& ops, LinearRunner& linear, int64_t hidden, float eps, bool is_bf16, bool weight_bf16);
  // Throws std::invalid_argument if a part does not fit.
  void add_layer(const DecoderLayer& layer);
  // What `run` needs beyond the layers. Throws std::invalid_argument for a head that does not fit, and sets nothing
  // then.
  void set_head(const void* final_norm, const PackedLinear& lm_head);
  // After the plan of the layer's attention. The experts' ids and weights go where its MLP part says. Throws what the
  // parts throw.
  void attend(int layer, const DecoderStep& step);
  // The same for a whole step; returns the seconds spent in experts. Throws std::invalid_argument, ExpertsFailed, and
  // what else the parts throw.
  double run(const ModelStep& step);

 private:
  const DecoderLayer& layer(int index) const;
  // residual += x (unless null), then its norm.
  void norm(void* residual, const void* x, int64_t stride, const void* weight, int64_t tokens, void* out) const;
  // A layer up to the attention's projection; delta is added first.
  uint8_t* mix(const DecoderLayer& layer, const PartRows& rows, void* residual, const void* delta, int64_t stride);
  // From there on, to the normalised rows that enter the MLP.
  void enter(const DecoderLayer& layer, const PartRows& rows, const uint8_t* mixed, void* residual, void* hidden);
  void drop_rows(const ModelStep& step, uint8_t* mixed, int64_t mixed_width, PartRows& rest);
  void check(const ModelStep& step) const;

  Workspace work_;
  std::vector<DecoderLayer> layers_;
  const void* final_norm_ = nullptr;
  const PackedLinear* lm_head_ = nullptr;
  std::vector<int64_t> kept_positions_;
  std::vector<int32_t> kept_slots_;
};

}  // namespace ktserve
