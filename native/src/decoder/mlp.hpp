// Dense: down(silu(gate(x)) * up(x)). Sparse: router ─ routed experts (+ a shared expert).
#pragma once

#include "decoder/part.hpp"
#include "runtime/task.hpp"

namespace ktserve {

class DensePart : public MlpPart {
 public:
  // Throws std::invalid_argument for projections that do not fit each other.
  DensePart(const PackedLinear& gate, const PackedLinear& up, const PackedLinear& down);

  void check(const Workspace& work) const override;
  const void* output(Workspace& work, const PartRows& rows, const void* x) const override;

 private:
  const PackedLinear& gate_;
  const PackedLinear& up_;
  const PackedLinear& down_;
};

// The memory that experts read and write (engine/experts/base.py); layers may share it.
struct ExpertMemory {
  int32_t* bsz;
  int64_t* ids;    // [max_rows, top_k]
  float* weights;  // [max_rows, top_k]
  int32_t* slots;
  void* hidden;
  const void* out;
  int64_t max_rows;
};

// An expert that takes every row.
struct SharedExpert {
  const DensePart* mlp;      // null: there is none
  const PackedLinear* gate;  // to one value, through a sigmoid; null: it is added as it is
};

class SparsePart : public MlpPart {
 public:
  // `experts`: bound to the memory; null: they are computed elsewhere. Throws std::invalid_argument for a router
  // that does not fit its gate.
  SparsePart(const PackedLinear& gate, const Router& router, const ExpertMemory& memory, const Task* experts,
             const SharedExpert& shared);

  void check(const Workspace& work) const override;
  bool complete() const override { return experts_ != nullptr; }
  void* input() const override { return memory_.hidden; }
  int64_t max_rows() const override { return memory_.max_rows; }
  void route(Workspace& work, const PartRows& rows, const void* x) const override;
  Chosen chosen() const override { return {memory_.ids, router_.top_k}; }
  const void* output(Workspace& work, const PartRows& rows, const void* x) const override;

 private:
  void run_experts(Workspace& work, const PartRows& rows) const;

  const PackedLinear& gate_;  // to the logits of all experts
  Router router_;
  ExpertMemory memory_;
  const Task* experts_;
  SharedExpert shared_;
};

}  // namespace ktserve
