// Products of bf16 rows and panels on AMX tiles. Included by files compiled for AMX only, hence internal linkage.
//
//     A (activations)         B (weights, as packed)        C, float32
//     tmm4: rows 0-15         tmm6: panel 0, 32 k           tmm0 tmm1
//     tmm5: rows 16-31        tmm7: panel 1, 32 k           tmm2 tmm3        rows x 16 outputs each
//
// 32 k at a time: 4 loads, 4 products. A panel's 16 consecutive vectors are B as the instruction wants it. The products
// hide the loads as long as one of A and B comes from the first-level cache; with both from the second level a quarter
// of the time is lost. So many rows are computed by parts of k:
//
//     for each pair of panels, for each part of k (B: up to 32 KB, first level), for each group of up to 32 rows:
//         C += A x B, and beside it a share of what prepares the next B                     vector unit, memory
//
// A is loaded as a stream, so that it does not push B out of the first-level cache. With one group C stays in its tiles
// for all of k; with more it waits in `out`, exactly, for its next part: every output is one chain of additions in the
// order of k, however many rows and parts there are.
#pragma once

#include <cstdint>

#include "core/format.hpp"
#include "core/kernels.hpp"
#include "core/tiles.hpp"

#ifdef NONT
#undef TILE_STREAM
#define TILE_STREAM TILE_LOAD
#endif
#ifdef NODOT
#undef TILE_DOT_BF16
#define TILE_DOT_BF16(...)
#endif
#ifdef NOLD
#undef TILE_STREAM
#define TILE_STREAM(...)
#undef TILE_LOAD
#define TILE_LOAD(...)
#endif
namespace ktserve {
namespace {

constexpr int64_t kGroup = 32;        // rows
constexpr int64_t kTileBytes = 1024;  // 32 k of a panel

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

enum class Start { zero, resume, keep };  // C begins at zero, with what waits in `out`, with what the tiles hold

struct Product {
  const uint8_t* w;  // first block of a panel
  int64_t panel_bytes;
  const uint8_t* x;
  int64_t stride;
  int64_t blocks;  // of 32 k
  float* out;
  int64_t out_bytes;  // from row to row
  Start start;
  bool ends;  // C goes to `out`, otherwise it stays in the tiles
};

// Beside: called twice for every block, with work for the vector unit or the memory.
template <class Beside>
inline __attribute__((always_inline)) void two_by_two(const Product& c, Beside&& beside) {
  float* lower = c.out + 16 * (c.out_bytes / 4);
  if (c.start == Start::zero) {
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
  } else if (c.start == Start::resume) {
    TILE_LOAD(0, c.out, c.out_bytes);
    TILE_LOAD(1, c.out + 16, c.out_bytes);
    TILE_LOAD(2, lower, c.out_bytes);
    TILE_LOAD(3, lower + 16, c.out_bytes);
  }
  for (int64_t b = 0; b < c.blocks; ++b) {
    TILE_LOAD(6, c.w + b * kTileBytes, 64);
    TILE_STREAM(4, c.x + b * 64, c.stride);
    TILE_DOT_BF16(0, 4, 6);
    TILE_LOAD(7, c.w + c.panel_bytes + b * kTileBytes, 64);
    TILE_DOT_BF16(1, 4, 7);
    beside();
    TILE_STREAM(5, c.x + 16 * c.stride + b * 64, c.stride);
    TILE_DOT_BF16(2, 5, 6);
    TILE_DOT_BF16(3, 5, 7);
    beside();
  }
  if (!c.ends) return;
  TILE_STORE(0, c.out, c.out_bytes);
  TILE_STORE(1, c.out + 16, c.out_bytes);
  TILE_STORE(2, lower, c.out_bytes);
  TILE_STORE(3, lower + 16, c.out_bytes);
}

// Up to 16 rows.
template <class Beside>
inline __attribute__((always_inline)) void one_by_two(const Product& c, Beside&& beside) {
  if (c.start == Start::zero) {
    TILE_ZERO(0);
    TILE_ZERO(1);
  } else if (c.start == Start::resume) {
    TILE_LOAD(0, c.out, c.out_bytes);
    TILE_LOAD(1, c.out + 16, c.out_bytes);
  }
  for (int64_t b = 0; b < c.blocks; ++b) {
    TILE_STREAM(4, c.x + b * 64, c.stride);
    TILE_LOAD(6, c.w + b * kTileBytes, 64);
    beside();
    TILE_DOT_BF16(0, 4, 6);
    TILE_LOAD(7, c.w + c.panel_bytes + b * kTileBytes, 64);
    TILE_DOT_BF16(1, 4, 7);
    beside();
  }
  if (!c.ends) return;
  TILE_STORE(0, c.out, c.out_bytes);
  TILE_STORE(1, c.out + 16, c.out_bytes);
}

// The odd last panel: one B, both halves of the rows.
template <class Beside>
inline __attribute__((always_inline)) void any_by_one(const Product& c, bool halves, Beside&& beside) {
  float* lower = c.out + 16 * (c.out_bytes / 4);
  if (c.start == Start::zero) {
    TILE_ZERO(0);
    TILE_ZERO(2);
  } else if (c.start == Start::resume) {
    TILE_LOAD(0, c.out, c.out_bytes);
    if (halves) TILE_LOAD(2, lower, c.out_bytes);
  }
  for (int64_t b = 0; b < c.blocks; ++b) {
    beside();
    TILE_LOAD(6, c.w + b * kTileBytes, 64);
    TILE_STREAM(4, c.x + b * 64, c.stride);
    TILE_DOT_BF16(0, 4, 6);
    beside();
    if (halves) {
      TILE_STREAM(5, c.x + 16 * c.stride + b * 64, c.stride);
      TILE_DOT_BF16(2, 5, 6);
    }
  }
  if (!c.ends) return;
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

// Blocks [first, first + count) of a pair of panels, of which the second may not exist.
struct Span {
  int64_t panel, first, count;
};

// All rows and panels of a call by parts of k. `Source` holds the bf16 form of one part and makes that of the next:
//
//   aim(span, then, slots)   the next part is `span`, to be made by so many calls of slot(); `then` follows it
//   slot()                   makes a share of it
//   turn()                   makes what is left of it; w() and panel_bytes() are now those of this part
//   finish(out, stride, rows, panels)   behind the last part of a pair: sums to results
template <class Source>
void dot_by_parts(const DotArgs& a, Source& source) {
  const int64_t blocks = padded_k(a.k) / kBlock;
  // Equal groups but for the last: 36 rows are 18 + 18, since few rows have too few sums under way.
  const int64_t groups = (a.rows + kGroup - 1) / kGroup;
  const int64_t most = (a.rows + groups - 1) / groups;
  const int64_t most_blocks = Source::part_blocks(groups);
  const int64_t parts = (blocks + most_blocks - 1) / most_blocks;
  const auto span = [&](int64_t panel, int64_t part) {
    panel += part / parts * 2;
    part %= parts;
    const int64_t first = blocks * part / parts;
    return Span{panel, first, blocks * (part + 1) / parts - first};
  };
  int64_t configured = 0;
  source.aim(span(0, 0), span(0, 1), 1);
  source.turn();
  for (int64_t p = 0; p < a.panels; p += 2) {
    for (int64_t part = 0; part < parts; ++part) {
      const Span now = span(p, part);
      const bool last = part + 1 == parts;
      source.aim(span(p, part + 1), span(p, part + 2), 2 * groups * now.count);
      for (int64_t row = 0; row < a.rows; row += most) {
        const int64_t rows = a.rows - row < most ? a.rows - row : most;
        if (rows != configured) configure(rows < 16 ? rows : 16, rows - 16);
        configured = rows;
        float* out = a.out + row * a.out_stride + p * kPanel;
        const Start start = part == 0 ? Start::zero : groups == 1 ? Start::keep : Start::resume;
        const Product c{source.w(),
                        source.panel_bytes(),
                        a.x + row * a.x_stride + now.first * 64,
                        a.x_stride,
                        now.count,
                        out,
                        a.out_stride * 4,
                        start,
                        last || groups > 1};
        product(c, rows, p + 1 < a.panels, [&]() __attribute__((always_inline)) { source.slot(); });
        if (last) source.finish(out, a.out_stride, rows, a.panels - p < 2 ? 1 : 2);
      }
      source.turn();
    }
  }
  TILE_RELEASE();
}

}  // namespace
}  // namespace ktserve
