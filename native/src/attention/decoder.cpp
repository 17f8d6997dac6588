#include "attention/decoder.hpp"

#include <stdexcept>
#include <string>

namespace ktserve {
namespace {

void fits(const char* name, const PackedLinear* linear, int64_t n, int64_t k) {
  if (linear == nullptr) throw std::invalid_argument(std::string(name) + ": missing");
  if (linear->k() == k && (linear->n() == n || n < 0)) return;
  throw std::invalid_argument(std::string(name) + ": [" + std::to_string(linear->n()) + ", " +
                              std::to_string(linear->k()) + "]; allowed is [" +
                              (n < 0 ? std::string("experts") : std::to_string(n)) + ", " + std::to_string(k) + "]");
}

}  // namespace

Decoder::Decoder(const Ops& ops, LinearRunner& linear, PagedAttention& attention, DecoderShape shape)
    : ops_(ops), linear_(linear), attention_(attention), shape_(shape) {
  if (shape.hidden < 1)
    throw std::invalid_argument("hidden: " + std::to_string(shape.hidden) + "; allowed is 1 or more");
  if (attention.bf16_rows() != shape.is_bf16)
    throw std::invalid_argument(std::string("is_bf16: ") + (shape.is_bf16 ? "true" : "false") +
                                "; allowed is what the attention's rows are");
}

void Decoder::add_layer(const DecoderLayer& layer) {
  const int64_t q = static_cast<int64_t>(shape_.heads) * shape_.head_dim;
  const int64_t kv = static_cast<int64_t>(shape_.kv_heads) * shape_.head_dim;
  fits("q_proj", layer.q, q, shape_.hidden);
  fits("k_proj", layer.k, kv, shape_.hidden);
  fits("v_proj", layer.v, kv, shape_.hidden);
  fits("o_proj", layer.o, shape_.hidden, q);
  if (layer.router != nullptr) fits("router", layer.router, -1, shape_.hidden);
  layers_.push_back(layer);
}

uint8_t* Decoder::rows(Arena& arena, int64_t tokens, int64_t width, int64_t element_bytes) {
  const auto bytes = static_cast<size_t>(tokens * width * element_bytes);
  if (bytes > arena.bytes()) arena = Arena(bytes + bytes / 2);
  return arena.data();
}

void Decoder::attend(int index, const DecoderStep& s) {
  if (index < 0 || static_cast<size_t>(index) >= layers_.size())
    throw std::invalid_argument("layer: " + std::to_string(index) + "; allowed is 0 to " +
                                std::to_string(static_cast<int64_t>(layers_.size()) - 1));
  const DecoderLayer& layer = layers_[static_cast<size_t>(index)];
  const bool bf16 = shape_.is_bf16;
  const int64_t element = bf16 ? 2 : 4;
  const int64_t q = static_cast<int64_t>(shape_.heads) * shape_.head_dim;
  const int64_t kv = static_cast<int64_t>(shape_.kv_heads) * shape_.head_dim;
  const int64_t width = q + 2 * kv;
  uint8_t* x = rows(hidden_, s.tokens, shape_.hidden, element);
  uint8_t* qkv = rows(qkv_, s.tokens, width, element);
  uint8_t* attended = rows(attended_, s.tokens, q, element);
  uint8_t* k_rows = qkv + q * element;
  uint8_t* v_rows = k_rows + kv * element;

  const auto norm = [&](const void* delta, int64_t stride, const void* weight, void* out) {
    Norm n{s.residual,    shape_.hidden, nullptr,       0,         weight, shape_.weight_bf16, out,
           shape_.hidden, s.tokens,      shape_.hidden, shape_.eps};
    if (delta != nullptr) {
      n.x = delta;
      n.x_stride = stride;
      n.residual = s.residual;
      n.residual_stride = shape_.hidden;
    }
    ops_.norm(n, bf16);
  };
  norm(s.delta, s.delta_stride, layer.input_norm, x);
  linear_.run({{layer.q, qkv, width}, {layer.k, k_rows, width}, {layer.v, v_rows, width}},
              {x, shape_.hidden, s.tokens, bf16, bf16, s.slots});
  ops_.qk_norm_rope({qkv, width, k_rows, width, layer.q_norm, layer.k_norm, shape_.weight_bf16, s.cos, s.sin,
                     s.positions, s.table_rows, s.tokens, shape_.heads, shape_.kv_heads, shape_.head_dim, shape_.eps},
                    bf16);
  attention_.forward(index, s.tokens, {qkv, width}, {k_rows, width}, {v_rows, width}, {attended, q});
  linear_.run({{layer.o, x, shape_.hidden}}, {attended, q, s.tokens, bf16, bf16, s.slots});
  norm(x, shape_.hidden, layer.post_norm, s.hidden);
  if (layer.router == nullptr) return;
  const int64_t experts = layer.router->n();
  uint8_t* logits = rows(logits_, s.tokens, experts, 4);
  linear_.run({{layer.router, logits, experts}}, {s.hidden, shape_.hidden, s.tokens, bf16, false, s.slots});
  ops_.router_topk(
      {logits, experts, s.tokens, static_cast<int>(experts), shape_.top_k, shape_.normalise, s.ids, s.weights}, false);
}

}  // namespace ktserve
