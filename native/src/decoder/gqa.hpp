// Grouped-query attention: q, k, v projections ─ QK-norm ─ rotation ─ paged attention │ o projection.
#pragma once

#include "attention/attention.hpp"
#include "decoder/part.hpp"

namespace ktserve {

struct Rotation {
  const float* cos;  // [rows, dim / 2]
  const float* sin;
  int64_t rows;
  int dim;  // the first values of a head, which are rotated
};

// head: of each head's query and key, weights [head_dim]; whole: of all heads at once, weights [heads * head_dim].
enum class QkNorm { none, head, whole };

struct GroupedQueryWeights {
  const PackedLinear* q;
  const PackedLinear* k;
  const PackedLinear* v;
  const PackedLinear* o;
  QkNorm qk_norm;
  const void* q_norm;  // null without a norm
  const void* k_norm;
  bool gated = false;  // q gives of each head [query | gate]; what comes out is multiplied by the gate's sigmoid
};

class GroupedQueryPart : public AttentionPart {
 public:
  // `layer`: of the attention's layers, which has the heads. Throws std::invalid_argument for what does not fit it.
  GroupedQueryPart(PagedAttention& attention, int layer, const Rotation& rotation, const GroupedQueryWeights& weights);

  void check(const Workspace& work) const override;
  int64_t mixed_width() const override { return q_width_; }
  uint8_t* mix(Workspace& work, const PartRows& rows, const void* x) const override;
  void project(Workspace& work, const PartRows& rows, const void* mixed, void* out) const override;

 private:
  PagedAttention& attention_;
  int layer_;
  Rotation rotation_;
  GroupedQueryWeights weights_;
  int64_t q_width_;
  int64_t kv_width_;
};

}  // namespace ktserve
