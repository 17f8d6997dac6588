// A block's quants, scales and minima as vectors of 16 rows. Included by files compiled for AVX-512 only, hence
// internal linkage.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "packing/format.hpp"

namespace ktserve {
namespace {

inline __m512 half_scales(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline __m512 byte_scales(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p))));
}
inline __m512 signed_scales(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p))));
}

inline __m512 negated(__m512 v) {
  return _mm512_xor_ps(v, _mm512_set1_ps(-0.0f));
}

// The nibbles of 16 bytes, from bit `shift` on.
inline __attribute__((always_inline)) __m512 nibbles(const uint8_t* p, int shift) {
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm512_cvtepi32_ps(
      _mm512_and_si512(_mm512_srli_epi32(bytes, static_cast<unsigned>(shift)), _mm512_set1_epi32(15)));
}
// 2^(e - 128)
inline __m512 exponent_scales(const uint8_t* p) {
  const __m512i e = _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
  const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
  const __mmask16 small = _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2));  // 2^-127, 2^-128: below the normal floats
  return _mm512_castsi512_ps(_mm512_mask_sllv_epi32(normal, small, _mm512_set1_epi32(0x00200000), e));
}

inline __attribute__((always_inline)) __m512i shifted(__m512i v, int left) {
  return left > 0 ? _mm512_slli_epi16(v, left) : left < 0 ? _mm512_srli_epi16(v, -left) : v;
}

// Vector j of 8 of a block (a decoded one of a grid): u8 quants of k = 4j..4j+3 for 16 rows.
template <Format F>
inline __attribute__((always_inline)) __m512i quants(const uint8_t* block, int j) {
  constexpr int low = low_bits(F), bits = upper_bits(F);
  if constexpr (low == 8) return _mm512_load_si512(block + 64 * j);
  __m512i v = _mm512_load_si512(block + 64 * (low == 4 ? j & 3 : j / 4));
  v = shifted(v, low == 4 ? -(j & 4) : -2 * (j & 3));
  v = _mm512_and_si512(v, _mm512_set1_epi8((1 << low) - 1));
  if constexpr (bits != 0) {
    constexpr int each = 8 / bits;
    const __m512i upper = shifted(_mm512_load_si512(block + 64 * (low + j / each)), low - bits * (j % each));
    v = _mm512_ternarylogic_epi32(v, upper, _mm512_set1_epi8(((1 << bits) - 1) << low), 0xf8);  // v | (upper & mask)
  }
  if constexpr (info(F).codes != Codes::none) {
    static constexpr CodeTable table = code_table(F);
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table.codes));
    v = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(codes), v);
  }
  return v;
}

// The scales and minima of the unit that block b lies in.
template <Format F>
inline const uint8_t* unit_of(const uint8_t* meta, int64_t b) {
  return meta + b / (info(F).unit / kBlock) * info(F).meta_bytes;
}

// What the factors of a unit's groups are multiplied with, where there are such: d and -dmin.
struct UnitScales {
  __m512 d, minimum;
};

template <Format F>
inline __attribute__((always_inline)) UnitScales unit_scales(const uint8_t* meta, int64_t b) {
  if constexpr (info(F).steps == 0 || has_grid(F)) return UnitScales{};
  const uint8_t* unit = unit_of<F>(meta, b);
  return {half_scales(unit), info(F).minima ? negated(half_scales(unit + kMinimum)) : __m512{}};
}

// Scale of group g (of 16 or 32 k) of block b, per row; `unit`: those of the unit it lies in.
template <Format F>
inline __attribute__((always_inline)) __m512 scale_of(const UnitScales& unit, const uint8_t* meta, int64_t b, int g) {
  if constexpr (info(F).exponents) return exponent_scales(meta + b * info(F).meta_bytes);
  const uint8_t* at = unit_of<F>(meta, b);
  if constexpr (info(F).steps == 0) return half_scales(at);
  const uint8_t* steps = at + info(F).steps + 16 * (b % 8 * groups_of(F) + g);
  return _mm512_mul_ps(unit.d, nibble_steps(F)  ? nibbles(steps, 0)
                               : info(F).minima ? byte_scales(steps)
                                                : signed_scales(steps));
}

// The group's minima, with their sign.
template <Format F>
inline __attribute__((always_inline)) __m512 minimum_of(const UnitScales& unit, const uint8_t* meta, int64_t b, int g) {
  const uint8_t* at = unit_of<F>(meta, b);
  if constexpr (zero_points(F)) return negated(_mm512_mul_ps(half_scales(at), byte_scales(at + info(F).min_steps)));
  if constexpr (info(F).steps == 0) return half_scales(at + kMinimum);
  const uint8_t* steps = at + info(F).min_steps + 16 * (b % 8 * groups_of(F) + g);
  return _mm512_mul_ps(unit.minimum, nibble_steps(F) ? nibbles(steps, 4) : byte_scales(steps));
}

template <Format F>
inline __attribute__((always_inline)) __m512 scale_of(const uint8_t* meta, int64_t b, int g) {
  return scale_of<F>(unit_scales<F>(meta, b), meta, b, g);
}

template <Format F>
inline __attribute__((always_inline)) __m512 minimum_of(const uint8_t* meta, int64_t b, int g) {
  return minimum_of<F>(unit_scales<F>(meta, b), meta, b, g);
}

inline __attribute__((always_inline)) int32_t word(const uint8_t* p) {
  int32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

inline __attribute__((always_inline)) __m512 broadcast(const uint8_t* p) {
  return _mm512_castsi512_ps(_mm512_set1_epi32(word(p)));
}

// The scales of f8 times 2^8: its numbers are read as half precision with the same bits, 2^-8 of their value.
inline __m512 f8_scales(const uint8_t* meta, int64_t b) {
  return _mm512_mul_ps(_mm512_load_ps(unit_of<Format::f8>(meta, b)), _mm512_set1_ps(256));
}

// 16 numbers of f8, times 2^-8.
inline __attribute__((always_inline)) __m512 f8_numbers(const uint8_t* p) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbfff))));
}

}  // namespace
}  // namespace ktserve
