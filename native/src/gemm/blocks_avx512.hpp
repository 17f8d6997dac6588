// A block's quants, scales and minima as vectors of 16 rows. Included by files compiled for AVX-512 only, hence
// internal linkage.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "packing/format.hpp"

namespace ktserve {
namespace {

inline __m512 half_scales(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
}
inline __m512 byte_scales(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p))));
}
inline __m512 signed_scales(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p))));
}

// Vector j of 8 of a block: u8 quants of k = 4j..4j+3 for 16 rows.
template <Format F>
inline __attribute__((always_inline)) __m512i quants(const uint8_t* block, int j) {
  if constexpr (info(F).quant_bytes == 512) return _mm512_load_si512(block + 64 * j);
  const __m512i nibbles = _mm512_set1_epi8(15);
  __m512i v = _mm512_load_si512(block + 64 * (j & 3));
  if (j >= 4) v = _mm512_srli_epi16(v, 4);
  v = _mm512_and_si512(v, nibbles);
  constexpr int bits = upper_bits(F);
  if constexpr (bits != 0) {
    constexpr int each = 8 / bits;
    const int shift = bits * (j % each);
    __m512i upper = _mm512_load_si512(block + 256 + 64 * (j / each));
    upper = shift < 4 ? _mm512_slli_epi16(upper, 4 - shift) : _mm512_srli_epi16(upper, shift - 4);
    v = _mm512_ternarylogic_epi32(v, upper, _mm512_set1_epi8(((1 << bits) - 1) << 4), 0xf8);  // v | (upper & mask)
  }
  return v;
}

// Scale of group g (of 16 or 32 k) of block b, per row; and the block's minima with their sign.
template <Format F>
inline __attribute__((always_inline)) __m512 scale_of(const uint8_t* meta, int64_t b, int g) {
  if constexpr (info(F).unit == kBlock) return half_scales(meta + b * info(F).meta_bytes);
  const uint8_t* super = meta + b / 8 * info(F).meta_bytes;
  if constexpr (F == Format::k6) {
    return _mm512_mul_ps(half_scales(super), signed_scales(super + info(F).steps + 16 * (b % 8 * 2 + g)));
  }
  return _mm512_mul_ps(half_scales(super), byte_scales(super + info(F).steps + 16 * (b % 8)));
}

template <Format F>
inline __attribute__((always_inline)) __m512 minimum_of(const uint8_t* meta, int64_t b) {
  if constexpr (info(F).unit == kBlock) return half_scales(meta + b * info(F).meta_bytes + kMinimum);
  const uint8_t* super = meta + b / 8 * info(F).meta_bytes;
  const __m512 m = _mm512_mul_ps(half_scales(super + kMinimum), byte_scales(super + info(F).min_steps + 16 * (b % 8)));
  return _mm512_sub_ps(_mm512_setzero_ps(), m);
}

inline __attribute__((always_inline)) int32_t word(const uint8_t* p) {
  int32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

inline __attribute__((always_inline)) __m512 broadcast(const uint8_t* p) {
  return _mm512_castsi512_ps(_mm512_set1_epi32(word(p)));
}

}  // namespace
}  // namespace ktserve
