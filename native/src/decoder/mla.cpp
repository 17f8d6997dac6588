#include "decoder/mla.hpp"

namespace ktserve {

LatentPart::LatentPart(PagedAttention& attention, int layer, const Rotation& rotation, const LatentWeights& weights)
    : attention_(attention),
      layer_(layer),
      rotation_(rotation),
      weights_(weights),
      heads_(weights.up->heads()),
      latent_(weights.up->latent()),
      width_(latent_ + rotation.dim),
      head_(weights.up->nope() + rotation.dim) {
  const AttentionShape& shape = attention.shape();
  require(layer >= 0 && layer < shape.layers, "layer", layer, "0 to " + std::to_string(shape.layers - 1));
  require(rotation.dim >= 2 && rotation.dim % 2 == 0, "rotation's dim", rotation.dim, "an even number");
  require(shape.latent == latent_ && shape.head_dim == width_, "latent", shape.latent, "what the projections have");
  require(shape.heads == heads_ && shape.kv_heads == 1, "heads", shape.heads, "the projections', of one kv head");
  if ((weights.q_a == nullptr) != (weights.q_a_norm == nullptr))
    throw std::invalid_argument("q_a_norm: allowed is a weight with q_a, none without");
  require_shape("q", *weights.q, heads_ * head_, weights.q_a == nullptr ? weights.q->k() : weights.q_a->n());
  require_shape("kv_a", *weights.kv_a, width_, weights.kv_a->k());
  require_shape("o", *weights.o, -1, mixed_width());
}

void LatentPart::check(const Workspace& work) const {
  const PackedLinear& first = weights_.q_a == nullptr ? *weights_.q : *weights_.q_a;
  require_shape("q_a or q", first, first.n(), work.hidden);
  require_shape("kv_a", *weights_.kv_a, width_, work.hidden);
  require_shape("o", *weights_.o, work.hidden, mixed_width());
  if (attention_.bf16_rows() != work.is_bf16)
    throw std::invalid_argument(std::string("is_bf16: ") + (work.is_bf16 ? "true" : "false") +
                                "; allowed is what the attention's rows are");
}

uint8_t* LatentPart::mix(Workspace& work, const PartRows& rows, const void* x) const {
  const int64_t element = work.element(), q_width = heads_ * head_;
  const bool ranked = weights_.q_a != nullptr;
  const int64_t first = ranked ? weights_.q_a->n() : q_width;
  uint8_t* projected = work.rows(Buffer::projected, rows.tokens, first + width_);
  uint8_t* kept = projected + first * element;
  const int64_t stride = first + width_;
  work.project({{ranked ? weights_.q_a : weights_.q, projected, stride}, {weights_.kv_a, kept, stride}}, x, work.hidden,
               rows);
  const auto norm = [&](uint8_t* part, const void* weight, int64_t dim) {
    work.ops.norm(
        {part, stride, nullptr, 0, weight, work.weight_bf16, part, stride, rows.tokens, dim, weights_.norm_eps},
        work.is_bf16);
  };
  uint8_t* q = projected;
  int64_t q_stride = stride;
  if (ranked) {
    norm(projected, weights_.q_a_norm, first);
    q = work.rows(Buffer::queries, rows.tokens, q_width);
    q_stride = q_width;
    work.project({{weights_.q, q, q_width}}, projected, stride, rows);
  }
  norm(kept, weights_.kv_a_norm, latent_);
  // The rotated values of queries lie behind what absorbs the others.
  uint8_t* absorbed = work.rows(Buffer::absorbed, rows.tokens, heads_ * width_);
  const int64_t nope = weights_.up->nope();
  work.ops.rotate(
      {q + nope * element, q_stride, head_, absorbed + latent_ * element, heads_ * width_, width_, rotation_.cos,
       rotation_.sin, rows.positions, rotation_.rows, rows.tokens, heads_, rotation_.dim, weights_.interleaved},
      work.is_bf16);
  uint8_t* k_rope = kept + latent_ * element;
  work.ops.rotate({k_rope, stride, rotation_.dim, k_rope, stride, rotation_.dim, rotation_.cos, rotation_.sin,
                   rows.positions, rotation_.rows, rows.tokens, 1, rotation_.dim, weights_.interleaved},
                  work.is_bf16);
  weights_.up->absorb({q, q_stride, head_}, {absorbed, heads_ * width_, width_}, rows.tokens, work.is_bf16, rows.slots);
  uint8_t* latents = work.rows(Buffer::latents, rows.tokens, heads_ * latent_);
  attention_.forward(layer_, rows.tokens, {absorbed, heads_ * width_}, {kept, stride}, {kept, stride},
                     {latents, heads_ * latent_});
  uint8_t* mixed = work.rows(Buffer::mixed, rows.tokens, mixed_width());
  weights_.up->values({latents, heads_ * latent_, latent_}, {mixed, mixed_width(), weights_.up->value()}, rows.tokens,
                      work.is_bf16, rows.slots);
  return mixed;
}

void LatentPart::project(Workspace& work, const PartRows& rows, const void* mixed, void* out) const {
  work.project({{weights_.o, out, work.hidden}}, mixed, mixed_width(), rows);
}

}  // namespace ktserve
