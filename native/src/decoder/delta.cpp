#include "decoder/delta.hpp"

namespace ktserve {

DeltaPart::DeltaPart(DeltaNet& delta, int layer, const DeltaWeights& weights)
    : delta_(delta), layer_(layer), weights_(weights), values_(delta.shape().value_heads * delta.shape().value_dim) {
  const DeltaShape& s = delta.shape();
  require(layer >= 0 && layer < s.layers, "layer", layer, "0 to " + std::to_string(s.layers - 1));
  const auto fit = [&](const char* name, const std::vector<const PackedLinear*>& given, bool fused, int64_t first,
                       int64_t second) {
    const size_t count = fused ? 1 : 2;
    require(given.size() == count, name, static_cast<int64_t>(given.size()), std::to_string(count) + " projections");
    require_shape(name, *given[0], fused ? first + second : first, given[0]->k());
    if (!fused) require_shape(name, *given[1], second, given[0]->k());
  };
  fit("wide", weights.wide, s.fused, s.channels(), values_);
  fit("gates", weights.gates, s.fused_gates, s.value_heads, s.value_heads);
  require_shape("out_proj", *weights.out, -1, values_);
}

void DeltaPart::check(const Workspace& work) const {
  for (const PackedLinear* each : weights_.wide) require_shape("wide", *each, each->n(), work.hidden);
  for (const PackedLinear* each : weights_.gates) require_shape("gates", *each, each->n(), work.hidden);
  require_shape("out_proj", *weights_.out, work.hidden, values_);
}

uint8_t* DeltaPart::mix(Workspace& work, const PartRows& rows, const void* x) const {
  const DeltaShape& s = delta_.shape();
  const int64_t width = s.channels() + values_, gates_width = 2 * s.value_heads;
  uint8_t* wide = work.rows(Buffer::projected, rows.tokens, width);
  uint8_t* z = s.fused ? wide : wide + s.channels() * work.element();
  auto* gates = reinterpret_cast<float*>(work.rows(Buffer::logits, rows.tokens, gates_width, sizeof(float)));
  float* a = s.fused_gates ? gates : gates + s.value_heads;
  std::vector<LinearCall> calls{{weights_.wide[0], wide, width}}, narrow{{weights_.gates[0], gates, gates_width}};
  if (!s.fused) calls.push_back({weights_.wide[1], z, width});
  if (!s.fused_gates) narrow.push_back({weights_.gates[1], a, gates_width});
  work.project(calls, x, work.hidden, rows);
  work.linear.run(narrow, {x, work.hidden, rows.tokens, work.is_bf16, false, rows.slots});
  uint8_t* mixed = work.rows(Buffer::mixed, rows.tokens, values_);
  delta_.forward(layer_, rows.tokens, weights_.vectors,
                 {wide, width, z, width, gates, a, gates_width, mixed, values_, work.is_bf16});
  return mixed;
}

void DeltaPart::project(Workspace& work, const PartRows& rows, const void* mixed, void* out) const {
  work.project({{weights_.out, out, work.hidden}}, mixed, values_, rows);
}

}  // namespace ktserve
