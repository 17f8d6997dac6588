// Dot products on AVX2 + FMA + F16C. The tile is that of the AVX-512 kernels at half the width: one panel of 16
// outputs is two registers (lo: rows 0-7, hi: 8-15), up to three activation rows share each load of weights; of bf16
// and f8 five, and of float32 and f16 six, whose chains of additions are as many as the multiply-adds in flight need.
//
//    8-bit sums: vpmaddubsw + vpmaddwd. Its 16-bit step cannot overflow up to 7 bits (127 * 127 * 2 < 2^15), and takes
//    several products of fewer bits before they are widened; weights of 8 bits go in as |w| * sign(x, w), at most
//    128 * 127 * 2 < 2^15, and then need no bias taken off.
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

// The largest quant of a format.
template <Format F>
constexpr int most_quant() {
  if (as_signed<F>) return 128;
  if (has_grid(F)) return 2 * info(F).bias - 1;
  if (info(F).codes == Codes::none) return (1 << (low_bits(F) + upper_bits(F))) - 1;
  int most = 0;
  for (const int code : code_table(F).codes) most = code > most ? code : most;
  return most;
}

// How many vectors of products, out of `all`, may be added with 16 bits.
constexpr int added_short(int most_quant, int all) {
  const int most = 32767 / (2 * 127 * most_quant);
  return most < 1 ? 1 : most < all ? most : all;
}

// Products of quants with those of activations, added in pairs.
template <Format F>
inline __attribute__((always_inline)) __m256i products(__m256i w, __m256i x) {
  if constexpr (as_signed<F>) return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
  return _mm256_maddubs_epi16(w, x);
}

// In this order: compilers that see integers added make a tree of the sums, whose leaves do not fit the registers.
inline __attribute__((always_inline)) __m256i add_short(__m256i sum, __m256i more) {
  sum = _mm256_add_epi16(sum, more);
  __asm__("" : "+x"(sum));
  return sum;
}

inline __attribute__((always_inline)) __m256i add_pairs(__m256i sum, __m256i products) {
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(products, _mm256_set1_epi16(1)));
  __asm__("" : "+x"(sum));
  return sum;
}

// Blocks as a tile reads them: as they lie in the panel, or decoded.
template <Format F, bool Ready>
class Blocks {
 public:
  explicit Blocks(const Tile& t) : panel_(t.w), unit_(unit_scales<F>(t.w, t.part.first)) {
    at_ = Ready ? t.decoded : t.w + meta_size(F, t.k) + t.part.first * info(F).quant_bytes;
  }
  inline __attribute__((always_inline)) void begin(int64_t b) {
    if (!Ready && b % (kSuper / kBlock) == 0) unit_ = unit_scales<F>(panel_, b);
  }
  inline __attribute__((always_inline)) __m256i quants(int j, int h) const {
    if constexpr (Ready) return load(at_ + 64 * j + 32 * h);
    return ktserve::quants<F>(at_, j, h);
  }
  inline __attribute__((always_inline)) Pair scale(int64_t b, int g) const {
    if constexpr (Ready) return load_pair(reinterpret_cast<const Decoded<F>*>(at_)->scales[g]);
    return scale_of<F>(unit_, panel_, b, g);
  }
  inline __attribute__((always_inline)) Pair minimum(int64_t b, int g) const {
    if constexpr (Ready) return load_pair(reinterpret_cast<const Decoded<F>*>(at_)->scales[groups_of(F) + g]);
    return minimum_of<F>(unit_, panel_, b, g);
  }
  void next() { at_ += Ready ? static_cast<int64_t>(sizeof(Decoded<F>)) : info(F).quant_bytes; }

 private:
  const uint8_t *panel_, *at_;
  UnitScales unit_;
};

