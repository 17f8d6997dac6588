#include "decoder/gqa.hpp"

namespace ktserve {

GroupedQueryPart::GroupedQueryPart(PagedAttention& attention, int layer, const Rotation& rotation,
                                   const GroupedQueryWeights& weights)
    : attention_(attention),
      layer_(layer),
      rotation_(rotation),
      weights_(weights),
      q_width_(static_cast<int64_t>(attention.shape().heads) * attention.shape().head_dim),
      kv_width_(static_cast<int64_t>(attention.shape().kv_heads) * attention.shape().head_dim) {
  const AttentionShape& shape = attention.shape();
  require(layer >= 0 && layer < shape.layers, "layer", layer, "0 to " + std::to_string(shape.layers - 1));
  require(rotation.dim >= 2 && rotation.dim % 2 == 0 && rotation.dim <= shape.head_dim, "rotation's dim", rotation.dim,
          "an even number from 2 to " + std::to_string(shape.head_dim));
  const bool normed = weights.qk_norm != QkNorm::none;
  if ((weights.q_norm != nullptr) != normed || (weights.k_norm != nullptr) != normed)
    throw std::invalid_argument("q_norm, k_norm: allowed is a weight for both with a qk_norm, for neither without");
  require_shape("q_proj", *weights.q, weights.gated ? 2 * q_width_ : q_width_, weights.q->k());
  require_shape("k_proj", *weights.k, kv_width_, weights.q->k());
  require_shape("v_proj", *weights.v, kv_width_, weights.q->k());
  require_shape("o_proj", *weights.o, -1, q_width_);
}

void GroupedQueryPart::check(const Workspace& work) const {
  require_shape("q_proj", *weights_.q, weights_.q->n(), work.hidden);
  require_shape("o_proj", *weights_.o, work.hidden, q_width_);
  if (attention_.bf16_rows() != work.is_bf16)
    throw std::invalid_argument(std::string("is_bf16: ") + (work.is_bf16 ? "true" : "false") +
                                "; allowed is what the attention's rows are");
}

uint8_t* GroupedQueryPart::mix(Workspace& work, const PartRows& rows, const void* x) const {
  const AttentionShape& shape = attention_.shape();
  const int64_t asked = weights_.q->n(), width = asked + 2 * kv_width_;
  uint8_t* q = work.rows(Buffer::projected, rows.tokens, width);
  int64_t q_stride = width;
  uint8_t* k = q + asked * work.element();
  uint8_t* v = k + kv_width_ * work.element();
  work.project({{weights_.q, q, width}, {weights_.k, k, width}, {weights_.v, v, width}}, x, work.hidden, rows);
  const uint8_t* gate = q + shape.head_dim * work.element();
  if (weights_.gated) {
    uint8_t* queries = work.rows(Buffer::queries, rows.tokens, q_width_);
    work.ops.copy_heads({q, width, 2 * shape.head_dim, queries, q_width_, rows.tokens, shape.heads, shape.head_dim},
                        work.element());
    q = queries;
    q_stride = q_width_;
  }
  const bool whole = weights_.qk_norm == QkNorm::whole;
  if (whole) {
    const auto norm = [&](uint8_t* part, int64_t stride, const void* weight, int64_t dim) {
      work.ops.norm({part, stride, nullptr, 0, weight, work.weight_bf16, part, stride, rows.tokens, dim, work.eps},
                    work.is_bf16);
    };
    norm(q, q_stride, weights_.q_norm, q_width_);
    norm(k, width, weights_.k_norm, kv_width_);
  }
  work.ops.qk_norm_rope({q, q_stride, k, width, whole ? nullptr : weights_.q_norm, whole ? nullptr : weights_.k_norm,
                         work.weight_bf16, rotation_.cos, rotation_.sin, rows.positions, rotation_.rows, rows.tokens,
                         shape.heads, shape.kv_heads, shape.head_dim, rotation_.dim, work.eps},
                        work.is_bf16);
  uint8_t* mixed = work.rows(Buffer::mixed, rows.tokens, q_width_);
  attention_.forward(layer_, rows.tokens, {q, q_stride}, {k, width}, {v, width}, {mixed, q_width_});
  if (weights_.gated)
    work.ops.gate_heads({gate, width, 2 * shape.head_dim, mixed, q_width_, rows.tokens, shape.heads, shape.head_dim},
                        work.is_bf16);
  return mixed;
}

void GroupedQueryPart::project(Workspace& work, const PartRows& rows, const void* mixed, void* out) const {
  work.project({{weights_.o, out, work.hidden}}, mixed, q_width_, rows);
}

}  // namespace ktserve
