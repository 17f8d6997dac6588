// Dot products on AVX-512 with VNNI and BF16. A register tile is M activation rows by N panels of 16 outputs:
//
//              panel 0   panel 1        for each 4 k (2 k in bf16): load one vector per panel, broadcast four
//    row 0     f[0][0]   f[0][1]        (two) activations of each row from memory, M x N multiply-adds; after each
//    ...                                block of 32 k the integer sums are scaled into the float sums f
//    row M-1
//
// Each f has one chain of additions in the order of k, whatever M and N are: so the tile's shape never shows.
#include <immintrin.h>

#include <cstring>

#include "gemm/blocks_avx512.hpp"
#include "gemm/kernels.hpp"
#include "gemm/prefetch.hpp"
#include "gemm/rows.hpp"

namespace ktserve {
namespace {

// What a tile reads and writes: panels and rows of its own. Blocks [part.first, part.first + part.count) of k are added
// to `out`, where sums wait, exactly, from one part of k to the next; `begins`: nothing waits there yet.
struct Tile {
  const uint8_t* w;
  const uint8_t* next;  // the panels that follow, to be fetched meanwhile
  int64_t panel_bytes;
  int64_t k;
  const uint8_t* x;
  int64_t stride;
  float* out;
  int64_t out_stride;
  Part part;
  bool begins;
};

template <int M, int N>
inline __attribute__((always_inline)) void begin(__m512 (&f)[M][N], const Tile& t) {
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      f[m][n] = t.begins ? _mm512_setzero_ps() : _mm512_loadu_ps(t.out + m * t.out_stride + n * kPanel);
    }
  }
}

template <int M, int N>
inline __attribute__((always_inline)) void end(const __m512 (&f)[M][N], const Tile& t) {
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) _mm512_storeu_ps(t.out + m * t.out_stride + n * kPanel, f[m][n]);
  }
}

// Row m of up to six, as a base and an index register: odd multiples of the stride are kept from the compiler, which
// would otherwise carry a pointer per row and array through the loop and spill them.
struct Rows {
  int64_t one, three, five;
  explicit Rows(int64_t stride) : one(stride), three(3 * stride), five(5 * stride) {
    __asm__("" : "+r"(one), "+r"(three), "+r"(five));
  }
  inline __attribute__((always_inline)) int64_t operator[](int m) const {
    return m == 3 ? three : m == 5 ? five : m * one;
  }
};

template <Format F, int M, int N, bool Alone>
void tile(const Tile& t) {
  static_assert(M <= 6);
  constexpr int groups = groups_of(F);
  constexpr int steps = 8 / groups;
  const RowLayout row = row_layout(F, t.k);
  const int64_t panel_bytes = t.panel_bytes;
  const Rows rows(t.stride);
  const uint8_t* meta = t.w;
  const uint8_t* q = t.w + meta_size(F, t.k) + t.part.first * info(F).quant_bytes;
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
        for (int n = 0; n < N; ++n) u[n] = quants<F>(q + n * panel_bytes, j);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
          const __m512i v = _mm512_set1_epi32(word(x + rows[m] + 4 * j));
#pragma GCC unroll 4
          for (int n = 0; n < N; ++n) acc[m][n] = _mm512_dpbusd_epi32(acc[m][n], u[n], v);
        }
      }
      __m512 scale[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) scale[n] = scale_of<F>(meta + n * panel_bytes, b, g);
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
    q += info(F).quant_bytes;
    x += kBlock;
    scales += 4;
    inits += groups * 4;
  }
  end(f, t);
}

template <int M, int N, bool Alone>
void tile_bf16(const Tile& t) {
  __m512 f[M][N];
  begin(f, t);
  constexpr int64_t pairs = kBlock / 2;
  Prefetch<8, lines_of<Format::bf16>(M, N, 8, Alone)> next(t.next, N * t.panel_bytes, padded_k(t.k) / kBlock, t.part);
  const int64_t last = (t.part.first + t.part.count) * pairs;
  for (int64_t pair = t.part.first * pairs; pair < last; pair += 2) {
    next.advance();
#pragma GCC unroll 2
    for (int64_t i = pair; i < pair + 2; ++i) {
      __m512i v[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) v[n] = _mm512_load_si512(t.w + n * t.panel_bytes + i * 64);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const __m512i xv = _mm512_set1_epi32(word(t.x + m * t.stride + i * 4));
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
          f[m][n] = _mm512_dpbf16_ps(f[m][n], reinterpret_cast<__m512bh>(v[n]), reinterpret_cast<__m512bh>(xv));
        }
      }
    }
  }
  end(f, t);
}

