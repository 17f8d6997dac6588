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

inline Pair load_pair(const float* p) {
  return {_mm256_load_ps(p), _mm256_load_ps(p + 8)};
}

inline void store_pair(float* p, Pair v) {
  _mm256_store_ps(p, v.lo);
  _mm256_store_ps(p + 8, v.hi);
}

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
inline __attribute__((always_inline)) __m256i eight_bytes(const uint8_t* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return Signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes);
}

template <bool Signed>
inline Pair byte_scales(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(eight_bytes<Signed>(p)), _mm256_cvtepi32_ps(eight_bytes<Signed>(p + 8))};
}

inline Pair times(Pair a, Pair b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}

inline Pair negated(Pair a) {
  return {_mm256_sub_ps(_mm256_setzero_ps(), a.lo), _mm256_sub_ps(_mm256_setzero_ps(), a.hi)};
}

// The lower or upper nibbles of 16 bytes.
inline __attribute__((always_inline)) Pair lower_nibbles(const uint8_t* p) {
  const auto of = [](__m256i bytes) { return _mm256_cvtepi32_ps(_mm256_and_si256(bytes, _mm256_set1_epi32(15))); };
  return {of(eight_bytes<false>(p)), of(eight_bytes<false>(p + 8))};
}

inline __attribute__((always_inline)) Pair upper_nibbles(const uint8_t* p) {
  const auto of = [](__m256i bytes) { return _mm256_cvtepi32_ps(_mm256_srli_epi32(bytes, 4)); };
  return {of(eight_bytes<false>(p)), of(eight_bytes<false>(p + 8))};
}

// 2^(e - 128)
inline __attribute__((always_inline)) Pair exponent_scales(const uint8_t* p) {
  const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(p));
  const auto of = [](__m128i eight) {
    const __m256i e = _mm256_cvtepu8_epi32(eight);
    const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
    const __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);  // 2^-127, 2^-128
    return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, small, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e)));
  };
  return {of(bytes), of(_mm_srli_si128(bytes, 8))};
}

inline __attribute__((always_inline)) __m256i shifted(__m256i v, int left) {
  return left > 0 ? _mm256_slli_epi16(v, left) : left < 0 ? _mm256_srli_epi16(v, -left) : v;
}

// Formats whose quants need all eight bits are read as int8.
template <Format F>
constexpr bool as_signed = info(F).bias == 128;

// Half h (0: rows 0-7, 1: rows 8-15) of vector j of a block (a decoded one of a grid): u8, or int8.
template <Format F>
inline __attribute__((always_inline)) __m256i quants(const uint8_t* block, int j, int h) {
  constexpr int low = low_bits(F), bits = upper_bits(F);
  if constexpr (has_grid(F)) return load(block + 64 * j + 32 * h);
  if constexpr (low == 8) return _mm256_xor_si256(load(block + 64 * j + 32 * h), _mm256_set1_epi8(-128));
  __m256i v = load(block + 64 * (low == 4 ? j & 3 : j / 4) + 32 * h);
  v = shifted(v, low == 4 ? -(j & 4) : -2 * (j & 3));
  v = _mm256_and_si256(v, _mm256_set1_epi8((1 << low) - 1));
  if constexpr (bits != 0) {
    constexpr int each = 8 / bits;
    const __m256i upper = shifted(load(block + 64 * (low + j / each) + 32 * h), low - bits * (j % each));
    v = _mm256_or_si256(v, _mm256_and_si256(upper, _mm256_set1_epi8(((1 << bits) - 1) << low)));
  }
  if constexpr (info(F).codes != Codes::none) {
    static constexpr CodeTable table = code_table(F);
    __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table.codes));
    if constexpr (as_signed<F>) codes = _mm_xor_si128(codes, _mm_set1_epi8(-128));
    v = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(codes), v);
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
  Pair d, minimum;
};

template <Format F>
inline __attribute__((always_inline)) UnitScales unit_scales(const uint8_t* meta, int64_t b) {
  if constexpr (info(F).steps == 0 || has_grid(F)) return UnitScales{};
  const uint8_t* unit = unit_of<F>(meta, b);
  return {half_scales(unit), info(F).minima ? negated(half_scales(unit + kMinimum)) : Pair{}};
}

// The scales of group g of block b; `unit`: those of the unit it lies in.
template <Format F>
inline __attribute__((always_inline)) Pair scale_of(const UnitScales& unit, const uint8_t* meta, int64_t b, int g) {
  if constexpr (info(F).exponents) return exponent_scales(meta + b * info(F).meta_bytes);
  const uint8_t* at = unit_of<F>(meta, b);
  if constexpr (info(F).steps == 0) return half_scales(at);
  const uint8_t* steps = at + info(F).steps + 16 * (b % 8 * groups_of(F) + g);
  return times(unit.d, nibble_steps(F) ? lower_nibbles(steps) : byte_scales<!info(F).minima>(steps));
}

template <Format F>
inline __attribute__((always_inline)) Pair minimum_of(const UnitScales& unit, const uint8_t* meta, int64_t b, int g) {
  const uint8_t* at = unit_of<F>(meta, b);
  if constexpr (zero_points(F)) return negated(times(half_scales(at), byte_scales<false>(at + info(F).min_steps)));
  if constexpr (info(F).steps == 0) return half_scales(at + kMinimum);
  const uint8_t* steps = at + info(F).min_steps + 16 * (b % 8 * groups_of(F) + g);
  return times(unit.minimum, nibble_steps(F) ? upper_nibbles(steps) : byte_scales<false>(steps));
}

// The scales of f8 times 2^8: its numbers are read as half precision with the same bits, 2^-8 of their value.
inline Pair f8_scales(const uint8_t* meta, int64_t b) {
  const auto* d = reinterpret_cast<const float*>(unit_of<Format::f8>(meta, b));
  const __m256 up = _mm256_set1_ps(256);
  return {_mm256_mul_ps(_mm256_load_ps(d), up), _mm256_mul_ps(_mm256_load_ps(d + 8), up)};
}

// 16 numbers of f8, times 2^-8.
inline __attribute__((always_inline)) Pair f8_numbers(const uint8_t* p) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}

}  // namespace
}  // namespace ktserve
