// Pairs of int16 in a register of int32 lanes: how int16 products load, join and multiply them, by AVX-512 and by AVX2.
// Included as attention_tiles.hpp is.
#pragma once

#include "attention/attention_tiles.hpp"

namespace ktserve::KT_SIMD {

#if KT_HAS_512
inline I16 load_pairs(const int16_t* p) {
  return {_mm512_loadu_si512(p)};
}
inline void store_pairs(int16_t* p, I16 x) {
  _mm512_storeu_si512(p, x.v);
}
inline I16 set_pair(const int16_t* p) {
  int pair;
  std::memcpy(&pair, p, 4);
  return {_mm512_set1_epi32(pair)};
}
// Of 16 pairs: sum + a[0] b[0] + a[1] b[1]. The empty statement keeps GCC from adding in another order, for which it
// has no registers.
inline I16 dot_pairs(I16 sum, I16 a, I16 b) {
  I16 result{_mm512_dpwssd_epi32(sum.v, a.v, b.v)};
  __asm__("" : "+v"(result.v));
  return result;
}
inline F16 to_floats(I16 x) {
  return {_mm512_cvtepi32_ps(x.v)};
}
// Of 32 bf16 the magnitude's bits.
inline I16 most_of_pairs(I16 most, const bf16* p) {
  return {_mm512_max_epu16(most.v, _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi16(0x7fff)))};
}
inline I16 first_of_pairs(I16 x) {
  return {_mm512_slli_epi32(x.v, 16)};
}
inline I16 second_of_pairs(I16 x) {
  return {_mm512_and_si512(x.v, _mm512_set1_epi32(static_cast<int>(0xffff0000u)))};
}
inline F16 bits_as_floats(I16 x) {
  return {_mm512_castsi512_ps(x.v)};
}
// The largest of each vector's first numbers and of its second ones: 16 bf16 magnitudes in their order, as floats.
inline F16 largest_of_pairs(const I16 (&m)[8]) {
  __m512i two[4], four[2];
  for (int i = 0; i < 4; ++i)
    two[i] = _mm512_max_epu16(_mm512_unpacklo_epi32(m[2 * i].v, m[2 * i + 1].v),
                              _mm512_unpackhi_epi32(m[2 * i].v, m[2 * i + 1].v));
  for (int i = 0; i < 2; ++i)
    four[i] = _mm512_max_epu16(_mm512_unpacklo_epi64(two[2 * i], two[2 * i + 1]),
                               _mm512_unpackhi_epi64(two[2 * i], two[2 * i + 1]));
  const __m512i both = _mm512_max_epu16(_mm512_shuffle_i32x4(four[0], four[1], 0x88),
                                        _mm512_shuffle_i32x4(four[0], four[1], 0xdd));  // parts: 0, 0, 1, 1
  const __m512i all = _mm512_max_epu16(both, _mm512_shuffle_i32x4(both, both, 0xb1));
  const __m256i ordered = _mm512_castsi512_si256(_mm512_shuffle_i32x4(all, all, 0x08));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(ordered), 16))};
}
// Floats with a whole number in their low 16 bits become pairs of these.
inline I16 join_pairs(F16 first, F16 second) {
  const __m512i low_bytes = _mm512_set4_epi32(0x0d0c0000, 0x09080000, 0x05040000, 0x01000000);
  return {_mm512_mask_shuffle_epi8(_mm512_castps_si512(first.v), 0xccccccccccccccccu, _mm512_castps_si512(second.v),
                                   low_bytes)};
}
inline void store_low_halves(int16_t* p, F16 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_castps_si512(x.v)));
}
inline I16 widen_bytes(const int8_t* from) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
}
#else
inline I16 load_pairs(const int16_t* p) {
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline void store_pairs(int16_t* p, I16 x) {
  __m256i* q = reinterpret_cast<__m256i*>(p);
  _mm256_storeu_si256(q, x.a);
  _mm256_storeu_si256(q + 1, x.b);
}
inline I16 set_pair(const int16_t* p) {
  int pair;
  std::memcpy(&pair, p, 4);
  return {_mm256_set1_epi32(pair), _mm256_set1_epi32(pair)};
}
inline I16 dot_pairs(I16 sum, I16 x, I16 y) {
  I16 result{_mm256_add_epi32(sum.a, _mm256_madd_epi16(x.a, y.a)),
             _mm256_add_epi32(sum.b, _mm256_madd_epi16(x.b, y.b))};
  __asm__("" : "+x"(result.a), "+x"(result.b));
  return result;
}
inline F16 to_floats(I16 x) {
  return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)};
}
inline I16 most_of_pairs(I16 most, const bf16* p) {
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  const __m256i mask = _mm256_set1_epi16(0x7fff);
  return {_mm256_max_epu16(most.a, _mm256_and_si256(_mm256_loadu_si256(q), mask)),
          _mm256_max_epu16(most.b, _mm256_and_si256(_mm256_loadu_si256(q + 1), mask))};
}
inline I16 first_of_pairs(I16 x) {
  return {_mm256_slli_epi32(x.a, 16), _mm256_slli_epi32(x.b, 16)};
}
inline I16 second_of_pairs(I16 x) {
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
inline F16 bits_as_floats(I16 x) {
  return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)};
}
// The largest of each vector's first numbers and of its second ones: 16 bf16 magnitudes in their order, as floats.
inline F16 largest_of_pairs(const I16 (&m)[8]) {
  __m256i one[8], two[4], four[2];
  for (int i = 0; i < 8; ++i) one[i] = _mm256_max_epu16(m[i].a, m[i].b);
  for (int i = 0; i < 4; ++i)
    two[i] = _mm256_max_epu16(_mm256_unpacklo_epi32(one[2 * i], one[2 * i + 1]),
                              _mm256_unpackhi_epi32(one[2 * i], one[2 * i + 1]));
  for (int i = 0; i < 2; ++i)
    four[i] = _mm256_max_epu16(_mm256_unpacklo_epi64(two[2 * i], two[2 * i + 1]),
                               _mm256_unpackhi_epi64(two[2 * i], two[2 * i + 1]));
  const __m256i all = _mm256_max_epu16(_mm256_permute2x128_si256(four[0], four[1], 0x20),
                                       _mm256_permute2x128_si256(four[0], four[1], 0x31));
  const auto widened = [](__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); };
  return {widened(_mm256_castsi256_si128(all)), widened(_mm256_extracti128_si256(all, 1))};
}
inline I16 join_pairs(F16 first, F16 second) {
  const auto join = [](__m256 x, __m256 y) {
    return _mm256_blend_epi16(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_castps_si256(y), 16), 0xaa);
  };
  return {join(first.a, second.a), join(first.b, second.b)};
}
inline void store_low_halves(int16_t* p, F16 x) {
  const __m256i low = _mm256_set1_epi32(0xffff);
  const __m256i packed = _mm256_packus_epi32(_mm256_and_si256(_mm256_castps_si256(x.a), low),
                                             _mm256_and_si256(_mm256_castps_si256(x.b), low));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
inline I16 widen_bytes(const int8_t* from) {
  const __m128i* q = reinterpret_cast<const __m128i*>(from);
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(q)), _mm256_cvtepi8_epi16(_mm_loadu_si128(q + 1))};
}
#endif

}  // namespace ktserve::KT_SIMD
