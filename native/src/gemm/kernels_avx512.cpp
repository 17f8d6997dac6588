// Dot products on AVX-512 with VNNI and BF16. A register tile is M activation rows by N panels of 16 outputs:
//
//              panel 0   panel 1        for each 4 k (2 k in bf16): load one vector per panel, broadcast four
//    row 0     f[0][0]   f[0][1]        (two) activations of each row from memory, M x N multiply-adds; after each
//    ...                                block of 32 k the integer sums are scaled into the float sums f
//    row M-1
//
// Each f has one chain of additions in the order of k, whatever M and N are: so the tile's shape never shows. `Floats`:
// bf16 is multiplied as float32.
#include <immintrin.h>

#include "gemm/grids_avx512.hpp"
#include "gemm/kernels.hpp"
#include "gemm/rows.hpp"
#include "gemm/tiles_avx512.hpp"

namespace ktserve {
namespace {

// Blocks of k whose weights stay in the first-level cache from one tile of rows to the next.
template <Format F, int N>
constexpr int64_t blocks_at_once() {
  return 16384 / (N * block_stride<F>());
}

// Of group g of block b, whose quants the tile reads at q.
template <Format F>
inline __attribute__((always_inline)) __m512 tile_scale(const uint8_t* meta, const uint8_t* q, int64_t b, int g) {
  if constexpr (!has_grid(F)) return scale_of<F>(meta, b, g);
  return _mm512_load_ps(reinterpret_cast<const Decoded<F>*>(q)->scales[g]);
}

template <Format F, int M, int N, bool Alone>
void tile(const Tile& t) {
  static_assert(M <= 6);
  constexpr int groups = groups_of(F);
  constexpr int steps = 8 / groups;
  const RowLayout row = row_layout(F, t.k);
  const int64_t panel_bytes = t.panel_bytes;
  const Rows rows(t.stride);
  const uint8_t* meta = t.w;
  const uint8_t* q = has_grid(F) ? t.decoded : t.w + meta_size(F, t.k) + t.part.first * info(F).quant_bytes;
  const int64_t q_bytes =
      has_grid(F) ? blocks_at_once<F, N>() * block_stride<F>() : panel_bytes;  // to the next panel's
  const uint8_t* x = t.x + t.part.first * kBlock;
  const uint8_t* scales = t.x + row.scale + t.part.first * 4;
  const uint8_t* inits = t.x + row.init + t.part.first * groups * 4;
  const uint8_t* sums = t.x + row.sum + t.part.first * groups * 4;
  __m512 f[M][N];
  begin(f, t);
  PrefetchAbreast<F, N, Alone> next(t.next, panel_bytes, t.k / kBlock, t.part);
  for (int64_t b = t.part.first; b < t.part.first + t.part.count; ++b) {
    next.begin(b);
#pragma GCC unroll 2
    for (int g = 0; g < groups; ++g) {
      __m512i acc[M][N];
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        __m512i start = _mm512_setzero_si512();
        if constexpr (info(F).bias != 0) start = _mm512_set1_epi32(word(inits + rows[m] + g * 4));
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) acc[m][n] = start;
      }
#pragma GCC unroll 8
      for (int j = g * steps; j < (g + 1) * steps; ++j) {
        next.advance(j);
        __m512i u[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) u[n] = quants<F>(q + n * q_bytes, j);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
          const __m512i v = _mm512_set1_epi32(word(x + rows[m] + 4 * j));
#pragma GCC unroll 4
          for (int n = 0; n < N; ++n) acc[m][n] = _mm512_dpbusd_epi32(acc[m][n], u[n], v);
        }
      }
      __m512 scale[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) scale[n] = tile_scale<F>(meta + n * panel_bytes, q + n * q_bytes, b, g);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const __m512 xs = broadcast(scales + rows[m]);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
          f[m][n] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[m][n]), _mm512_mul_ps(scale[n], xs), f[m][n]);
        }
      }
      if constexpr (info(F).minima) {
        __m512 minimum[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) minimum[n] = minimum_of<F>(meta + n * panel_bytes, b, g);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
          const __m512 sum = broadcast(sums + rows[m] + g * 4);
#pragma GCC unroll 4
          for (int n = 0; n < N; ++n) f[m][n] = _mm512_fmadd_ps(minimum[n], sum, f[m][n]);
        }
      }
    }
    if constexpr (info(F).minima) sums += groups * 4;
    q += block_stride<F>();
    x += kBlock;
    scales += 4;
    inits += groups * 4;
  }
  end(f, t);
}

