// Reading weights before they are needed. Included by files compiled for one instruction set, hence internal linkage.
#pragma once

#include <xmmintrin.h>

#include <cstdint>

#include "packing/format.hpp"

namespace ktserve {
namespace {

// A tile's part of the work on some panels: blocks [first, first + count) of k for its rows, of `tiles` tiles tile
// number `index`.
struct Part {
  int64_t first, count;
  int64_t index, tiles;
};

// Fetches the next panels, scales and all, into the second-level cache while these are computed: `advance`, called
// `Steps` times a block, takes its share of the bytes. Each tile of rows fetches an equal part, so that memory and
// arithmetic never wait for one another by turns.
//
// `Lines` is what an advance takes at most: always so many are asked for, without loop or branch, some of them twice.
// With 0 it loops over exactly the lines that are new: measured faster for one row of formats with planes of bits.
template <int Steps, int Lines>
struct Prefetch {
  const uint8_t* at;
  const uint8_t* end;
  int64_t step;
  // `next`: the next panels, `bytes` of them for `blocks` of k.
  Prefetch(const uint8_t* next, int64_t bytes, int64_t blocks, const Part& part)
      : at(next), step(bytes / (blocks * Steps * part.tiles)) {
    at += (part.first * part.tiles + part.index * part.count) * Steps * step;
    end = at;
  }
  inline __attribute__((always_inline)) void advance() {
    if constexpr (Lines == 0) {
      for (end += step; at < end; at += 64) _mm_prefetch(at, _MM_HINT_T1);
      return;
    }
#pragma GCC unroll 16
    for (int i = 0; i < Lines; ++i) _mm_prefetch(at + 64 * i, _MM_HINT_T1);
    at += step;
  }
};

// `Lines` of an advance, `steps` of them a block, for a tile of `rows` by `panels`; half if tiles of rows share them.
template <Format F>
constexpr int lines_of(int rows, int panels, int steps, bool alone) {
  if (rows == 1 && info(F).quant_bytes < 512) return 0;
  const int64_t block = info(F).quant_bytes + info(F).meta_bytes * kBlock / info(F).unit;
  return static_cast<int>((panels * block / (alone ? steps : 2 * steps) + 63) / 64);
}

// The same for `Panels` panels of a quantised format that are computed side by side: the next ones are fetched side by
// side as well, in the order in which they will be read. The caches' own prefetchers then follow both alike;
// while two panels are read and the next two fetched one after the other they keep up with neither (10 to 25% slower on
// a Xeon with AMX). A tile that is alone asks for each line once, which matters as much; tiles of rows that share
// panels ask for some lines twice.
template <Format F, int Panels, bool Alone>
struct PrefetchAbreast {
  static constexpr int64_t meta = info(F).meta_bytes * kBlock / info(F).unit;  // of a block
  static_assert(meta <= 64 && info(F).quant_bytes % 64 == 0);
  static constexpr int64_t lines = Alone ? info(F).quant_bytes / 64 : ((info(F).quant_bytes + meta) / 2 + 63) / 64;
  const uint8_t* at;
  int64_t panel_bytes;
  int64_t step;
  // `next`: the first of the next panels, `panel_bytes` each, of `blocks` of k.
  PrefetchAbreast(const uint8_t* next, int64_t panel_bytes, int64_t blocks, const Part& part)
      : at(next), panel_bytes(panel_bytes), step(Alone ? 64 * lines : panel_bytes / (blocks * part.tiles)) {
    at += Alone ? 64 * (part.first * lines + (part.first * meta + 63) / 64)
                : (part.first * part.tiles + part.index * part.count) * step;
  }
  // Once a block, if alone: one more line where the scales of block `b` are the first to end in a line.
  inline __attribute__((always_inline)) void begin(int64_t b) {
    if (!Alone || (((b + 1) * meta - 1) & 63) >= meta) return;
#pragma GCC unroll 4
    for (int n = 0; n < Panels; ++n) _mm_prefetch(at + n * panel_bytes, _MM_HINT_T1);
    at += 64;
  }
  // Step `j` of a block's 8.
  inline __attribute__((always_inline)) void advance(int j) {
    constexpr int all = Panels * static_cast<int>(lines);
#pragma GCC unroll 16
    for (int i = j * all / 8; i < (j + 1) * all / 8; ++i) {
      _mm_prefetch(at + i % Panels * panel_bytes + i / Panels * 64, _MM_HINT_T1);
    }
    if (j == 7) at += step;
  }
};

}  // namespace
}  // namespace ktserve
