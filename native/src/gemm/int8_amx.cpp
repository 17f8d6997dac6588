// Dot products of quantised formats with many rows, on int8 tiles: bit for bit what the AVX-512 kernels compute, since
// the integer sums of a block are exact and are scaled and added in the same order. So the number of rows may choose.
//
//   a panel, 16 blocks at a time:  quants -> bytes without bias, scales and minima -> float32       once for all rows
//   16 rows, 16 outputs:
//     tmm0..3 = A x B, one block each (k2, k3, k6: 16 k each), stored as int32                            tile unit,
//     stores
//               A: tmm4, 6: 16 rows x 32 k     B: tmm5, 7: 32 k x 16 outputs
//     f[row] += sums x scales, from the first-level cache                                         vector unit
//
// f stays in 16 registers for the 16 blocks and waits in `out`, exactly, for the next ones.
#include <xmmintrin.h>

#include "gemm/grids_avx512.hpp"
#include "simd/amx.hpp"
#include "simd/tiles.hpp"

namespace ktserve {
namespace {

constexpr int64_t kStep = 16;  // blocks unpacked at a time

// Part of a panel in one form for all formats: int8 (uint8 where the format has no bias), float32 scales.
struct alignas(64) Unpacked {
  uint8_t quants[kStep * 512];
  float scales[kStep * 2][16];
  float minima[kStep * 2][16];
};

template <Format F>
void unpack(const uint8_t* panel, int64_t k, int64_t first, int64_t blocks, Unpacked& to) {
  constexpr int groups = groups_of(F);
  const uint8_t* q = panel + meta_size(F, k) + first * info(F).quant_bytes;
  const __m512i bias = _mm512_set1_epi8(static_cast<char>(info(F).bias));
  for (int64_t b = 0; b < blocks; ++b, q += info(F).quant_bytes) {
    const Block<F> block(panel, q, first + b);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      _mm512_store_si512(to.quants + b * 512 + 64 * j, _mm512_sub_epi8(block.vector(j), bias));
    }
    for (int g = 0; g < groups; ++g) {
      _mm512_store_ps(to.scales[b * groups + g], block.scale(g));
      if constexpr (info(F).minima) _mm512_store_ps(to.minima[b * groups + g], minimum_of<F>(panel, first + b, g));
    }
  }
}

// The quants of the next part, fetched into the second-level cache while this one is computed: a share with every
// product, since all at once would wait for memory.
struct Next {
  const uint8_t* at;
  const uint8_t* end;
  int64_t share;  // bytes
  Next(const uint8_t* quants, int64_t bytes, int64_t products)
      : at(quants), end(quants + bytes), share(round_up((bytes + products - 1) / products, 64)) {}
  inline __attribute__((always_inline)) void step() {
    const uint8_t* const to = at + share < end ? at + share : end;
    for (; at < to; at += 64) _mm_prefetch(at, _MM_HINT_T1);
  }
};

struct Part {
  const Unpacked* w;
  const uint8_t* x;  // of the first block of this part
  const uint8_t* scale;
  const uint8_t* sum;
  int64_t stride;
  int64_t blocks;
  float* out;
  int64_t out_stride;
  bool begins;  // f starts at zero, otherwise at `out`
};

// 16 outputs of M rows. Product i is begun three steps before its sums are added and stored two steps before: so the
// tile unit, the stores and the vector unit work at the same time.
template <int M, int Groups, bool Minima>
void rows_by_panel(const Part p, Next& next) {
  constexpr int64_t bytes = kBlock / Groups;
  alignas(64) int32_t sums[4][256];
  __m512 f[M];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) f[m] = p.begins ? _mm512_setzero_ps() : _mm512_loadu_ps(p.out + m * p.out_stride);
  const int64_t products = p.blocks * Groups;
  const uint8_t* const w = p.w->quants;
  const auto add = [&](int64_t i, const int32_t* done) __attribute__((always_inline)) {
    const __m512 scale = _mm512_load_ps(p.w->scales[i]);
    const uint8_t* const row_scale = p.scale + i / Groups * 4;
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const __m512 both = _mm512_mul_ps(scale, broadcast(row_scale + m * p.stride));
      f[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(done + m * 16)), both, f[m]);
    }
    if constexpr (Minima) {
      const __m512 minimum = _mm512_load_ps(p.w->minima[i]);
      const uint8_t* const row_sum = p.sum + i * 4;
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) f[m] = _mm512_fmadd_ps(minimum, broadcast(row_sum + m * p.stride), f[m]);
    }
  };
