// bf16 dot products on AMX tiles; of quantised formats those with many rows are in int8_amx.cpp, all else is AVX-512's.
//
//     A (activations)         B (weights, as packed)        C, float32
//     tmm4: rows 0-15         tmm6: panel 0, 32 k           tmm0 tmm1
//     tmm5: rows 16-31        tmm7: panel 1, 32 k           tmm2 tmm3        rows x 16 outputs each
//
// 32 k at a time: 4 loads, 4 products. A panel's 16 consecutive vectors are B as the instruction wants it.
//
// The rows are split evenly into groups of up to 32; each pair of panels is read from end to end for one group. (Parts
// of k small enough for the first-level cache were tried: C comes and goes more often, and 64 rows get 15% slower.)
// Every number of rows uses these tiles, and adds in the order of k: a row does not see its neighbours.
#include <cstring>

#include "core/amx.hpp"
#include "core/kernels.hpp"
#include "core/tiles.hpp"

namespace ktserve {
namespace {

constexpr int64_t kInt8Rows = 12;  // fewer of a quantised format are faster without tiles

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

struct Pair {
  const uint8_t* w;  // two panels
  int64_t panel_bytes;
  const uint8_t* x;
  int64_t stride;
  int64_t blocks;  // of 32 k
  float* out;
  int64_t out_bytes;  // from row to row
};

void prefetch(const uint8_t* p) {
  for (int i = 0; i < 16; ++i) __builtin_prefetch(p + 64 * i);
}

void two_by_two(const Pair& c) {
  float* lower = c.out + 16 * (c.out_bytes / 4);
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
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

void one_by_two(const Pair& c) {
  TILE_ZERO(0);
  TILE_ZERO(1);
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
void any_by_one(const Pair& c, bool halves) {
  float* lower = c.out + 16 * (c.out_bytes / 4);
  TILE_ZERO(0);
  TILE_ZERO(2);
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
  int64_t configured = 0;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t row = a.rows * group / groups;
    const int64_t rows = a.rows * (group + 1) / groups - row;
    if (rows != configured) configure(least(rows, 16), rows - 16);
    configured = rows;
    for (int64_t p = 0; p < a.panels; p += 2) {
      const Pair pair{a.w + p * size,  size,   a.x + row * a.x_stride,
                      a.x_stride,      blocks, a.out + row * a.out_stride + p * kPanel,
                      a.out_stride * 4};
      if (p + 1 == a.panels) {
        any_by_one(pair, rows > 16);
      } else if (rows > 16) {
        two_by_two(pair);
      } else {
        one_by_two(pair);
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
