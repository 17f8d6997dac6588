// Dot products on AVX2 + FMA + F16C. The tile is that of the AVX-512 kernels at half the width: one panel of 16
// outputs is two registers (lo: rows 0-7, hi: 8-15), up to three activation rows share each load of weights.
//
//    8-bit sums: vpmaddubsw + vpmaddwd. Its 16-bit step cannot overflow below 7 bits (63 * 127 * 2 < 2^15); full int8
//    weights go in as |w| * sign(x, w), at most 128 * 127 * 2 < 2^15, and then need no bias taken off.
//    bf16: pairs are widened to two float32 vectors; even k first, then odd k, each a fused multiply-add.
//
// Integer sums, scales and the order of additions equal those of AVX-512, so quantised results agree bit for bit.
#include <immintrin.h>

#include <cstring>

#include "core/ahead.hpp"
#include "core/kernels.hpp"

namespace ktserve {
namespace {

struct Pair {
  __m256 lo, hi;
};

__m256i load(const uint8_t* p) {
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
}

inline __attribute__((always_inline)) int32_t word(const uint8_t* p) {
  int32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

Pair half_scales(const uint8_t* p) {
  return {_mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(p + 16)))};
}

template <bool Signed>
Pair byte_scales(const uint8_t* p) {
  const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i upper = _mm_srli_si128(bytes, 8);
  if constexpr (Signed) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(upper))};
  }
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(upper))};
}

Pair times(Pair a, Pair b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}

// Half h (0: rows 0-7, 1: rows 8-15) of vector j of a block.
template <Format F>
inline __attribute__((always_inline)) __m256i quants(const uint8_t* block, int j, int h) {
  if constexpr (info(F).quant_bytes == 512) return load(block + 64 * j + 32 * h);
  __m256i v = load(block + 64 * (j & 3) + 32 * h);
  if (j >= 4) v = _mm256_srli_epi16(v, 4);
  v = _mm256_and_si256(v, _mm256_set1_epi8(15));
  constexpr int bits = upper_bits(F);
  if constexpr (bits != 0) {
    constexpr int each = 8 / bits;
    const int shift = bits * (j % each);
    __m256i upper = load(block + 256 + 64 * (j / each) + 32 * h);
    upper = shift < 4 ? _mm256_slli_epi16(upper, 4 - shift) : _mm256_srli_epi16(upper, shift - 4);
    v = _mm256_or_si256(v, _mm256_and_si256(upper, _mm256_set1_epi8(((1 << bits) - 1) << 4)));
  }
  return v;
}

template <Format F>
inline __attribute__((always_inline)) Pair scale_of(const uint8_t* meta, int64_t b, int g) {
  if constexpr (info(F).unit == kBlock) return half_scales(meta + b * info(F).meta_bytes);
  const uint8_t* super = meta + b / 8 * info(F).meta_bytes;
  if constexpr (F == Format::k6) return times(half_scales(super), byte_scales<true>(super + 32 + 16 * (b % 8 * 2 + g)));
  return times(half_scales(super), byte_scales<false>(super + 64 + 16 * (b % 8)));
}

template <Format F>
inline __attribute__((always_inline)) Pair minimum_of(const uint8_t* meta, int64_t b) {
  if constexpr (info(F).unit == kBlock) return half_scales(meta + b * info(F).meta_bytes + 32);
  const uint8_t* super = meta + b / 8 * info(F).meta_bytes;
  const Pair m = times(half_scales(super + 32), byte_scales<false>(super + 192 + 16 * (b % 8)));
  return {_mm256_sub_ps(_mm256_setzero_ps(), m.lo), _mm256_sub_ps(_mm256_setzero_ps(), m.hi)};
}

template <Format F>
inline __attribute__((always_inline)) __m256i dot4(__m256i sum, __m256i u, __m256i x) {
  __m256i products;
  if constexpr (F == Format::i8) {
    const __m256i w = _mm256_xor_si256(u, _mm256_set1_epi8(-128));
    products = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
  } else {
    products = _mm256_maddubs_epi16(u, x);
  }
  return _mm256_add_epi32(sum, _mm256_madd_epi16(products, _mm256_set1_epi16(1)));
}

// What a tile reads and writes: a panel and rows of its own. Blocks [part.first, part.first + part.count) of k are
// added to `out`, where sums wait, exactly, from one part of k to the next.
struct Tile {
  const uint8_t* w;
  int64_t k;
  const uint8_t* x;
  int64_t stride;
  float* out;
  int64_t out_stride;
  Part part;
};

template <int M>
inline __attribute__((always_inline)) void begin(Pair (&f)[M], const Tile& t) {
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
    const float* at = t.out + m * t.out_stride;
    f[m] = t.part.first == 0 ? Pair{_mm256_setzero_ps(), _mm256_setzero_ps()}
                             : Pair{_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)};
  }
}

