// Products of bf16 rows and panels on AMX tiles. Included by files compiled for AMX only, hence internal linkage.
//
//     A (activations)         B (weights, as packed)        C, float32
//     tmm4: rows 0-15         tmm6: panel 0, 32 k           tmm0 tmm1
//     tmm5: rows 16-31        tmm7: panel 1, 32 k           tmm2 tmm3        rows x 16 outputs each
//
// 32 k at a time: 4 loads, 4 products. A panel's 16 consecutive vectors are B as the instruction wants it. Loads cost a
// quarter more than the products alone if one of A and B comes from the first-level cache, and twice that with both
// from the second. So many rows are computed by parts of k (all of it, if that is little):
//
//     for each pair of panels, for each part of k (B: first level), for each group of up to 32 rows:
//         C += A x B, and beside it a share of what prepares the next B                     vector unit, memory
//
// A is loaded as a stream, so that it does not push B out of the first-level cache. C waits in `out`, exactly, for its
// next part: every output is one chain of additions in the order of k, however many rows and parts there are.
#pragma once

#include <cstdint>

#include "gemm/kernels.hpp"
#include "packing/format.hpp"
#include "runtime/fetch.hpp"
#include "simd/tiles.hpp"

namespace ktserve {
namespace {

constexpr int64_t kGroup = 32;        // rows
constexpr int64_t kTileBytes = 1024;  // 32 k of a panel
constexpr int64_t kPart = 32;         // blocks of k that are one part

// Rows of the first and second half of a tile; an unused half is configured with one row and never touched.
inline void configure(int64_t first, int64_t second) {
  TileConfig config;
  for (int t = 0; t < 8; ++t) config.row_bytes[t] = 64;
  const uint8_t one = static_cast<uint8_t>(first);
  const uint8_t two = static_cast<uint8_t>(second > 0 ? second : 1);
  config.rows[0] = config.rows[1] = config.rows[4] = one;
  config.rows[2] = config.rows[3] = config.rows[5] = two;
  config.rows[6] = config.rows[7] = 16;
  TILE_CONFIG(&config);
}

struct Product {
  const uint8_t* w;     // blocks of a panel, block b at b & mask
  int64_t block_bytes;  // from block to block
  int64_t panel_bytes;  // from panel to panel
  int64_t first, mask;
  const uint8_t* x;
  int64_t stride;
  int64_t blocks;  // of 32 k
  float* out;
  int64_t out_bytes;  // from row to row
  bool begins;        // C starts at zero, otherwise at `out`
  DotTail tail = {};  // behind the last block

