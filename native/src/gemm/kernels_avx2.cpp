// Dot products on AVX2 + FMA + F16C. The tile is that of the AVX-512 kernels at half the width: one panel of 16
// outputs is two registers (lo: rows 0-7, hi: 8-15), up to three activation rows share each load of weights; of bf16
// and f8 five, and of float32 and f16 six, whose chains of additions are as many as the multiply-adds in flight need.
//
//    8-bit sums: vpmaddubsw + vpmaddwd. Its 16-bit step cannot overflow up to 7 bits (127 * 127 * 2 < 2^15); weights of
//    8 bits go in as |w| * sign(x, w), at most 128 * 127 * 2 < 2^15, and then need no bias taken off.
//    bf16: pairs are widened to two float32 vectors; even k first, then odd k, each a fused multiply-add.
//
// Integer sums, scales and the order of additions equal those of AVX-512, so quantised results agree bit for bit. Tiles
// are not written on simd16.hpp as the rows are: the number of registers shapes them, and one was 10% slower on it.
#include <immintrin.h>

#include <cstring>

#include "gemm/blocks_avx2.hpp"
#include "gemm/kernels.hpp"
#include "gemm/prefetch.hpp"
#include "gemm/rows.hpp"

namespace ktserve {
namespace {

template <Format F>
inline __attribute__((always_inline)) __m256i dot4(__m256i sum, __m256i w, __m256i x) {
  __m256i products;
  if constexpr (as_signed<F>) {
    products = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
  } else {
    products = _mm256_maddubs_epi16(w, x);
  }
  return _mm256_add_epi32(sum, _mm256_madd_epi16(products, _mm256_set1_epi16(1)));
}

// What a tile reads and writes: a panel and rows of its own. Blocks [part.first, part.first + part.count) of k are
// added to `out`, where sums wait, exactly, from one part of k to the next; `begins`: nothing waits there yet.
struct Tile {
  const uint8_t* w;
  int64_t k;
  const uint8_t* x;
  int64_t stride;
  float* out;
  int64_t out_stride;
  Part part;
  bool begins;
};

template <int M>
inline __attribute__((always_inline)) void begin(Pair (&f)[M], const Tile& t) {
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) {
    const float* at = t.out + m * t.out_stride;
    f[m] =
        t.begins ? Pair{_mm256_setzero_ps(), _mm256_setzero_ps()} : Pair{_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)};
  }
}

template <int M>
inline __attribute__((always_inline)) void end(const Pair (&f)[M], const Tile& t) {
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) {
    _mm256_storeu_ps(t.out + m * t.out_stride, f[m].lo);
    _mm256_storeu_ps(t.out + m * t.out_stride + 8, f[m].hi);
  }
}

template <Format F, int M, bool Alone>
void tile(const Tile& t) {
  constexpr int groups = groups_of(F);
  constexpr int steps = 8 / groups;
  const RowLayout row = row_layout(F, t.k);
  const int64_t stride = t.stride;
  const uint8_t* const w = t.w;
  const uint8_t* q = w + meta_size(F, t.k) + t.part.first * info(F).quant_bytes;
  const uint8_t* x = t.x + t.part.first * kBlock;
  const uint8_t* scales = t.x + row.scale + t.part.first * 4;
  const uint8_t* inits = t.x + row.init + t.part.first * groups * 4;
  const uint8_t* sums = t.x + row.sum + t.part.first * groups * 4;
  Pair f[M];
  begin(f, t);
  Prefetch<2, lines_of<F>(M, 1, 2, Alone)> next(w + panel_size(F, t.k), panel_size(F, t.k), t.k / kBlock, t.part);
  for (int64_t b = t.part.first; b < t.part.first + t.part.count; ++b) {
#pragma GCC unroll 2
    for (int g = 0; g < groups; ++g) {
      __m256i lo[M], hi[M];
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        lo[m] = _mm256_setzero_si256();
        if constexpr (info(F).bias != 0 && !as_signed<F>) {
          lo[m] = _mm256_set1_epi32(word(inits + m * stride + g * 4));
        }
        hi[m] = lo[m];
      }
#pragma GCC unroll 8
      for (int j = g * steps; j < (g + 1) * steps; ++j) {
        if (j % 4 == 0) next.advance();
        const __m256i a = quants<F>(q, j, 0);
        const __m256i c = quants<F>(q, j, 1);
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) {
          const __m256i v = _mm256_set1_epi32(word(x + m * stride + 4 * j));
          lo[m] = dot4<F>(lo[m], a, v);
          hi[m] = dot4<F>(hi[m], c, v);
        }
      }
      const Pair scale = scale_of<F>(w, b, g);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        const __m256 xs = _mm256_castsi256_ps(_mm256_set1_epi32(word(scales + m * stride)));
        f[m].lo = _mm256_fmadd_ps(_mm256_cvtepi32_ps(lo[m]), _mm256_mul_ps(scale.lo, xs), f[m].lo);
        f[m].hi = _mm256_fmadd_ps(_mm256_cvtepi32_ps(hi[m]), _mm256_mul_ps(scale.hi, xs), f[m].hi);
      }
      if constexpr (info(F).minima) {
        const Pair minimum = minimum_of<F>(w, b, g);
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) {
          const __m256 sum = _mm256_castsi256_ps(_mm256_set1_epi32(word(sums + m * stride + g * 4)));
          f[m].lo = _mm256_fmadd_ps(minimum.lo, sum, f[m].lo);
          f[m].hi = _mm256_fmadd_ps(minimum.hi, sum, f[m].hi);
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

__m256 even(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
}
__m256 odd(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-65536)));
}