template <int M>
inline __attribute__((always_inline)) void end(const Pair (&f)[M], const Tile& t) {
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
    _mm256_storeu_ps(t.out + m * t.out_stride, f[m].lo);
    _mm256_storeu_ps(t.out + m * t.out_stride + 8, f[m].hi);
  }
}

template <Format F, int M, bool Alone>
void tile(const Tile& t) {
  constexpr int groups = info(F).group == 16 ? 2 : 1;
  constexpr int steps = 8 / groups;
  const RowLayout row = row_layout(F, t.k);
  const int64_t stride = t.stride;
  const uint8_t* const w = t.w;
  const uint8_t* q = w + meta_size(F, t.k) + t.part.first * info(F).quant_bytes;
  const uint8_t* x = t.x + t.part.first * kBlock;
  const uint8_t* scales = t.x + row.scale + t.part.first * 4;
  const uint8_t* inits = t.x + row.init + t.part.first * groups * 4;
  const uint8_t* sums = t.x + row.sum + t.part.first * 4;
  Pair f[M];
  begin(f, t);
  Ahead<2, lines_of<F>(M, 1, 2, Alone)> next(w + panel_size(F, t.k), panel_size(F, t.k), t.k / kBlock, t.part);
  for (int64_t b = t.part.first; b < t.part.first + t.part.count; ++b) {
#pragma GCC unroll 2
    for (int g = 0; g < groups; ++g) {
      __m256i lo[M], hi[M];
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        lo[m] = _mm256_setzero_si256();
        if constexpr (info(F).bias != 0 && F != Format::i8) {
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
    }
    if constexpr (info(F).minima) {
      const Pair minimum = minimum_of<F>(w, b);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        const __m256 sum = _mm256_castsi256_ps(_mm256_set1_epi32(word(sums + m * stride)));
        f[m].lo = _mm256_fmadd_ps(minimum.lo, sum, f[m].lo);
        f[m].hi = _mm256_fmadd_ps(minimum.hi, sum, f[m].hi);
      }
      sums += 4;
    }
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

template <int M, bool Alone>
void tile_bf16(const Tile& t) {
  constexpr int64_t pairs = kBlock / 2;
  Pair f[M];
  begin(f, t);
  const int64_t size = panel_size(Format::bf16, t.k);
  Ahead<pairs, lines_of<Format::bf16>(M, 1, pairs, Alone)> next(t.w + size, size, padded_k(t.k) / kBlock, t.part);
  const int64_t last = (t.part.first + t.part.count) * pairs;
  for (int64_t i = t.part.first * pairs; i < last; ++i) {
    next.advance();
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

template <int M, bool Alone>
void tile_f32(const Tile& t) {
  Pair f[M];
  begin(f, t);
  const int64_t size = panel_size(Format::f32, t.k);
  Ahead<32, lines_of<Format::f32>(M, 1, 32, Alone)> next(t.w + size, size, padded_k(t.k) / kBlock, t.part);
  const int64_t end_of_part = (t.part.first + t.part.count) * kBlock;
  const int64_t last = end_of_part < t.k ? end_of_part : t.k;
  for (int64_t i = t.part.first * kBlock; i < last; ++i) {
    next.advance();
    const __m256 lo = _mm256_castsi256_ps(load(t.w + i * 64));
    const __m256 hi = _mm256_castsi256_ps(load(t.w + i * 64 + 32));
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const __m256 v = _mm256_castsi256_ps(_mm256_set1_epi32(word(t.x + m * t.stride + i * 4)));
      f[m].lo = _mm256_fmadd_ps(lo, v, f[m].lo);
      f[m].hi = _mm256_fmadd_ps(hi, v, f[m].hi);
    }
  }
  end(f, t);
}

template <Format F, int M, bool Alone>
void tile_for(const Tile& t) {
  if constexpr (F == Format::bf16)
    tile_bf16<M, Alone>(t);
  else if constexpr (F == Format::f32)
    tile_f32<M, Alone>(t);
  else
    tile<F, M, Alone>(t);
}

// A tile of so many rows, alone with its panel or one of several.
template <Format F>
void tile_of(int64_t rows, const Tile& t) {
  const bool alone = t.part.tiles == 1;
  if (rows == 1) return tile_for<F, 1, true>(t);
  if (rows == 2) return alone ? tile_for<F, 2, true>(t) : tile_for<F, 2, false>(t);
  return alone ? tile_for<F, 3, true>(t) : tile_for<F, 3, false>(t);
}

template <Format F>
void dot_format(const DotArgs& a) {
  constexpr int64_t most = 3;
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
                                                    {first, count, i, tiles}});
      }
    }
  }
}

