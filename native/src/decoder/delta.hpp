// A gated delta net: projections to q, k, v, z and to the gates ─ convolution, delta rule, gated norm │ out projection.
#pragma once

#include <vector>

#include "decoder/part.hpp"
#include "delta/delta.hpp"

namespace ktserve {

struct DeltaWeights {
  std::vector<const PackedLinear*> wide;   // to q, k, v, z by head of keys; or to [q | k | v] and to z
  std::vector<const PackedLinear*> gates;  // to b, a by head of keys; or to b and to a. Computed in float32
  const PackedLinear* out;
  DeltaVectors vectors;
};

class DeltaPart : public AttentionPart {
 public:
  // `layer`: of the delta net's. Throws std::invalid_argument for what does not fit it.
  DeltaPart(DeltaNet& delta, int layer, const DeltaWeights& weights);

  void check(const Workspace& work) const override;
  int64_t mixed_width() const override { return values_; }
  uint8_t* mix(Workspace& work, const PartRows& rows, const void* x) const override;
  void project(Workspace& work, const PartRows& rows, const void* mixed, void* out) const override;

 private:
  DeltaNet& delta_;
  int layer_;
  DeltaWeights weights_;
  int64_t values_;
};

}  // namespace ktserve