// Row m of up to six, as a base and an index register: odd multiples of the stride are kept from the compiler, which
// would otherwise carry a pointer per row through the loop.
struct Rows {
  int64_t one, three, five;
  explicit Rows(int64_t stride) : one(stride), three(3 * stride), five(5 * stride) {
    __asm__("" : "+r"(one), "+r"(three), "+r"(five));
  }
  inline __attribute__((always_inline)) int64_t operator[](int m) const {
    return m == 3 ? three : m == 5 ? five : m * one;
  }
};

// Even k of a pair of all rows, then odd k: ten sums leave no room for more than one row's value at a time.
template <int M>
inline __attribute__((always_inline)) void add_pair(Pair (&f)[M], const uint8_t* w, const uint8_t* x,
                                                    const Rows& rows) {
  const __m256 lo_even = even(load(w)), hi_even = even(load(w + 32));
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) {
    const __m256 v = even(_mm256_set1_epi32(word(x + rows[m])));
    f[m].lo = _mm256_fmadd_ps(lo_even, v, f[m].lo);
    f[m].hi = _mm256_fmadd_ps(hi_even, v, f[m].hi);
  }
  __asm__("" : "+r"(x));  // read again, rather than spilled
  const __m256 lo_odd = odd(load(w)), hi_odd = odd(load(w + 32));
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) {
    const __m256 v = odd(_mm256_set1_epi32(word(x + rows[m])));
    f[m].lo = _mm256_fmadd_ps(lo_odd, v, f[m].lo);
    f[m].hi = _mm256_fmadd_ps(hi_odd, v, f[m].hi);
  }
}

template <int M, bool Alone>
void tile_bf16(const Tile& t) {
  constexpr int64_t pairs = kBlock / 2;
  Pair f[M];
  begin(f, t);
  const Rows rows(t.stride);
  const int64_t size = panel_size(Format::bf16, t.k);
  Prefetch<pairs, lines_of<Format::bf16>(M, 1, pairs, Alone)> next(t.w + size, size, padded_k(t.k) / kBlock, t.part);
  const int64_t last = (t.part.first + t.part.count) * pairs;
  for (int64_t i = t.part.first * pairs; i < last; ++i) {
    next.advance();
    if constexpr (M > 3) {
      add_pair(f, t.w + i * 64, t.x + i * 4, rows);
      continue;
    }
    const __m256i lo = load(t.w + i * 64);
    const __m256i hi = load(t.w + i * 64 + 32);
    const __m256 lo_even = even(lo), lo_odd = odd(lo), hi_even = even(hi), hi_odd = odd(hi);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const __m256i v = _mm256_set1_epi32(word(t.x + m * t.stride + i * 4));
      f[m].lo = _mm256_fmadd_ps(lo_odd, odd(v), _mm256_fmadd_ps(lo_even, even(v), f[m].lo));
      f[m].hi = _mm256_fmadd_ps(hi_odd, odd(v), _mm256_fmadd_ps(hi_even, even(v), f[m].hi));
    }
  }
  end(f, t);
}

