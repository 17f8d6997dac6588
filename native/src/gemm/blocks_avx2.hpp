// A block's quants, scales and minima as vectors of 16 rows (two registers). Included by files compiled for AVX2, hence
// internal linkage.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "packing/format.hpp"

namespace ktserve {
namespace {

struct Pair {
  __m256 lo, hi;
};

inline __m256i load(const uint8_t* p) {
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
}

inline __attribute__((always_inline)) int32_t word(const uint8_t* p) {
  int32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

inline Pair half_scales(const uint8_t* p) {
  return {_mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(p + 16)))};
}

template <bool Signed>
inline Pair byte_scales(const uint8_t* p) {
  const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i upper = _mm_srli_si128(bytes, 8);
  if constexpr (Signed) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(upper))};
  }
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(upper))};
}

inline Pair times(Pair a, Pair b) {
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
  if constexpr (F == Format::k6)
    return times(half_scales(super), byte_scales<true>(super + info(F).steps + 16 * (b % 8 * 2 + g)));
  return times(half_scales(super), byte_scales<false>(super + info(F).steps + 16 * (b % 8)));
}

template <Format F>
inline __attribute__((always_inline)) Pair minimum_of(const uint8_t* meta, int64_t b) {
  if constexpr (info(F).unit == kBlock) return half_scales(meta + b * info(F).meta_bytes + kMinimum);
  const uint8_t* super = meta + b / 8 * info(F).meta_bytes;
  const Pair m = times(half_scales(super + kMinimum), byte_scales<false>(super + info(F).min_steps + 16 * (b % 8)));
  return {_mm256_sub_ps(_mm256_setzero_ps(), m.lo), _mm256_sub_ps(_mm256_setzero_ps(), m.hi)};
}

}  // namespace
}  // namespace ktserve
