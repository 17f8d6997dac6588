#include "decoder/decoder.hpp"

#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>

namespace ktserve {
namespace {

void fits(const char* name, const PackedLinear* linear, int64_t n, int64_t k) {
  if (linear == nullptr) throw std::invalid_argument(std::string(name) + ": missing");
  if (linear->k() == k && (linear->n() == n || n < 0)) return;
  throw std::invalid_argument(std::string(name) + ": [" + std::to_string(linear->n()) + ", " +
                              std::to_string(linear->k()) + "]; allowed is [" +
                              (n < 0 ? std::string("any") : std::to_string(n)) + ", " + std::to_string(k) + "]");
}

void fits_mlp(const DenseMlp& mlp, int64_t hidden) {
  fits("gate_proj", mlp.gate, -1, hidden);
  fits("up_proj", mlp.up, mlp.gate->n(), hidden);
  fits("down_proj", mlp.down, hidden, mlp.gate->n());
}

void require(bool holds, const char* name, int64_t value, const std::string& allowed) {
  if (!holds) throw std::invalid_argument(std::string(name) + ": " + std::to_string(value) + "; allowed is " + allowed);
}

double now_s() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Decoder::Decoder(const Ops& ops, LinearRunner& linear, PagedAttention& attention, Rotation rotation, DecoderShape shape)
    : ops_(ops), linear_(linear), attention_(attention), rotation_(rotation), shape_(shape) {
  require(shape.hidden >= 1, "hidden", shape.hidden, "1 or more");
  if (attention.bf16_rows() != shape.is_bf16)
    throw std::invalid_argument(std::string("is_bf16: ") + (shape.is_bf16 ? "true" : "false") +
                                "; allowed is what the attention's rows are");
}

void Decoder::add_layer(const DecoderLayer& layer) {
  const int64_t kv = static_cast<int64_t>(shape_.kv_heads) * shape_.head_dim;
  fits("q_proj", layer.q, q_width(), shape_.hidden);
  fits("k_proj", layer.k, kv, shape_.hidden);
  fits("v_proj", layer.v, kv, shape_.hidden);
  fits("o_proj", layer.o, shape_.hidden, q_width());
  if (layer.router != nullptr) fits("router", layer.router, -1, shape_.hidden);
  layers_.push_back({layer});
}

Decoder::Layer& Decoder::layer(int index) {
  require(index >= 0 && static_cast<size_t>(index) < layers_.size(), "layer", index,
          "0 to " + std::to_string(static_cast<int64_t>(layers_.size()) - 1));
  return layers_[static_cast<size_t>(index)];
}

void Decoder::set_experts(int index, const Task& experts) {
  if (layer(index).router == nullptr) throw std::invalid_argument("experts: allowed in layers with a router");
  layer(index).experts = &experts;
}

void Decoder::set_dense(int index, const DenseMlp& mlp) {
  if (layer(index).router != nullptr) throw std::invalid_argument("dense MLP: allowed in layers without a router");
  fits_mlp(mlp, shape_.hidden);
  layer(index).dense = mlp;
}

void Decoder::set_shared(int index, const SharedExpert& shared) {
  if (layer(index).router == nullptr) throw std::invalid_argument("shared expert: allowed in layers with a router");
  fits_mlp(shared.mlp, shape_.hidden);
  fits("shared_expert_gate", shared.gate, 1, shape_.hidden);
  layer(index).shared = shared;
}

void Decoder::set_head(const void* final_norm, const PackedLinear& lm_head, const ExpertMemory& memory) {
  fits("lm_head", &lm_head, -1, shape_.hidden);
  final_norm_ = final_norm;
  lm_head_ = &lm_head;
  memory_ = memory;
}

uint8_t* Decoder::rows(Arena& arena, int64_t tokens, int64_t width, int64_t element_bytes) {
  const auto bytes = static_cast<size_t>(tokens * width * element_bytes);
  if (bytes > arena.bytes()) arena = Arena(bytes + bytes / 2);
  return arena.data();
}

void Decoder::attend(int index, const DecoderStep& step) {
  const Layer& found = layer(index);
  mix(index, found, step);
  route(found, step);
}

void Decoder::norm(const DecoderStep& s, const void* delta, int64_t stride, const void* weight, void* out) const {
  const int64_t hidden = shape_.hidden;
  Norm n{s.residual, hidden, nullptr, 0, weight, shape_.weight_bf16, out, hidden, s.tokens, hidden, shape_.eps};
  if (delta != nullptr) {
    n.x = delta;
    n.x_stride = stride;
    n.residual = s.residual;
    n.residual_stride = hidden;
  }
  ops_.norm(n, shape_.is_bf16);
}

void Decoder::mix(int index, const Layer& layer, const DecoderStep& s) {
  const bool bf16 = shape_.is_bf16;
  const int64_t q = q_width();
  const int64_t kv = static_cast<int64_t>(shape_.kv_heads) * shape_.head_dim;
  const int64_t width = q + 2 * kv;
  uint8_t* x = rows(hidden_, s.tokens, shape_.hidden, element());
  uint8_t* qkv = rows(qkv_, s.tokens, width, element());
  uint8_t* attended = rows(attended_, s.tokens, q, element());
  uint8_t* k_rows = qkv + q * element();
  uint8_t* v_rows = k_rows + kv * element();
  norm(s, s.delta, s.delta_stride, layer.input_norm, x);
  linear_.run({{layer.q, qkv, width}, {layer.k, k_rows, width}, {layer.v, v_rows, width}},
              {x, shape_.hidden, s.tokens, bf16, bf16, s.slots});
  ops_.qk_norm_rope(
      {qkv, width, k_rows, width, layer.q_norm, layer.k_norm, shape_.weight_bf16, rotation_.cos, rotation_.sin,
       s.positions, rotation_.rows, s.tokens, shape_.heads, shape_.kv_heads, shape_.head_dim, shape_.eps},
      bf16);
  attention_.forward(index, s.tokens, {qkv, width}, {k_rows, width}, {v_rows, width}, {attended, q});
}

void Decoder::route(const Layer& layer, const DecoderStep& s) {
  const bool bf16 = shape_.is_bf16;
  uint8_t* x = rows(hidden_, s.tokens, shape_.hidden, element());
  linear_.run({{layer.o, x, shape_.hidden}}, {attended_.data(), q_width(), s.tokens, bf16, bf16, s.slots});
  norm(s, x, shape_.hidden, layer.post_norm, s.hidden);
  if (layer.router == nullptr) return;
  const int64_t experts = layer.router->n();
  uint8_t* logits = rows(logits_, s.tokens, experts, 4);
  linear_.run({{layer.router, logits, experts}}, {s.hidden, shape_.hidden, s.tokens, bf16, false, s.slots});
  ops_.router_topk(
      {logits, experts, s.tokens, static_cast<int>(experts), shape_.top_k, shape_.normalise, s.ids, s.weights}, false);
}

void Decoder::dense(const DenseMlp& mlp, const DecoderStep& s) {
  const bool bf16 = shape_.is_bf16;
  const int64_t inner = mlp.gate->n();
  uint8_t* gate = rows(gate_, s.tokens, inner, element());
  uint8_t* up = rows(up_, s.tokens, inner, element());
  linear_.run({{mlp.gate, gate, inner}, {mlp.up, up, inner}}, {s.hidden, shape_.hidden, s.tokens, bf16, bf16, s.slots});
  ops_.silu_mul({gate, inner, up, inner, gate, inner, s.tokens, inner}, bf16);
  linear_.run({{mlp.down, rows(mlp_, s.tokens, shape_.hidden, element()), shape_.hidden}},
              {gate, inner, s.tokens, bf16, bf16, s.slots});
}

void Decoder::add_shared(const SharedExpert& shared, const DecoderStep& s) {
  const bool bf16 = shape_.is_bf16;
  const int64_t hidden = shape_.hidden;
  auto* gate = reinterpret_cast<float*>(rows(logits_, s.tokens, 1, 4));
  linear_.run({{shared.gate, gate, 1}}, {s.hidden, hidden, s.tokens, bf16, false, s.slots});
  dense(shared.mlp, s);
  ops_.add_gated({memory_.out, hidden, mlp_.data(), hidden, gate, mlp_.data(), hidden, s.tokens, hidden}, bf16);
}

// `keep` rises, so that a row moves forward over rows that have moved already.
void Decoder::drop_rows(const ModelStep& s, DecoderStep& rest) {
  const auto pull = [&](void* data, int64_t width) {
    auto* bytes = static_cast<uint8_t*>(data);
    for (int64_t i = 0; i < s.kept; ++i) std::memmove(bytes + i * width, bytes + s.keep[i] * width, width);
  };
  pull(attended_.data(), q_width() * element());
  pull(s.residual, shape_.hidden * element());
  if (s.slots != nullptr) {
    kept_slots_.assign(static_cast<size_t>(s.kept), 0);
    for (int64_t i = 0; i < s.kept; ++i) kept_slots_[static_cast<size_t>(i)] = s.slots[s.keep[i]];
    rest.slots = kept_slots_.data();
  }
  rest.tokens = s.kept;
}

void Decoder::check(const ModelStep& s) const {
  if (lm_head_ == nullptr) throw std::invalid_argument("run: allowed behind set_head");
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (layers_[i].experts == nullptr && layers_[i].dense.down == nullptr)
      throw std::invalid_argument("layer " + std::to_string(i) +
                                  ": no MLP; allowed is run behind set_experts or set_dense");
    if (layers_[i].experts != nullptr)
      require(s.tokens <= memory_.max_rows, "tokens", s.tokens, "the experts' " + std::to_string(memory_.max_rows));
  }
  if (s.keep == nullptr) return;
  require(s.kept >= 1 && s.kept <= s.tokens, "kept", s.kept, "1 to the tokens' " + std::to_string(s.tokens));
  for (int64_t i = 0; i < s.kept; ++i) {
    const int64_t least = i == 0 ? 0 : s.keep[i - 1] + 1;
    require(s.keep[i] >= least && s.keep[i] < s.tokens, "keep", s.keep[i],
            "rising, " + std::to_string(least) + " to " + std::to_string(s.tokens - 1));
  }
}

double Decoder::run_experts(int index, const Task& experts, const DecoderStep& s) {
  const auto count = static_cast<size_t>(s.tokens);
  *memory_.bsz = static_cast<int32_t>(s.tokens);
  if (s.slots == nullptr)
    std::memset(memory_.slots, 0, count * sizeof(int32_t));
  else
    std::memcpy(memory_.slots, s.slots, count * sizeof(int32_t));
  const double began = now_s();
  try {
    experts.run();
  } catch (const std::exception& error) {
    throw ExpertsFailed(index, error.what());
  }
  return now_s() - began;
}

double Decoder::run(const ModelStep& s) {
  check(s);
  DecoderStep step{s.tokens, s.residual, nullptr,     shape_.hidden,  s.positions,
                   s.slots,  nullptr,    memory_.ids, memory_.weights};
  double experts_s = 0;
  int64_t* seen = s.seen;
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    const int index = static_cast<int>(i);
    mix(index, layer, step);
    if (i + 1 == layers_.size() && s.keep != nullptr) drop_rows(s, step);
    const bool sparse = layer.experts != nullptr;
    step.hidden = sparse ? memory_.hidden : rows(hidden_, step.tokens, shape_.hidden, element());
    route(layer, step);
    if (sparse) {
      experts_s += run_experts(index, *layer.experts, step);
      step.delta = memory_.out;
      if (layer.shared.gate != nullptr) {
        add_shared(layer.shared, step);
        step.delta = mlp_.data();
      }
    } else {
      dense(layer.dense, step);
      step.delta = mlp_.data();
    }
    if (sparse && seen != nullptr) {
      const int64_t count = step.tokens * shape_.top_k;
      std::memcpy(seen, memory_.ids, static_cast<size_t>(count) * sizeof(int64_t));
      seen += count;
    }
  }
  norm(step, step.delta, shape_.hidden, final_norm_, s.hidden);
  if (s.greedy == nullptr) return experts_s;
  const int64_t vocabulary = lm_head_->n();
  const bool bf16 = shape_.is_bf16;
  uint8_t* logits = rows(head_, step.tokens, vocabulary, element());
  linear_.run({{lm_head_, logits, vocabulary}}, {s.hidden, shape_.hidden, step.tokens, bf16, bf16, nullptr});
  ops_.argmax({logits, vocabulary, step.tokens, vocabulary, s.greedy}, bf16);
  return experts_s;
}

}  // namespace ktserve