// Row k of 16 weights of f32, f16 or f8, as float32; `scale`: f8's.
template <Format F>
inline __attribute__((always_inline)) Pair weights(const uint8_t* w, int64_t k, Pair scale) {
  if constexpr (F == Format::f8) return times(f8_numbers(w + k * 16), scale);
  if constexpr (F == Format::f16) return half_scales(w + k * 32);
  return {_mm256_castsi256_ps(load(w + k * 64)), _mm256_castsi256_ps(load(w + k * 64 + 32))};
}

template <Format F, int M, bool Alone>
void tile_f32(const Tile& t) {
  Pair f[M];
  begin(f, t);
  const Rows rows(t.stride);
  const int64_t size = panel_size(F, t.k);
  constexpr int steps = static_cast<int>(info(F).quant_bytes / 64);  // a line each
  Prefetch<steps, lines_of<F>(M, 1, steps, Alone)> next(t.w + size, size, padded_k(t.k) / kBlock, t.part);
  const uint8_t* const numbers = t.w + meta_size(F, t.k);
  const int64_t end_of_part = (t.part.first + t.part.count) * kBlock;
  const int64_t last = end_of_part < t.k ? end_of_part : t.k;
  Pair scale{};
  for (int64_t i = t.part.first * kBlock; i < last; ++i) {
    if (i % (kBlock / steps) == 0) next.advance();
    if (F == Format::f8 && i % kBlock == 0) scale = f8_scales(t.w, i / kBlock);
    const Pair w = weights<F>(numbers, i, scale);
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
      const __m256 v = _mm256_castsi256_ps(_mm256_set1_epi32(word(t.x + rows[m] + i * 4)));
      f[m].lo = _mm256_fmadd_ps(w.lo, v, f[m].lo);
      f[m].hi = _mm256_fmadd_ps(w.hi, v, f[m].hi);
    }
  }
  end(f, t);
}

template <Format F, int M, bool Alone>
void tile_for(const Tile& t) {
  if constexpr (F == Format::bf16)
    tile_bf16<M, Alone>(t);
  else if constexpr (plain(F))
    tile_f32<F, M, Alone>(t);
  else
    tile<F, M, Alone>(t);
}

// What sixteen registers hold.
template <Format F>
constexpr int most_rows() {
  return F == Format::bf16 || F == Format::f8 ? 5 : plain(F) ? 6 : 3;
}

// A tile of so many rows: alone with its panel, or one of several, all of which are at least half of the largest.
template <Format F, int M = most_rows<F>()>
void tile_of(int64_t rows, const Tile& t) {
  if constexpr (M > 1) {
    if (rows < M) return tile_of<F, M - 1>(rows, t);
  }
  if constexpr (M > 1 && M >= most_rows<F>() / 2) {
    if (t.part.tiles > 1) return tile_for<F, M, false>(t);
  }
  tile_for<F, M, true>(t);
}

template <Format F>
void dot_format(const DotArgs& a) {
  constexpr int64_t most = most_rows<F>();
  constexpr int64_t at_once = 16384 / info(F).quant_bytes;  // so the first-level cache keeps weights for all tiles
  const int64_t blocks = padded_k(a.k) / kBlock;
  const int64_t tiles = (a.rows + most - 1) / most;
  const int64_t step = tiles == 1 ? blocks : at_once;
  for (int64_t p = 0; p < a.panels; ++p) {
    const uint8_t* w = a.w + p * panel_size(F, a.k);
    for (int64_t first = 0; first < blocks; first += step) {
      const int64_t count = blocks - first < step ? blocks - first : step;
      for (int64_t i = 0; i < tiles; ++i) {
        const int64_t row = a.rows * i / tiles;
        tile_of<F>(a.rows * (i + 1) / tiles - row, {w,
                                                    a.k,
                                                    a.x + row * a.x_stride,
                                                    a.x_stride,
                                                    a.out + row * a.out_stride + p * kPanel,
                                                    a.out_stride,
                                                    {first, count, i, tiles},
                                                    first == 0 && !a.adds});
      }
    }
  }
}

void dot(const DotArgs& a) {
  with_format(a.format, [&](auto f) { dot_format<decltype(f)::value>(a); });
}

}  // namespace

const Kernels& kernels_avx2() {
  static constexpr Kernels table = avx2::row_kernels(Isa::avx2, dot);
  return table;
}

}  // namespace ktserve
