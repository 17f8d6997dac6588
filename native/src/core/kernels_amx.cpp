// bf16 dot products on AMX tiles; of quantised formats those with many rows are in int8_amx.cpp, all else is AVX-512's.
//
//     A (activations)         B (weights, as packed)        C, float32
//     tmm4: rows 0-15         tmm6: panel 0, 32 k           tmm0 tmm1
//     tmm5: rows 16-31        tmm7: panel 1, 32 k           tmm2 tmm3        rows x 16 outputs each
//
// 32 k at a time: 4 loads, 4 products. A panel's 16 consecutive vectors are B as the instruction wants it.
//
//     up to 32 rows   memory is the limit: each pair of panels is read from end to end
//     more rows       64 rows, then 256 k, then pairs of panels, then 32 rows: the A part (32 KB) stays in the
//                     first-level cache while panels pass by, and a B part (16 KB) comes from the second level once
//
// C waits in `out`, exactly, between parts of k, so the order of additions is always that of k: the number of rows
// does not show, nor does a row see its neighbours.
#include <cstring>

#include "core/amx.hpp"
#include "core/kernels.hpp"
#include "core/tiles.hpp"

namespace ktserve {
namespace {

#ifndef KT_STEP
#define KT_STEP 16
#endif
constexpr int64_t kStep = KT_STEP;  // blocks of 32 k, with many rows
constexpr int64_t kInt8Rows = 8;    // fewer of a quantised format are faster without tiles

int64_t least(int64_t a, int64_t b) {
  return a < b ? a : b;
}

// Rows of the first and second half of a tile; an unused half is configured with one row and never touched.
void configure(int64_t first, int64_t second) {
  TileConfig config;
  for (int t = 0; t < 8; ++t) config.row_bytes[t] = 64;
  const uint8_t one = static_cast<uint8_t>(first);
  const uint8_t two = static_cast<uint8_t>(second > 0 ? second : 1);
  config.rows[0] = config.rows[1] = config.rows[4] = one;
  config.rows[2] = config.rows[3] = config.rows[5] = two;
  config.rows[6] = config.rows[7] = 16;
  TILE_CONFIG(&config);
}

struct Chunk {
  const uint8_t* w;  // panel 0 at the chunk's first k
  int64_t panel_bytes;
  const uint8_t* x;
  int64_t stride;
  int64_t blocks;  // of 32 k
  float* out;
  int64_t out_bytes;  // from row to row
  bool begins;        // C starts at zero, otherwise at `out`
};

void prefetch(const uint8_t* p) {
  for (int i = 0; i < 16; ++i) __builtin_prefetch(p + 64 * i);
}

void two_by_two(const Chunk& c) {
  float* lower = c.out + 16 * (c.out_bytes / 4);
  if (c.begins) {
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
  } else {
    TILE_LOAD(0, c.out, c.out_bytes);
    TILE_LOAD(1, c.out + 16, c.out_bytes);
    TILE_LOAD(2, lower, c.out_bytes);
    TILE_LOAD(3, lower + 16, c.out_bytes);
  }
  for (int64_t b = 0; b < c.blocks; ++b) {
    TILE_LOAD(6, c.w + b * 1024, 64);
    TILE_LOAD(4, c.x + b * 64, c.stride);
    TILE_DOT_BF16(0, 4, 6);
    TILE_LOAD(7, c.w + c.panel_bytes + b * 1024, 64);
    TILE_DOT_BF16(1, 4, 7);
    TILE_LOAD(5, c.x + 16 * c.stride + b * 64, c.stride);
    TILE_DOT_BF16(2, 5, 6);
    TILE_DOT_BF16(3, 5, 7);
  }
  TILE_STORE(0, c.out, c.out_bytes);
  TILE_STORE(1, c.out + 16, c.out_bytes);
  TILE_STORE(2, lower, c.out_bytes);
  TILE_STORE(3, lower + 16, c.out_bytes);
}

void one_by_two(const Chunk& c) {
  if (c.begins) {
    TILE_ZERO(0);
    TILE_ZERO(1);
  } else {
    TILE_LOAD(0, c.out, c.out_bytes);
    TILE_LOAD(1, c.out + 16, c.out_bytes);
  }
  for (int64_t b = 0; b < c.blocks; ++b) {
    prefetch(c.w + b * 1024 + 8192);
    prefetch(c.w + c.panel_bytes + b * 1024 + 8192);
    TILE_LOAD(4, c.x + b * 64, c.stride);
    TILE_LOAD(6, c.w + b * 1024, 64);
    TILE_DOT_BF16(0, 4, 6);
    TILE_LOAD(7, c.w + c.panel_bytes + b * 1024, 64);
    TILE_DOT_BF16(1, 4, 7);
  }
  TILE_STORE(0, c.out, c.out_bytes);
  TILE_STORE(1, c.out + 16, c.out_bytes);
}

// The odd last panel: one B, both halves of the rows.
void any_by_one(const Chunk& c, bool halves) {
  float* lower = c.out + 16 * (c.out_bytes / 4);
  if (c.begins) {
    TILE_ZERO(0);
    TILE_ZERO(2);
  } else {
    TILE_LOAD(0, c.out, c.out_bytes);
    if (halves) TILE_LOAD(2, lower, c.out_bytes);
  }
  for (int64_t b = 0; b < c.blocks; ++b) {
    TILE_LOAD(6, c.w + b * 1024, 64);
    TILE_LOAD(4, c.x + b * 64, c.stride);
    TILE_DOT_BF16(0, 4, 6);
    if (halves) {
      TILE_LOAD(5, c.x + 16 * c.stride + b * 64, c.stride);
      TILE_DOT_BF16(2, 5, 6);
    }
  }
  TILE_STORE(0, c.out, c.out_bytes);
  if (halves) TILE_STORE(2, lower, c.out_bytes);
}

void dot_bf16(const DotArgs& a) {
  const int64_t size = panel_size(Format::bf16, a.k);
  const int64_t blocks = padded_k(a.k) / kBlock;
  // Equal groups: 48 rows are 24 + 24, since 16 alone have too few sums under way to keep the unit busy.
  const int64_t groups = (a.rows + 31) / 32;
  const int64_t step = groups > 1 ? kStep : blocks;
  int64_t configured = 0;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t row = a.rows * group / groups;
    const int64_t rows = a.rows * (group + 1) / groups - row;
    if (rows != configured) configure(least(rows, 16), rows - 16);
    configured = rows;
    for (int64_t first = 0; first < blocks; first += step) {
      for (int64_t p = 0; p < a.panels; p += 2) {
        const Chunk chunk{a.w + p * size + first * 1024,
                          size,
                          a.x + row * a.x_stride + first * 64,
                          a.x_stride,
                          least(step, blocks - first),
                          a.out + row * a.out_stride + p * kPanel,
                          a.out_stride * 4,
                          first == 0};
        if (p + 1 == a.panels) {
          any_by_one(chunk, rows > 16);
        } else if (rows > 16) {
          two_by_two(chunk);
        } else {
          one_by_two(chunk);
        }
      }
    }
  }
  TILE_RELEASE();
}

void dot(const DotArgs& a) {
  if (a.format == Format::bf16) return dot_bf16(a);
  if (!plain(a.format) && a.rows >= kInt8Rows) return dot_int8_amx(a);
  kernels_avx512().dot(a);
}

}  // namespace

const Kernels& kernels_amx() {
  static const Kernels table = [] {
    Kernels k = kernels_avx512();
    k.isa = Isa::amx;
    k.dot = dot;
    return k;
  }();
  return table;
}

}  // namespace ktserve
