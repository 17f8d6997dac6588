// What an expert makes of its gate and up, as data: silu(gate) up, or the clamped form of gpt-oss,
//
//   g = min(gate, limit), u = clamp(up, -limit, limit):  g sigmoid(alpha g) (u + 1)
#pragma once

namespace ktserve {

struct Activation {
  float limit = 0;  // 0: silu(gate) up
  float alpha = 1;

  bool clamped() const { return limit != 0; }
};

}  // namespace ktserve
