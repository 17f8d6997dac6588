#include "decoder/mlp.hpp"

#include <chrono>
#include <cstring>

namespace ktserve {
namespace {

double now_s() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

}  // namespace

DensePart::DensePart(const PackedLinear& gate, const PackedLinear& up, const PackedLinear& down)
    : gate_(gate), up_(up), down_(down) {
  require_shape("up_proj", up, gate.n(), gate.k());
  require_shape("down_proj", down, -1, gate.n());
}

void DensePart::check(const Workspace& work) const {
  require_shape("gate_proj", gate_, -1, work.hidden);
  require_shape("down_proj", down_, work.hidden, gate_.n());
}

const void* DensePart::output(Workspace& work, const PartRows& rows, const void* x) const {
  const int64_t inner = gate_.n();
  uint8_t* gate = work.rows(Buffer::gate, rows.tokens, inner);
  uint8_t* up = work.rows(Buffer::up, rows.tokens, inner);
  work.project({{&gate_, gate, inner}, {&up_, up, inner}}, x, work.hidden, rows);
  work.ops.silu_mul({gate, inner, up, inner, gate, inner, rows.tokens, inner}, work.is_bf16);
  uint8_t* delta = work.rows(Buffer::delta, rows.tokens, work.hidden);
  work.project({{&down_, delta, work.hidden}}, gate, inner, rows);
  return delta;
}

SparsePart::SparsePart(const PackedLinear& gate, const Router& router, const ExpertMemory& memory, const Task* experts,
                       const SharedExpert& shared)
    : gate_(gate), router_(router), memory_(memory), experts_(experts), shared_(shared) {
  router.check(gate.n());
  if (shared.gate == nullptr) return;
  if (shared.mlp == nullptr) throw std::invalid_argument("shared_gate: allowed beside a shared expert");
  require_shape("shared_expert_gate", *shared.gate, 1, gate.k());
}

void SparsePart::check(const Workspace& work) const {
  require_shape("router", gate_, -1, work.hidden);
  if (shared_.mlp != nullptr) shared_.mlp->check(work);
}

void SparsePart::route(Workspace& work, const PartRows& rows, const void* x) const {
  require(rows.tokens <= memory_.max_rows, "tokens", rows.tokens, "the experts' " + std::to_string(memory_.max_rows));
  const float* logits = work.logits(gate_, x, rows);
  const auto experts = static_cast<int>(gate_.n());
  work.ops.router_topk({logits, experts, rows.tokens, experts, router_, memory_.ids, memory_.weights}, false);
}

void SparsePart::run_experts(Workspace& work, const PartRows& rows) const {
  const auto count = static_cast<size_t>(rows.tokens);
  *memory_.bsz = static_cast<int32_t>(rows.tokens);
  if (rows.slots == nullptr)
    std::memset(memory_.slots, 0, count * sizeof(int32_t));
  else
    std::memcpy(memory_.slots, rows.slots, count * sizeof(int32_t));
  const double began = now_s();
  try {
    experts_->run();
  } catch (const std::exception& error) {
    throw ExpertsFailed(rows.layer, error.what());
  }
  work.experts_s += now_s() - began;
}

const void* SparsePart::output(Workspace& work, const PartRows& rows, const void* x) const {
  run_experts(work, rows);
  if (shared_.mlp == nullptr) return memory_.out;
  const int64_t hidden = work.hidden;
  const float* gate = shared_.gate == nullptr ? nullptr : work.logits(*shared_.gate, x, rows);
  const void* values = shared_.mlp->output(work, rows, x);
  uint8_t* delta = work.rows(Buffer::delta, rows.tokens, hidden);
  work.ops.add_gated({memory_.out, hidden, values, hidden, gate, delta, hidden, rows.tokens, hidden}, work.is_bf16);
  return delta;
}

}  // namespace ktserve