template <Format F, int M, bool Alone, bool Ready>
void tile(const Tile& t) {
  constexpr int groups = groups_of(F);
  constexpr int steps = 8 / groups;
  constexpr int together = added_short(most_quant<F>(), steps);
  static_assert(steps % together == 0);
  const RowLayout row = row_layout(F, t.k);
  const int64_t stride = t.stride;
  const uint8_t* x = t.x + t.part.first * kBlock;
  const uint8_t* scales = t.x + row.scale + t.part.first * 4;
  const uint8_t* inits = t.x + row.init + t.part.first * groups * 4;
  const uint8_t* sums = t.x + row.sum + t.part.first * groups * 4;
  Pair f[M];
  begin(f, t);
  Prefetch<2, lines_of<F>(M, 1, 2, Alone)> next(t.next, panel_size(F, t.k), t.k / kBlock, t.part);
  Blocks<F, Ready> blocks(t);
  for (int64_t b = t.part.first; b < t.part.first + t.part.count; ++b) {
    blocks.begin(b);
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
      for (int first = g * steps; first < (g + 1) * steps; first += together) {
        __m256i short_lo[M], short_hi[M];
#pragma GCC unroll 8
        for (int j = first; j < first + together; ++j) {
          if (j % 4 == 0) next.advance();
          const __m256i a = blocks.quants(j, 0);
          const __m256i c = blocks.quants(j, 1);
#pragma GCC unroll 4
          for (int m = 0; m < M; ++m) {
            const __m256i v = _mm256_set1_epi32(word(x + m * stride + 4 * j));
            const __m256i more_lo = products<F>(a, v), more_hi = products<F>(c, v);
            short_lo[m] = j == first ? more_lo : add_short(short_lo[m], more_lo);
            short_hi[m] = j == first ? more_hi : add_short(short_hi[m], more_hi);
          }
        }
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) {
          lo[m] = add_pairs(lo[m], short_lo[m]);
          hi[m] = add_pairs(hi[m], short_hi[m]);
        }
      }
      const Pair scale = blocks.scale(b, g);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        const __m256 xs = _mm256_castsi256_ps(_mm256_set1_epi32(word(scales + m * stride)));
        f[m].lo = _mm256_fmadd_ps(_mm256_cvtepi32_ps(lo[m]), _mm256_mul_ps(scale.lo, xs), f[m].lo);
        f[m].hi = _mm256_fmadd_ps(_mm256_cvtepi32_ps(hi[m]), _mm256_mul_ps(scale.hi, xs), f[m].hi);
      }
      if constexpr (info(F).minima) {
        const Pair minimum = blocks.minimum(b, g);
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) {
          const __m256 sum = _mm256_castsi256_ps(_mm256_set1_epi32(word(sums + m * stride + g * 4)));
          f[m].lo = _mm256_fmadd_ps(minimum.lo, sum, f[m].lo);
          f[m].hi = _mm256_fmadd_ps(minimum.hi, sum, f[m].hi);
        }
      }
    }
    if constexpr (info(F).minima) sums += groups * 4;
    blocks.next();
    x += kBlock;
    scales += 4;
    inits += groups * 4;
  }
  end(f, t);
}

// One row by a grid's format: values are multiplied as they are looked up, and activations have their signs.
template <Format F>
void tile_grid(const Tile& t) {
  constexpr int64_t ahead = 16;  // blocks whose indices are made at once
  constexpr int64_t unit = kSuper / kBlock;
  constexpr int groups = groups_of(F);
  constexpr int steps = 8 / groups;
  constexpr int together = added_short(info(F).bias - 1, steps);
  const RowLayout row = row_layout(F, t.k);
  const uint8_t* block = t.w + meta_size(F, t.k);
  Indices<F> indices[ahead];
  Pair f[1];
  begin(f, t);
  Prefetch<2, lines_of<F>(1, 1, 2, true)> next(t.next, panel_size(F, t.k), t.k / kBlock, t.part);
  for (int64_t b = 0; b < t.part.count; ++b, block += info(F).quant_bytes) {
    for (int64_t i = b; b % ahead == 0 && i < t.part.count && i < b + ahead; ++i)
      find_indices<F>(unit_of<F>(t.w, i), block + (i - b) * info(F).quant_bytes, i % unit, indices[i - b]);
    const __m256 scale = _mm256_castsi256_ps(_mm256_set1_epi32(word(t.x + row.scale + 4 * b)));
    const auto half = [&](int h, __m256& sum) __attribute__((always_inline)) {
      __m256i group[groups], short_sum;
      const uint8_t* x = t.x + b * kBlock;
      __asm__("" : "+r"(x));  // read again by the other half, rather than kept in registers that are no vectors'
      const auto take = [&](int j, __m256i values, __m256i signs) __attribute__((always_inline)) {
        const __m256i v = _mm256_sign_epi8(_mm256_set1_epi32(word(x + 4 * j)), signs);
        const __m256i more = _mm256_maddubs_epi16(values, v);
        short_sum = j % together == 0 ? more : add_short(short_sum, more);
        if ((j + 1) % together != 0) return;
        __m256i& to = group[j / steps];
        to = add_pairs(j % steps < together ? _mm256_setzero_si256() : to, short_sum);
      };
      look_up<F>(block, h, indices[b % ahead], take);
      for (int g = 0; g < groups; ++g) {
        const __m256 weight = grid_scales<F>(unit_of<F>(t.w, b), block, b % unit, h, g);
        sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(group[g]), _mm256_mul_ps(weight, scale), sum);
      }
    };
    next.advance();
    half(0, f[0].lo);
    next.advance();
    half(1, f[0].hi);
  }
  end(f, t);
}

template <Format F, int M, bool Alone, bool Ready>
void tile_for(const Tile& t) {
  if constexpr (F == Format::bf16)
    tile_bf16<M, Alone>(t);
  else if constexpr (plain(F))
    tile_f32<F, M, Alone>(t);
  else
    tile<F, M, Alone, Ready>(t);
}