#define KT_BEGIN(i, c, a, b)                    \
  if ((i) < products) {                         \
    TILE_LOAD(b, w + (i) * bytes * kPanel, 64); \
    TILE_LOAD(a, p.x + (i) * bytes, p.stride);  \
    TILE_ZERO(c);                               \
    if constexpr (Minima)                       \
      TILE_DOT_INT8_UINT8(c, a, b);             \
    else                                        \
      TILE_DOT_INT8(c, a, b);                   \
  }
#define KT_STORE(i, c) \
  if ((i) < products) TILE_STORE(c, sums[c], 64)
#define KT_STEP(i, c_begin, a, b, c_store, c) \
  KT_BEGIN((i) + 3, c_begin, a, b)            \
  KT_STORE((i) + 2, c_store);                 \
  if ((i) < products) {                       \
    add(i, sums[c]);                          \
    next.step();                              \
  }
  KT_BEGIN(0, 0, 4, 5)
  KT_BEGIN(1, 1, 6, 7)
  KT_BEGIN(2, 2, 4, 5)
  KT_STORE(0, 0);
  KT_STORE(1, 1);
  for (int64_t i = 0; i < products; i += 4) {
    KT_STEP(i, 3, 6, 7, 2, 0);
    KT_STEP(i + 1, 0, 4, 5, 3, 1);
    KT_STEP(i + 2, 1, 6, 7, 0, 2);
    KT_STEP(i + 3, 2, 4, 5, 1, 3);
  }
#undef KT_STEP
#undef KT_STORE
#undef KT_BEGIN
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) _mm512_storeu_ps(p.out + m * p.out_stride, f[m]);
}

template <int Groups, bool Minima, int M = 16>
void rows_by_panel(const Part& p, int64_t rows, Next& next) {
  if constexpr (M > 1) {
    if (rows < M) return rows_by_panel<Groups, Minima, M - 1>(p, rows, next);
  }
  rows_by_panel<M, Groups, Minima>(p, next);
}

void configure(int64_t rows, int groups) {
  TileConfig config;
  for (int t = 0; t < 8; ++t) {
    const bool a = t == 4 || t == 6;
    const bool b = t == 5 || t == 7;
    config.row_bytes[t] = a ? static_cast<uint16_t>(kBlock / groups) : 64;
    config.rows[t] = static_cast<uint8_t>(b ? kBlock / groups / 4 : rows);
  }
  TILE_CONFIG(&config);
}

template <Format F>
void dot_format(const DotArgs& a) {
  static_assert((info(F).bias == 0) == info(F).minima, "minima tell that the bytes are unsigned");
  constexpr int groups = groups_of(F);
  const RowLayout row = row_layout(F, a.k);
  const int64_t blocks = a.k / kBlock;
  const int64_t size = panel_size(F, a.k);
  Unpacked unpacked;
  int64_t configured = 0;
  for (int64_t first = 0; first < blocks; first += kStep) {
    const int64_t count = blocks - first < kStep ? blocks - first : kStep;
    for (int64_t p = 0; p < a.panels; ++p) {
      unpack<F>(a.w + p * size, a.k, first, count, unpacked);
      // Behind the last part there is none: the panel that follows is likely to be the next call's.
      const bool last = p + 1 == a.panels;
      const int64_t then = last ? first + kStep : first;
      const bool over = then >= blocks;
      const uint8_t* const panel = a.w + (last && !over ? 0 : p + 1) * size;
      const int64_t from = over ? 0 : then;
      const int64_t of = blocks - from < kStep ? blocks - from : kStep;
      const uint8_t* const meta = panel + from * kBlock / info(F).unit * info(F).meta_bytes;
      for (int64_t i = 0; i < of * kBlock / info(F).unit * info(F).meta_bytes; i += 64)
        _mm_prefetch(meta + i, _MM_HINT_T1);
      Next next(panel + meta_size(F, a.k) + from * info(F).quant_bytes, of * info(F).quant_bytes,
                count * groups * ((a.rows + 15) / 16));
      for (int64_t r = 0; r < a.rows; r += 16) {
        const int64_t rows = a.rows - r < 16 ? a.rows - r : 16;
        if (rows != configured) configure(rows, groups);
        configured = rows;
        const uint8_t* x = a.x + r * a.x_stride;
        const Part part{&unpacked,
                        x + first * kBlock,
                        x + row.scale + first * 4,
                        x + row.sum + first * groups * 4,
                        a.x_stride,
                        count,
                        a.out + r * a.out_stride + p * kPanel,
                        a.out_stride,
                        first == 0};
        rows_by_panel<groups, info(F).minima>(part, rows, next);
      }
    }
  }
  TILE_RELEASE();
}

}  // namespace

void dot_int8_amx(const DotArgs& a) {
  with_format(a.format, [&](auto f) {
    // Others are never asked for.
    if constexpr (!plain(decltype(f)::value)) dot_format<decltype(f)::value>(a);
  });
}

}  // namespace ktserve
