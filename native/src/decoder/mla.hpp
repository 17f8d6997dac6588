// Latent attention, absorbed:
//
//   q_a ─ norm ─ q_b (or q) ─ [nope | rope] ─ absorb ─ rotate ─┐
//   kv_a ─ [latent | rope] ─ norm │ rotate ────────────────────┴ paged attention over latents ─ values │ o projection
#pragma once

#include "attention/attention.hpp"
#include "decoder/gqa.hpp"
#include "decoder/part.hpp"
#include "linear/latent_up.hpp"

namespace ktserve {

struct LatentWeights {
  const PackedLinear* q_a;  // null: q is of the hidden rows
  const void* q_a_norm;     // [outputs of q_a], or null
  const PackedLinear* q;
  const PackedLinear* kv_a;
  const void* kv_a_norm;  // [latent]
  LatentUp* up;
  const PackedLinear* o;
  float norm_eps;
  bool interleaved;  // values that are rotated together are neighbours; they come out as halves
};

class LatentPart : public AttentionPart {
 public:
  // `layer`: of the attention's layers, which has the heads. Throws std::invalid_argument for what does not fit it.
  LatentPart(PagedAttention& attention, int layer, const Rotation& rotation, const LatentWeights& weights);

  void check(const Workspace& work) const override;
  int64_t mixed_width() const override { return heads_ * weights_.up->value(); }
  uint8_t* mix(Workspace& work, const PartRows& rows, const void* x) const override;
  void project(Workspace& work, const PartRows& rows, const void* mixed, void* out) const override;

 private:
  PagedAttention& attention_;
  int layer_;
  Rotation rotation_;
  LatentWeights weights_;
  int64_t heads_;
  int64_t latent_, width_;  // values of a position: latent, and with the rotated ones
  int64_t head_;            // values of a head's query
};

}  // namespace ktserve
