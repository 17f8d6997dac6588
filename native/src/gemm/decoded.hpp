// A block as kernels multiply it that decode blocks first. Included by files compiled for one instruction set, hence
// internal linkage.
#pragma once

#include "packing/format.hpp"

namespace ktserve {
namespace {

// Quants of 8 bits in the vectors of 8-bit formats, and the scales of each group, then the minima.
template <Format F>
struct alignas(64) Decoded {
  uint8_t quants[512];
  float scales[groups_of(F) * (info(F).minima ? 2 : 1)][16];
};

}  // namespace
}  // namespace ktserve