// Row k of 16 weights of f32, f16 or f8, as float32; `scale`: f8's.
template <Format F>
inline __attribute__((always_inline)) __m512 weights(const uint8_t* w, int64_t k, __m512 scale) {
  if constexpr (F == Format::f8) return _mm512_mul_ps(f8_numbers(w + k * 16), scale);
  if constexpr (F == Format::f16) return half_scales(w + k * 32);
  return _mm512_load_ps(w + k * 64);
}

template <Format F, int M, int N, bool Alone>
void tile_f32(const Tile& t) {
  __m512 f[M][N];
  begin(f, t);
  constexpr int steps = static_cast<int>(info(F).quant_bytes / 64);  // a line each
  Prefetch<steps, lines_of<F>(M, N, steps, Alone)> next(t.next, N * t.panel_bytes, padded_k(t.k) / kBlock, t.part);
  const uint8_t* const numbers = t.w + meta_size(F, t.k);
  const int64_t end_of_part = (t.part.first + t.part.count) * kBlock;
  const int64_t last = end_of_part < t.k ? end_of_part : t.k;
  __m512 scale[N];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) scale[n] = _mm512_setzero_ps();
  for (int64_t i = t.part.first * kBlock; i < last; ++i) {
    if (i % (kBlock / steps) == 0) next.advance();
    if (F == Format::f8 && i % kBlock == 0) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) scale[n] = f8_scales(t.w + n * t.panel_bytes, i / kBlock);
    }
    __m512 v[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) v[n] = weights<F>(numbers + n * t.panel_bytes, i, scale[n]);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const __m512 xv = broadcast(t.x + m * t.stride + i * 4);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) f[m][n] = _mm512_fmadd_ps(v[n], xv, f[m][n]);
    }
  }
  end(f, t);
}

using Kernel = void (*)(const Tile&);

template <Format F, int M, int N, bool Alone>
constexpr Kernel tile_for() {
  if constexpr (F == Format::bf16)
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
template <Format F, int N, int M = most_rows<F, N>()>
Kernel tile_of(int64_t rows, bool alone) {
  if constexpr (M > 1) {
    if (rows < M) return tile_of<F, N, M - 1>(rows, alone);
  }
  if constexpr (N <= 2 && M >= most_rows<F, N>() / 2) {
    if (!alone) return tile_for<F, M, N, false>();
  }
  return tile_for<F, M, N, true>();
}

// Blocks of k whose weights stay in the first-level cache from one tile of rows to the next.
template <Format F, int N>
constexpr int64_t blocks_at_once() {
  return 16384 / (N * info(F).quant_bytes);
}

template <Format F, int N>
void dot_panels(const DotArgs& a, int64_t panel) {
  const int64_t size = panel_size(F, a.k);
  const int64_t blocks = padded_k(a.k) / kBlock;
  const uint8_t* next = a.next != nullptr && panel + N >= a.panels ? a.next : a.w + (panel + N) * size;
  // Equal tiles rather than full ones and a rest: 7 rows are 4 + 3, not 6 + 1.
  const int64_t tiles = (a.rows + most_rows<F, N>() - 1) / most_rows<F, N>();
  const int64_t step = tiles == 1 ? blocks : blocks_at_once<F, N>();
  for (int64_t first = 0; first < blocks; first += step) {
    const int64_t count = blocks - first < step ? blocks - first : step;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t row = a.rows * t / tiles;
      const int64_t rows = a.rows * (t + 1) / tiles - row;
      tile_of<F, N>(rows, tiles == 1)({a.w + panel * size,
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

template <Format F>
void dot_format(const DotArgs& a) {
  int64_t p = 0;
  if (a.rows == 1) {  // memory is the limit; these are what it delivers fastest
    if constexpr (plain(F)) {
      for (; p < a.panels; ++p) dot_panels<F, 1>(a, p);
    } else {
      for (; p + 4 <= a.panels; p += 4) dot_panels<F, 4>(a, p);
    }
  }
  for (; p + 2 <= a.panels; p += 2) dot_panels<F, 2>(a, p);
  if (p < a.panels) dot_panels<F, 1>(a, p);
}

void dot(const DotArgs& a) {
  with_format(a.format, [&](auto f) { dot_format<decltype(f)::value>(a); });
}

}  // namespace

const Kernels& kernels_avx512() {
  static constexpr Kernels table = avx512::row_kernels(Isa::avx512, dot);
  return table;
}

}  // namespace ktserve
