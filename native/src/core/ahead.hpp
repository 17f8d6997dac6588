// Reading weights before they are needed. Included by files compiled for one instruction set, hence internal linkage.
#pragma once

#include <xmmintrin.h>

#include <cstdint>

#include "core/format.hpp"

namespace ktserve {
namespace {

// A tile's part of the work on some panels: blocks [first, first + count) of k for its rows, of `tiles` tiles tile
// number `index`.
struct Part {
  int64_t first, count;
  int64_t index, tiles;
};

// Fetches the next panels, scales and all, into the second-level cache while these are computed: `advance`, called
// `Steps` times a block, takes its share of the bytes, `Lines` cache lines or fewer. Each tile of rows fetches an equal
// part, so that memory and arithmetic never wait for one another by turns. No loop and no branch.
template <int Steps, int Lines>
struct Ahead {
  const uint8_t* at;
  int64_t step;
  // `next`: the next panels, `bytes` of them for `blocks` of k.
  Ahead(const uint8_t* next, int64_t bytes, int64_t blocks, const Part& part)
      : at(next), step(bytes / (blocks * Steps * part.tiles)) {
    at += (part.first * part.tiles + part.index * part.count) * Steps * step;
  }
  inline __attribute__((always_inline)) void advance() {
#pragma GCC unroll 16
    for (int i = 0; i < Lines; ++i) _mm_prefetch(at + 64 * i, _MM_HINT_T1);
    at += step;
  }
};

// Cache lines of an advance, `steps` of them a block, over `panels` panels; half as many if tiles of rows share them.
template <Format F>
constexpr int lines_of(int panels, int steps, bool alone) {
  const int64_t block = info(F).quant_bytes + info(F).meta_bytes * kBlock / info(F).unit;
  return static_cast<int>((panels * block / (alone ? steps : 2 * steps) + 63) / 64);
}

}  // namespace
}  // namespace ktserve