void dot(const DotArgs& a) {
  with_format(a.format, [&](auto f) { dot_format<decltype(f)::value>(a); });
}

__m256 widen(__m128i bf16) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bf16), 16));
}

__m128i narrow(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd_bit = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd_bit, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0xd8));
}

struct FromF32 {
  const float* x;
  __m256 load(int64_t i) const { return _mm256_loadu_ps(x + i); }
  void copy(int64_t i, int64_t n, float* to) const { std::memcpy(to, x + i, static_cast<size_t>(n) * 4); }
};

struct FromBf16 {
  const uint16_t* x;
  __m256 load(int64_t i) const { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))); }
  void copy(int64_t i, int64_t n, float* to) const {
    uint16_t part[8] = {};
    std::memcpy(part, x + i, static_cast<size_t>(n) * 2);
    _mm256_storeu_ps(to, widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(part))));
  }
};

template <class From>
void pack_bf16(From from, int64_t k, int64_t first, int64_t last, uint8_t* row) {
  const auto store = [row](int64_t i, __m128i v) { _mm_store_si128(reinterpret_cast<__m128i*>(row + 2 * i), v); };
  int64_t i = first;
  for (; i + 8 <= last; i += 8) store(i, narrow(from.load(i - first)));
  if (i < last) {
    float rest[8] = {};
    from.copy(i - first, last - i, rest);
    store(i, narrow(_mm256_loadu_ps(rest)));
    i += 8;
  }
  if (last < k) return;
  std::memset(row + 2 * i, 0, static_cast<size_t>(row_layout(Format::bf16, k).bytes - 2 * i));
}

template <class From>
void pack_plain(From from, int64_t k, int64_t first, int64_t last, uint8_t* row) {
  float* to = reinterpret_cast<float*>(row);
  int64_t i = first;
  for (; i + 8 <= last; i += 8) _mm256_store_ps(to + i, from.load(i - first));
  if (i < last) {
    float rest[8] = {};
    from.copy(i - first, last - i, rest);
    _mm256_store_ps(to + i, _mm256_loadu_ps(rest));
    i += 8;
  }
  if (last < k) return;
  std::memset(row + 4 * i, 0, static_cast<size_t>(row_layout(Format::f32, k).bytes - 4 * i));
}

int32_t sum_of(__m256i v) {
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}

uint32_t most_of(__m256i v) {
  const __m128i four = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  const __m128i two = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epu32(two, _mm_shuffle_epi32(two, 0xb1))));
}

template <class From>
void pack_int8(Format format, From from, int64_t k, int64_t first, int64_t last, uint8_t* row) {
  const RowLayout layout = row_layout(format, k);
  const int bias = info(format).bias;
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  for (int64_t b = first / kBlock; b < last / kBlock; ++b) {
    __m256 x[4];
    __m256i bits = _mm256_setzero_si256();
    for (int i = 0; i < 4; ++i) {
      x[i] = from.load(b * kBlock + 8 * i - first);
      bits = _mm256_max_epu32(bits, _mm256_and_si256(_mm256_castps_si256(x[i]), magnitude));
    }
    const uint32_t most_bits = most_of(bits);
    float most;
    std::memcpy(&most, &most_bits, 4);
    const bool finite = most_bits < 0x7f800000u;
    const bool zero = !finite || most < 1e-30f;
    const float scale = !finite ? __builtin_nanf("") : zero ? 0.0f : most / 127.0f;
    const __m256 inverse = _mm256_set1_ps(zero ? 0.0f : 127.0f / most);
    const __m256i keep = _mm256_set1_epi32(zero ? 0 : -1);
    __m256i q[4];
    for (int i = 0; i < 4; ++i) q[i] = _mm256_and_si256(_mm256_cvtps_epi32(_mm256_mul_ps(x[i], inverse)), keep);
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    _mm256_store_si256(reinterpret_cast<__m256i*>(row + b * kBlock),
                       _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
    std::memcpy(row + layout.scale + b * 4, &scale, 4);
    const int32_t sums[2] = {sum_of(_mm256_add_epi32(q[0], q[1])), sum_of(_mm256_add_epi32(q[2], q[3]))};
    if (info(format).group == 16) {
      const int32_t init[2] = {-bias * sums[0], -bias * sums[1]};
      std::memcpy(row + layout.init + b * 8, init, 8);
    } else if (bias != 0) {
      const int32_t init = -bias * (sums[0] + sums[1]);
      std::memcpy(row + layout.init + b * 4, &init, 4);
    }
    if (info(format).minima) {
      const float sum = scale * static_cast<float>(sums[0] + sums[1]);
      std::memcpy(row + layout.sum + b * 4, &sum, 4);
    }
  }
}

int64_t row_bytes(Format format, int64_t k) {
  return row_layout(format, k).bytes;
}

void pack_f32(Format format, const float* x, int64_t k, int64_t first, int64_t last, uint8_t* row) {
  if (format == Format::bf16) return pack_bf16(FromF32{x}, k, first, last, row);
  if (format == Format::f32) return pack_plain(FromF32{x}, k, first, last, row);
  pack_int8(format, FromF32{x}, k, first, last, row);
}

void pack_from_bf16(Format format, const uint16_t* x, int64_t k, int64_t first, int64_t last, uint8_t* row) {
  if (format == Format::bf16) return pack_bf16(FromBf16{x}, k, first, last, row);
  if (format == Format::f32) return pack_plain(FromBf16{x}, k, first, last, row);
  pack_int8(format, FromBf16{x}, k, first, last, row);
}

// exp(x) for x <= 88: 2^n times a polynomial on [-ln2/2, ln2/2] (coefficients of Cephes' expf), within 2 ulp.
__m256 exp_ps(__m256 x) {
  x = _mm256_max_ps(_mm256_min_ps(x, _mm256_set1_ps(88.0f)), _mm256_set1_ps(-87.0f));
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  __m256 p = _mm256_set1_ps(1.9875691500e-4f);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.3981999507e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3334519073e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1665795894e-2f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666665459e-1f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.0000001201e-1f));
  p = _mm256_add_ps(_mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r), _mm256_set1_ps(1.0f));
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(p, _mm256_castsi256_ps(power));
}

