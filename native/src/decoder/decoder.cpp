#include "decoder/decoder.hpp"

#include <cstring>

namespace ktserve {

Decoder::Decoder(const Ops& ops, LinearRunner& linear, int64_t hidden, float eps, bool is_bf16, bool weight_bf16)
    : work_(ops, linear, hidden, eps, is_bf16, weight_bf16) {
  require(hidden >= 1, "hidden", hidden, "1 or more");
}

void Decoder::add_layer(const DecoderLayer& layer) {
  layer.attention->check(work_);
  if (layer.mlp != nullptr) layer.mlp->check(work_);
  layers_.push_back(layer);
}

const DecoderLayer& Decoder::layer(int index) const {
  require(index >= 0 && static_cast<size_t>(index) < layers_.size(), "layer", index,
          "0 to " + std::to_string(static_cast<int64_t>(layers_.size()) - 1));
  return layers_[static_cast<size_t>(index)];
}

void Decoder::set_head(const void* final_norm, const PackedLinear& lm_head) {
  require_shape("lm_head", lm_head, -1, work_.hidden);
  final_norm_ = final_norm;
  lm_head_ = &lm_head;
}

void Decoder::norm(void* residual, const void* x, int64_t stride, const void* weight, int64_t tokens, void* out) const {
  const int64_t hidden = work_.hidden;
  Norm n{residual, hidden, nullptr, 0, weight, work_.weight_bf16, out, hidden, tokens, hidden, work_.eps};
  if (x != nullptr) {
    n.x = x;
    n.x_stride = stride;
    n.residual = residual;
    n.residual_stride = hidden;
  }
  work_.ops.norm(n, work_.is_bf16);
}

uint8_t* Decoder::mix(const DecoderLayer& layer, const PartRows& rows, void* residual, const void* delta,
                      int64_t stride) {
  uint8_t* x = work_.rows(Buffer::rows, rows.tokens, work_.hidden);
  norm(residual, delta, stride, layer.input_norm, rows.tokens, x);
  return layer.attention->mix(work_, rows, x);
}

void Decoder::enter(const DecoderLayer& layer, const PartRows& rows, const uint8_t* mixed, void* residual,
                    void* hidden) {
  uint8_t* delta = work_.rows(Buffer::rows, rows.tokens, work_.hidden);
  layer.attention->project(work_, rows, mixed, delta);
  norm(residual, delta, work_.hidden, layer.post_norm, rows.tokens, hidden);
  if (layer.mlp != nullptr) layer.mlp->route(work_, rows, hidden);
}

void Decoder::attend(int index, const DecoderStep& s) {
  const DecoderLayer& found = layer(index);
  const PartRows rows{index, s.tokens, s.positions, s.slots};
  const uint8_t* mixed = mix(found, rows, s.residual, s.delta, s.delta_stride);
  enter(found, rows, mixed, s.residual, s.hidden);
}

// `keep` rises, so that a row moves forward over rows that have moved already.
void Decoder::drop_rows(const ModelStep& s, uint8_t* mixed, int64_t mixed_width, PartRows& rest) {
  const auto pull = [&](void* data, int64_t width) {
    auto* bytes = static_cast<uint8_t*>(data);
    const int64_t row = width * work_.element();
    for (int64_t i = 0; i < s.kept; ++i) std::memmove(bytes + i * row, bytes + s.keep[i] * row, row);
  };
  pull(mixed, mixed_width);
  pull(s.residual, work_.hidden);
  const auto pick = [&](const auto* from, auto& to) {
    to.clear();
    for (int64_t i = 0; i < s.kept; ++i) to.push_back(from[s.keep[i]]);
    return to.data();
  };
  rest.positions = pick(s.positions, kept_positions_);
  if (s.slots != nullptr) rest.slots = pick(s.slots, kept_slots_);
  rest.tokens = s.kept;
}

void Decoder::check(const ModelStep& s) const {
  if (lm_head_ == nullptr) throw std::invalid_argument("run: allowed behind set_head");
  for (size_t i = 0; i < layers_.size(); ++i) {
    const MlpPart* mlp = layers_[i].mlp;
    if (mlp == nullptr || !mlp->complete())
      throw std::invalid_argument("layer " + std::to_string(i) + ": no MLP; allowed is run where every layer has one");
    require(s.tokens <= mlp->max_rows(), "tokens", s.tokens, "the experts' " + std::to_string(mlp->max_rows()));
  }
  if (s.keep == nullptr) return;
  require(s.kept >= 1 && s.kept <= s.tokens, "kept", s.kept, "1 to the tokens' " + std::to_string(s.tokens));
  for (int64_t i = 0; i < s.kept; ++i) {
    const int64_t least = i == 0 ? 0 : s.keep[i - 1] + 1;
    require(s.keep[i] >= least && s.keep[i] < s.tokens, "keep", s.keep[i],
            "rising, " + std::to_string(least) + " to " + std::to_string(s.tokens - 1));
  }
}

double Decoder::run(const ModelStep& s) {
  check(s);
  PartRows rows{0, s.tokens, s.positions, s.slots};
  const void* delta = nullptr;
  int64_t* seen = s.seen;
  work_.experts_s = 0;
  for (size_t i = 0; i < layers_.size(); ++i) {
    const DecoderLayer& layer = layers_[i];
    rows.layer = static_cast<int>(i);
    uint8_t* mixed = mix(layer, rows, s.residual, delta, work_.hidden);
    if (i + 1 == layers_.size() && s.keep != nullptr) drop_rows(s, mixed, layer.attention->mixed_width(), rows);
    void* x = layer.mlp->input();
    if (x == nullptr) x = work_.rows(Buffer::rows, rows.tokens, work_.hidden);
    enter(layer, rows, mixed, s.residual, x);
    delta = layer.mlp->output(work_, rows, x);
    const Chosen chosen = layer.mlp->chosen();
    if (chosen.ids != nullptr && seen != nullptr) {
      const int64_t count = rows.tokens * chosen.top_k;
      std::memcpy(seen, chosen.ids, static_cast<size_t>(count) * sizeof(int64_t));
      seen += count;
    }
  }
  norm(s.residual, delta, work_.hidden, final_norm_, rows.tokens, s.hidden);
  if (s.greedy == nullptr) return work_.experts_s;
  const int64_t vocabulary = lm_head_->n();
  uint8_t* logits = work_.rows(Buffer::head, rows.tokens, vocabulary);
  rows.slots = nullptr;
  work_.project({{lm_head_, logits, vocabulary}}, s.hidden, work_.hidden, rows);
  work_.ops.argmax({logits, vocabulary, rows.tokens, vocabulary, s.greedy}, work_.is_bf16);
  return work_.experts_s;
}

}  // namespace ktserve