// What sixteen registers hold.
template <Format F>
constexpr int most_rows() {
  return F == Format::bf16 || F == Format::f8 ? 5 : plain(F) ? 6 : 3;
}

// A tile of so many rows: alone with its panel, or one of several, all of which are at least half of the largest.
template <Format F, bool Ready, int M = most_rows<F>()>
void tile_of(int64_t rows, const Tile& t) {
  if constexpr (M > 1) {
    if (rows < M) return tile_of<F, Ready, M - 1>(rows, t);
  }
  if constexpr (M > 1 && M >= most_rows<F>() / 2) {
    if (t.part.tiles > 1) return tile_for<F, M, false, Ready>(t);
  }
  tile_for<F, M, true, Ready>(t);
}

// Blocks [first, first + count) of a panel.
template <Format F, int64_t Most>
void decode_blocks(const uint8_t* panel, int64_t k, int64_t first, int64_t count, Decoded<F>* to) {
  const uint8_t* block = panel + meta_size(F, k) + first * info(F).quant_bytes;
  if constexpr (has_grid(F)) return decode<F, Most>(panel, block, first, count, to);
  for (int64_t b = first; b < first + count; ++b, ++to, block += info(F).quant_bytes) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(to->quants + 64 * j), quants<F>(block, j, 0));
      _mm256_store_si256(reinterpret_cast<__m256i*>(to->quants + 64 * j + 32), quants<F>(block, j, 1));
    }
    const UnitScales unit = unit_scales<F>(panel, b);
    for (int g = 0; g < groups_of(F); ++g) {
      store_pair(to->scales[g], scale_of<F>(unit, panel, b, g));
      if constexpr (info(F).minima) store_pair(to->scales[groups_of(F) + g], minimum_of<F>(unit, panel, b, g));
    }
  }
}

// `Ready`: blocks are decoded before they are multiplied.
template <Format F, bool Ready>
void dot_format(const DotArgs& a) {
  constexpr int64_t most = most_rows<F>();
  constexpr int64_t stride = Ready ? static_cast<int64_t>(sizeof(Decoded<F>)) : info(F).quant_bytes;
  constexpr int64_t at_once = 16384 / stride;  // so the first-level cache keeps weights for all tiles
  Decoded<F> decoded[Ready ? at_once : 1];
  const int64_t blocks = padded_k(a.k) / kBlock;
  const int64_t tiles = (a.rows + most - 1) / most;
  const int64_t step = tiles == 1 && !Ready ? blocks : at_once;
  for (int64_t p = 0; p < a.panels; ++p) {
    const uint8_t* w = a.w + p * panel_size(F, a.k);
    const uint8_t* next = a.next != nullptr && p + 1 == a.panels ? a.next : w + panel_size(F, a.k);
    for (int64_t first = 0; first < blocks; first += step) {
      const int64_t count = blocks - first < step ? blocks - first : step;
      if constexpr (Ready) decode_blocks<F, at_once>(w, a.k, first, count, decoded);
      for (int64_t i = 0; i < tiles; ++i) {
        const int64_t row = a.rows * i / tiles;
        tile_of<F, Ready>(a.rows * (i + 1) / tiles - row, {w,
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

template <Format F>
void dot_grid_row(const DotArgs& a) {
  for (int64_t p = 0; p < a.panels; ++p) {
    const uint8_t* w = a.w + p * panel_size(F, a.k);
    const uint8_t* next = a.next != nullptr && p + 1 == a.panels ? a.next : w + panel_size(F, a.k);
    tile_grid<F>({w, nullptr, next, a.k, a.x, 0, a.out + p * kPanel, 0, {0, a.k / kBlock, 0, 1}, !a.adds});
  }
}

// Blocks are decoded first where so many tiles of rows read them that it pays (measured): sooner if quants are put
// together from two planes.
template <Format F>
void dot_rows(const DotArgs& a) {
  if constexpr (has_grid(F)) {
    a.rows == 1 ? dot_grid_row<F>(a) : dot_format<F, true>(a);
  } else if constexpr (plain(F) || low_bits(F) == 8) {
    dot_format<F, false>(a);
  } else {
    constexpr int64_t few = (upper_bits(F) != 0 ? 2 : 5) * most_rows<F>();
    a.rows > few ? dot_format<F, true>(a) : dot_format<F, false>(a);
  }
}

void dot(const DotArgs& a) {
  with_format(a.format, [&](auto f) { dot_rows<decltype(f)::value>(a); });
}

}  // namespace

const Kernels& kernels_avx2() {
  static constexpr Kernels table = avx2::row_kernels(Isa::avx2, dot);
  return table;
}

}  // namespace ktserve