__m256 silu_mul8(__m256 g, __m256 u) {
  const __m256 e = exp_ps(_mm256_sub_ps(_mm256_setzero_ps(), g));
  return _mm256_mul_ps(_mm256_div_ps(g, _mm256_add_ps(_mm256_set1_ps(1.0f), e)), u);
}

__m256i tail(int64_t left) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(left < 8 ? left : 8)),
                            _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

void silu_mul(float* gate, const float* up, int64_t n) {
  for (int64_t i = 0; i < n; i += 8) {
    const __m256i mask = tail(n - i);
    const __m256 h = silu_mul8(_mm256_maskload_ps(gate + i, mask), _mm256_maskload_ps(up + i, mask));
    _mm256_maskstore_ps(gate + i, mask, h);
  }
}

__m256 eight(const uint16_t* b) {
  return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b)));
}
__m256 eight(const float* b) {
  return _mm256_loadu_ps(b);
}

template <class B>
void lora_b(const B* b, int64_t panels, int64_t rank, const float* t, float* out) {
  for (int64_t p = 0; p < panels; ++p, out += kPanel) {
    __m256 lo = _mm256_loadu_ps(out);
    __m256 hi = _mm256_loadu_ps(out + 8);
    for (int64_t r = 0; r < rank; ++r, b += kPanel) {
      lo = _mm256_fmadd_ps(eight(b), _mm256_set1_ps(t[r]), lo);
      hi = _mm256_fmadd_ps(eight(b + 8), _mm256_set1_ps(t[r]), hi);
    }
    _mm256_storeu_ps(out, lo);
    _mm256_storeu_ps(out + 8, hi);
  }
}

void combine(const float* const* rows, const float* weights, int64_t count, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += 8) {
    const __m256i mask = tail(n - i);
    __m256 sum = _mm256_setzero_ps();
    for (int64_t j = 0; j < count; ++j) {
      if (rows[j] == nullptr) continue;
      sum = _mm256_fmadd_ps(_mm256_set1_ps(weights[j]), _mm256_maskload_ps(rows[j] + i, mask), sum);
    }
    _mm256_maskstore_ps(out + i, mask, sum);
  }
}

void to_bf16(const float* x, int64_t n, uint16_t* out) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), narrow(_mm256_loadu_ps(x + i)));
  if (i < n) {
    float rest[8] = {};
    uint16_t half[8];
    std::memcpy(rest, x + i, static_cast<size_t>(n - i) * 4);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(half), narrow(_mm256_loadu_ps(rest)));
    std::memcpy(out + i, half, static_cast<size_t>(n - i) * 2);
  }
}

void from_bf16(const uint16_t* x, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))));
  if (i < n) {
    float rest[8];
    FromBf16{x}.copy(i, n - i, rest);
    std::memcpy(out + i, rest, static_cast<size_t>(n - i) * 4);
  }
}

}  // namespace

const Kernels& kernels_avx2() {
  static constexpr Kernels table{Isa::avx2,        row_bytes,     pack_f32, pack_from_bf16, dot,      silu_mul,
                                 lora_b<uint16_t>, lora_b<float>, combine,  to_bf16,        from_bf16};
  return table;
}

}  // namespace ktserve