  const uint8_t* block(int64_t b) const { return w + ((first + b) & mask) * block_bytes; }
};

inline void nothing_beside(int64_t, int) {}

// A block of two panels, and of the rows at x.
template <class Beside>
inline __attribute__((always_inline)) void two_by_two_block(const uint8_t* w, int64_t panel_bytes, const uint8_t* x,
                                                            int64_t stride, int64_t b, Beside&& beside) {
  TILE_LOAD(6, w, 64);
  TILE_STREAM(4, x, stride);
  TILE_DOT_BF16(0, 4, 6);
  TILE_LOAD(7, w + panel_bytes, 64);
  TILE_DOT_BF16(1, 4, 7);
  beside(b, 0);
  TILE_STREAM(5, x + 16 * stride, stride);
  TILE_DOT_BF16(2, 5, 6);
  TILE_DOT_BF16(3, 5, 7);
  beside(b, 1);
}

template <class Beside>
inline __attribute__((always_inline)) void one_by_two_block(const uint8_t* w, int64_t panel_bytes, const uint8_t* x,
                                                            int64_t stride, int64_t b, Beside&& beside) {
  TILE_STREAM(4, x, stride);
  TILE_LOAD(6, w, 64);
  TILE_DOT_BF16(0, 4, 6);
  beside(b, 0);
  TILE_LOAD(7, w + panel_bytes, 64);
  TILE_DOT_BF16(1, 4, 7);
  beside(b, 1);
}

template <class Beside>
inline __attribute__((always_inline)) void any_by_one_block(const uint8_t* w, const uint8_t* x, int64_t stride,
                                                            bool halves, int64_t b, Beside&& beside) {
  TILE_LOAD(6, w, 64);
  TILE_STREAM(4, x, stride);
  TILE_DOT_BF16(0, 4, 6);
  beside(b, 0);
  beside(b, 1);
  if (halves) {
    TILE_STREAM(5, x + 16 * stride, stride);
    TILE_DOT_BF16(2, 5, 6);
  }
}

// Beside: called with every block and 0, then 1, for work for the vector unit or the memory.
template <class Beside>
inline __attribute__((always_inline)) void two_by_two(const Product& c, Beside&& beside) {
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
    two_by_two_block(c.block(b), c.panel_bytes, c.x + b * 64, c.stride, b, beside);
  }
  for (int64_t b = 0; b < padded_k(c.tail.k) / kBlock; ++b) {
    two_by_two_block(c.tail.w + b * kTileBytes, panel_size(Format::bf16, c.tail.k), c.tail.x + b * 64, c.tail.x_stride,
                     b, nothing_beside);
  }
  TILE_STORE(0, c.out, c.out_bytes);
  TILE_STORE(1, c.out + 16, c.out_bytes);
  TILE_STORE(2, lower, c.out_bytes);
  TILE_STORE(3, lower + 16, c.out_bytes);
}

// Up to 16 rows.
template <class Beside>
inline __attribute__((always_inline)) void one_by_two(const Product& c, Beside&& beside) {
  if (c.begins) {
    TILE_ZERO(0);
    TILE_ZERO(1);
  } else {
    TILE_LOAD(0, c.out, c.out_bytes);
    TILE_LOAD(1, c.out + 16, c.out_bytes);
  }
  for (int64_t b = 0; b < c.blocks; ++b) {
    one_by_two_block(c.block(b), c.panel_bytes, c.x + b * 64, c.stride, b, beside);
  }
  for (int64_t b = 0; b < padded_k(c.tail.k) / kBlock; ++b) {
    one_by_two_block(c.tail.w + b * kTileBytes, panel_size(Format::bf16, c.tail.k), c.tail.x + b * 64, c.tail.x_stride,
                     b, nothing_beside);
  }
  TILE_STORE(0, c.out, c.out_bytes);
  TILE_STORE(1, c.out + 16, c.out_bytes);
}

// The odd last panel: one B, both halves of the rows.
template <class Beside>
inline __attribute__((always_inline)) void any_by_one(const Product& c, bool halves, Beside&& beside) {
  float* lower = c.out + 16 * (c.out_bytes / 4);
  if (c.begins) {
    TILE_ZERO(0);
    TILE_ZERO(2);
  } else {
    TILE_LOAD(0, c.out, c.out_bytes);
    if (halves) TILE_LOAD(2, lower, c.out_bytes);
  }
  for (int64_t b = 0; b < c.blocks; ++b) any_by_one_block(c.block(b), c.x + b * 64, c.stride, halves, b, beside);
  for (int64_t b = 0; b < padded_k(c.tail.k) / kBlock; ++b) {
    any_by_one_block(c.tail.w + b * kTileBytes, c.tail.x + b * 64, c.tail.x_stride, halves, b, nothing_beside);
  }
  TILE_STORE(0, c.out, c.out_bytes);
  if (halves) TILE_STORE(2, lower, c.out_bytes);
}

// One pair of panels (or the last one) and one group of rows.
template <class Beside>
inline __attribute__((always_inline)) void product(const Product& c, int64_t rows, bool pair, Beside&& beside) {
  if (!pair) {
    any_by_one(c, rows > 16, beside);
  } else if (rows > 16) {
    two_by_two(c, beside);
  } else {
    one_by_two(c, beside);
  }
}

// From a panel and a row on.
inline DotTail tail_of(const DotArgs& a, int64_t panel, int64_t row) {
  if (a.tail.w == nullptr) return {};
  return {a.tail.w + panel * panel_size(Format::bf16, a.tail.k), a.tail.k, a.tail.x + row * a.tail.x_stride,
          a.tail.x_stride};
}

// All rows and panels of a call by parts of k. `Source` holds the bf16 form of one part and makes that of the next:
//
//   aim(panel, first, count, steps)   the next part, blocks [first, first + count) of the pair of panels from `panel`
//                                     on, is to be made by so many calls of step()
//   step(b)                           makes a share of it, beside block b of the current part
//   turn()                            makes what is left of it: it is now what w(), block_bytes(), panel_bytes() tell
//   finish(panel, out, stride, rows)  behind the last part of a pair: sums to results
//
// The tail is part of the last part.
template <class Source>
void dot_by_parts(const DotArgs& a, Source& source) {
  const int64_t blocks = padded_k(a.k) / kBlock;
  // Equal groups but for the last: 36 rows are 18 + 18, since few rows have too few sums in flight.
  const int64_t groups = (a.rows + kGroup - 1) / kGroup;
  const int64_t most = (a.rows + groups - 1) / groups;
  const int64_t parts = (blocks + kPart - 1) / kPart;
  const auto first_of = [&](int64_t part) { return blocks * part / parts; };
  int64_t configured = 0;
  source.aim(0, 0, first_of(1), 1);
  source.turn();
  for (int64_t p = 0; p < a.panels; p += 2) {
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t first = first_of(part);
      const int64_t count = first_of(part + 1) - first;
      const bool last = part + 1 == parts;
      if (last) {
        source.aim(p + 2, 0, first_of(1), groups * count);
      } else {
        source.aim(p, first_of(part + 1), first_of(part + 2) - first_of(part + 1), groups * count);
      }
      for (int64_t row = 0; row < a.rows; row += most) {
        const int64_t rows = a.rows - row < most ? a.rows - row : most;
        if (rows != configured) configure(rows < 16 ? rows : 16, rows - 16);
        configured = rows;
        float* out = a.out + row * a.out_stride + p * kPanel;
        const Product c{source.w(),
                        source.block_bytes(),
                        source.panel_bytes(),
                        0,
                        -1,
                        a.x + row * a.x_stride + first * 64,
                        a.x_stride,
                        count,
                        out,
                        a.out_stride * 4,
                        part == 0 && !a.adds,
                        last ? tail_of(a, p, row) : DotTail{}};
        // The lines of C are asked for before they are written: they may lie in memory.
        const int64_t each = part == 0 ? (rows + count - 1) / count : 0;
        int64_t row_of_c = 0;
        product(c, rows, p + 1 < a.panels, [&](int64_t b, int half) __attribute__((always_inline)) {
          if (half == 1) return source.step(b);
          for (int64_t i = 0; i < each && row_of_c < rows; ++i, ++row_of_c) {
            fetch_to_write(out + row_of_c * a.out_stride);
            fetch_to_write(out + row_of_c * a.out_stride + kPanel);
          }
        });
        if (last) source.finish(p, out, a.out_stride, rows);
      }
      source.turn();
    }
  }
  TILE_RELEASE();
}

}  // namespace
}  // namespace ktserve
