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

#include "gemm/grids_avx2.hpp"
#include "gemm/kernels.hpp"
#include "gemm/rows.hpp"
#include "gemm/tiles_avx2.hpp"

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

// Of group g of block b, whose quants the tile reads at q.
template <Format F>
inline __attribute__((always_inline)) Pair tile_scale(const uint8_t* w, const uint8_t* q, int64_t b, int g) {
  if constexpr (!has_grid(F)) return scale_of<F>(w, b, g);
  const auto* scales = reinterpret_cast<const Decoded<F>*>(q)->scales[g];
  return {_mm256_load_ps(scales), _mm256_load_ps(scales + 8)};
}

template <Format F, int M, bool Alone>
void tile(const Tile& t) {
  constexpr int groups = groups_of(F);
  constexpr int steps = 8 / groups;
  const RowLayout row = row_layout(F, t.k);
  const int64_t stride = t.stride;
  const uint8_t* const w = t.w;
  const uint8_t* q = has_grid(F) ? t.decoded : w + meta_size(F, t.k) + t.part.first * info(F).quant_bytes;
  const uint8_t* x = t.x + t.part.first * kBlock;
  const uint8_t* scales = t.x + row.scale + t.part.first * 4;
  const uint8_t* inits = t.x + row.init + t.part.first * groups * 4;
  const uint8_t* sums = t.x + row.sum + t.part.first * groups * 4;
  Pair f[M];
  begin(f, t);
  Prefetch<2, lines_of<F>(M, 1, 2, Alone)> next(t.next, panel_size(F, t.k), t.k / kBlock, t.part);
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
      const Pair scale = tile_scale<F>(w, q, b, g);
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
    q += block_stride<F>();
    x += kBlock;
    scales += 4;
    inits += groups * 4;
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
  constexpr int64_t at_once = 16384 / block_stride<F>();  // so the first-level cache keeps weights for all tiles
  Decoded<F> decoded[has_grid(F) ? at_once : 1];
  const int64_t blocks = padded_k(a.k) / kBlock;
  const int64_t tiles = (a.rows + most - 1) / most;
  const int64_t step = tiles == 1 && !has_grid(F) ? blocks : at_once;
  for (int64_t p = 0; p < a.panels; ++p) {
    const uint8_t* w = a.w + p * panel_size(F, a.k);
    const uint8_t* next = a.next != nullptr && p + 1 == a.panels ? a.next : w + panel_size(F, a.k);
    for (int64_t first = 0; first < blocks; first += step) {
      const int64_t count = blocks - first < step ? blocks - first : step;
      if constexpr (has_grid(F)) {
        const uint8_t* block = w + meta_size(F, a.k) + first * info(F).quant_bytes;
        decode<F, at_once>(w, block, first, count, decoded);
      }
      for (int64_t i = 0; i < tiles; ++i) {
        const int64_t row = a.rows * i / tiles;
        tile_of<F>(a.rows * (i + 1) / tiles - row, {w,
                                                    decoded->quants,
                                                    next,
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