using Kernel = void (*)(const Tile&);

template <Format F, bool Floats, int M, int N, bool Alone>
constexpr Kernel tile_for() {
  if constexpr (Floats)
    return &tile_bf16_floats<M, N, Alone>;
  else if constexpr (F == Format::bf16)
    return &tile_bf16<M, N, Alone>;
  else if constexpr (plain(F))
    return &tile_f32<F, M, N, Alone>;
  else
    return &tile<F, M, N, Alone>;
}

// The most rows of a tile: what 32 registers hold with two panels. Four panels are for one row.
template <Format F, int N>
constexpr int most_rows() {
  return N > 2 ? 1 : plain(F) ? 12 : 6;
}

// The tile of so many rows: `alone`, or one of several that share panels and are all at least half of the largest.
template <Format F, bool Floats, int N, int M = most_rows<F, N>()>
Kernel tile_of(int64_t rows, bool alone) {
  if constexpr (M > 1) {
    if (rows < M) return tile_of<F, Floats, N, M - 1>(rows, alone);
  }
  if constexpr (N <= 2 && M >= most_rows<F, N>() / 2) {
    if (!alone) return tile_for<F, Floats, M, N, false>();
  }
  return tile_for<F, Floats, M, N, true>();
}

template <Format F, bool Floats, int N>
void dot_panels(const DotArgs& a, int64_t panel) {
  const int64_t size = panel_size(F, a.k);
  const int64_t blocks = padded_k(a.k) / kBlock;
  const uint8_t* next = a.next != nullptr && panel + N >= a.panels ? a.next : a.w + (panel + N) * size;
  // Equal tiles rather than full ones and a rest: 7 rows are 4 + 3, not 6 + 1.
  const int64_t tiles = (a.rows + most_rows<F, N>() - 1) / most_rows<F, N>();
  constexpr bool parts = has_grid(F) || Floats;  // even if the panels are read once
  constexpr int64_t at_once = Floats ? kFloatBlocks : blocks_at_once<F, N>();
  const int64_t step = tiles == 1 && !parts ? blocks : at_once;
  Decoded<F> decoded[has_grid(F) ? N * at_once : 1];
  for (int64_t first = 0; first < blocks; first += step) {
    const int64_t count = blocks - first < step ? blocks - first : step;
    if constexpr (has_grid(F)) {
      for (int64_t n = 0; n < N; ++n) {
        const uint8_t* w = a.w + (panel + n) * size;
        const uint8_t* block = w + meta_size(F, a.k) + first * info(F).quant_bytes;
        for (int64_t b = 0; b < count; ++b)
          decode<F>(w, block + b * info(F).quant_bytes, first + b, decoded[n * at_once + b]);
      }
    }
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t row = a.rows * t / tiles;
      const int64_t rows = a.rows * (t + 1) / tiles - row;
      tile_of<F, Floats, N>(rows, tiles == 1)({a.w + panel * size,
                                               decoded->quants,
                                               next,
                                               size,
                                               a.k,
                                               a.x + row * a.x_stride,
                                               a.x_stride,
                                               a.out + row * a.out_stride + panel * kPanel,
                                               a.out_stride,
                                               {first, count, t, tiles},
                                               first == 0 && !a.adds});
    }
  }
}

template <Format F, bool Floats>
void dot_format(const DotArgs& a) {
  int64_t p = 0;
  if (a.rows == 1) {  // memory is the limit; these are what it delivers fastest
    if constexpr (Floats) {
      // two panels: with one, its chain of additions would be the limit
    } else if constexpr (plain(F)) {
      for (; p < a.panels; ++p) dot_panels<F, Floats, 1>(a, p);
    } else {
      for (; p + 4 <= a.panels; p += 4) dot_panels<F, Floats, 4>(a, p);
    }
  }
  for (; p + 2 <= a.panels; p += 2) dot_panels<F, Floats, 2>(a, p);
  if (p < a.panels) dot_panels<F, Floats, 1>(a, p);
}

template <bool Floats>
void dot(const DotArgs& a) {
  with_format(a.format, [&](auto f) {
    constexpr Format format = decltype(f)::value;
    dot_format<format, Floats && format == Format::bf16>(a);
  });
}

}  // namespace

const Kernels& kernels_avx512(bool bf16_as_floats) {
  static constexpr Kernels dots = avx512::row_kernels(Isa::avx512, dot<false>);
  static constexpr Kernels floats = avx512::row_kernels(Isa::avx512, dot<true>);
  return bf16_as_floats ? floats : dots;
}

}  // namespace ktserve
