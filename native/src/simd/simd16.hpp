// Sixteen floats at once, the same names for AVX2 and AVX-512, so that a kernel is written once.
//
//   F16 on AVX-512:  [ zmm: lanes 0 ........ 15 ]
//   F16 on AVX2:     [ ymm: lanes 0 .. 7 ][ ymm: lanes 8 .. 15 ]
//
// Included by the *_avx2.cpp and *_avx512.cpp files only. Everything lies in a namespace named after the instruction
// set (KT_SIMD), and no standard-library template is used here: a weak symbol compiled for AVX-512 must never
// be the one that the linker keeps for shared code.
#pragma once

// GCC's own intrinsics start some results from an undefined register and then warn about it.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define KT_SIMD avx512
#define KT_HAS_512 1
#else
#define KT_SIMD avx2
#define KT_HAS_512 0
#endif

namespace ktserve::KT_SIMD {

// The upper half of a float. Conversions round to nearest even.
struct bf16 {
  uint16_t bits;
};

inline float to_float(float x) {
  return x;
}
inline float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline constexpr int64_t least(int64_t a, int64_t b) {
  return a < b ? a : b;
}

#if KT_HAS_512

struct F16 {
  __m512 v;
};

inline F16 zero16() {
  return {_mm512_setzero_ps()};
}
inline F16 set16(float x) {
  return {_mm512_set1_ps(x)};
}
inline F16 load16(const float* p) {
  return {_mm512_loadu_ps(p)};
}
inline F16 load16(const bf16* p) {
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
inline void store16(float* p, F16 a) {
  _mm512_storeu_ps(p, a.v);
}
// Round to nearest even in integers: 0x7fff plus the last kept bit carries upwards; NaN stays a (quiet) NaN.
inline __m256i round_bf16(F16 a) {
  const __m512i u = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  r = _mm512_mask_mov_epi32(r, nan, _mm512_set1_epi32(0x7fc0));
  return _mm512_cvtepi32_epi16(r);
}
inline void store16(bf16* p, F16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), round_bf16(a));
}

inline F16 load_part(const float* p, int n, float fill = 0.0f) {
  const __mmask16 m = static_cast<__mmask16>((1u << n) - 1u);
  return {_mm512_mask_loadu_ps(_mm512_set1_ps(fill), m, p)};
}
inline F16 load_part(const bf16* p, int n, float fill = 0.0f) {
  const __mmask16 m = static_cast<__mmask16>((1u << n) - 1u);
  const __m512i w = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, p)), 16);
  return {_mm512_mask_mov_ps(_mm512_set1_ps(fill), m, _mm512_castsi512_ps(w))};
}
inline void store_part(float* p, F16 a, int n) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1u), a.v);
}
inline void store_part(bf16* p, F16 a, int n) {
  _mm256_mask_storeu_epi16(p, static_cast<__mmask16>((1u << n) - 1u), round_bf16(a));
}

inline F16 add(F16 a, F16 b) {
  return {_mm512_add_ps(a.v, b.v)};
}
inline F16 sub(F16 a, F16 b) {
  return {_mm512_sub_ps(a.v, b.v)};
}
inline F16 mul(F16 a, F16 b) {
  return {_mm512_mul_ps(a.v, b.v)};
}
inline F16 div(F16 a, F16 b) {
  return {_mm512_div_ps(a.v, b.v)};
}
inline F16 fma(F16 a, F16 b, F16 c) {
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
inline F16 fms(F16 a, F16 b, F16 c) {
  return {_mm512_fmsub_ps(a.v, b.v, c.v)};
}
inline F16 fnma(F16 a, F16 b, F16 c) {
  return {_mm512_fnmadd_ps(a.v, b.v, c.v)};
}
// The second operand is returned if either is NaN (the instruction's rule).
inline F16 max(F16 a, F16 b) {
  return {_mm512_max_ps(a.v, b.v)};
}
inline F16 min(F16 a, F16 b) {
  return {_mm512_min_ps(a.v, b.v)};
}
inline F16 round_even(F16 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// a * 2^n for an integral n in [-160, 128].
inline F16 scale2(F16 a, F16 n) {
  return {_mm512_scalef_ps(a.v, n.v)};
}
// x where a <= b, 0 elsewhere.
inline F16 where_most(F16 a, F16 b, F16 x) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ), x.v)};
}
inline bool has_nan(F16 a) {
  return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q) != 0;
}
// Lanes >= n become fill.
inline F16 keep_first(F16 a, int n, float fill) {
  return {_mm512_mask_mov_ps(_mm512_set1_ps(fill), static_cast<__mmask16>((1u << n) - 1u), a.v)};
}

struct F8 {
  __m256 v;
};
inline F8 low_half(F16 a) {
  return {_mm512_castps512_ps256(a.v)};
}
inline F8 high_half(F16 a) {
  return {_mm512_extractf32x8_ps(a.v, 1)};
}

// Sixteen int32.
struct I16 {
  __m512i v;
};
inline I16 zero_int16() {
  return {_mm512_setzero_si512()};
}
// Rounds to nearest even.
inline I16 to_int(F16 a) {
  return {_mm512_cvtps_epi32(a.v)};
}
// The bits of |a|, which as integers are ordered as the floats, infinity above them and NaN above all.
inline I16 magnitude(F16 a) {
  return {_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7fffffff))};
}
inline I16 max(I16 a, I16 b) {
  return {_mm512_max_epu32(a.v, b.v)};
}
inline int32_t sum(I16 a) {
  return _mm512_reduce_add_epi32(a.v);
}
inline uint32_t largest(I16 a) {
  return _mm512_reduce_max_epu32(a.v);
}
// 32 values within int8 to 32-byte aligned memory.
inline void store_bytes(uint8_t* p, I16 a, I16 b) {
  _mm_store_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
  _mm_store_si128(reinterpret_cast<__m128i*>(p + 16), _mm512_cvtepi32_epi8(b.v));
}

#else  // AVX2

struct F16 {
  __m256 a, b;
};

inline F16 zero16() {
  return {_mm256_setzero_ps(), _mm256_setzero_ps()};
}
inline F16 set16(float x) {
  return {_mm256_set1_ps(x), _mm256_set1_ps(x)};
}
inline F16 load16(const float* p) {
  return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
inline __m256 widen(__m128i h) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
inline F16 load16(const bf16* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {widen(_mm_loadu_si128(q)), widen(_mm_loadu_si128(q + 1))};
}
inline void store16(float* p, F16 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
// Round to nearest even in integers: 0x7fff plus the last kept bit carries upwards; NaN stays a (quiet) NaN.
inline __m256i round_bf16_half(__m256 x) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
}
inline __m256i round_bf16(F16 x) {
  const __m256i packed = _mm256_packus_epi32(round_bf16_half(x.a), round_bf16_half(x.b));
  return _mm256_permute4x64_epi64(packed, 0xd8);
}
inline void store16(bf16* p, F16 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), round_bf16(x));
}

template <class T>
inline F16 load_part(const T* p, int n, float fill = 0.0f) {
  float t[16];
  for (int i = 0; i < 16; ++i) t[i] = i < n ? to_float(p[i]) : fill;
  return load16(t);
}
template <class T>
inline void store_part(T* p, F16 x, int n) {
  T t[16];
  store16(t, x);
  std::memcpy(p, t, static_cast<size_t>(n) * sizeof(T));
}

inline F16 add(F16 x, F16 y) {
  return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}
inline F16 sub(F16 x, F16 y) {
  return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
}
inline F16 mul(F16 x, F16 y) {
  return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}
inline F16 div(F16 x, F16 y) {
  return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)};
}
inline F16 fma(F16 x, F16 y, F16 z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline F16 fms(F16 x, F16 y, F16 z) {
  return {_mm256_fmsub_ps(x.a, y.a, z.a), _mm256_fmsub_ps(x.b, y.b, z.b)};
}
inline F16 fnma(F16 x, F16 y, F16 z) {
  return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)};
}
// The second operand is returned if either is NaN (the instruction's rule).
inline F16 max(F16 x, F16 y) {
  return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
}
inline F16 min(F16 x, F16 y) {
  return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)};
}
inline F16 round_even(F16 x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
// a * 2^n for an integral n in [-160, 128]: in two factors, so that neither leaves the exponent's range.
inline __m256 scale2_half(__m256 a, __m256 n) {
  const __m256i i = _mm256_cvtps_epi32(n);
  const __m256i half = _mm256_srai_epi32(i, 1);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256 f = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
  const __m256 g = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(i, half), bias), 23));
  return _mm256_mul_ps(_mm256_mul_ps(a, f), g);
}
inline F16 scale2(F16 x, F16 n) {
  return {scale2_half(x.a, n.a), scale2_half(x.b, n.b)};
}
// x where y <= z, 0 elsewhere.
inline F16 where_most(F16 y, F16 z, F16 x) {
  return {_mm256_and_ps(_mm256_cmp_ps(y.a, z.a, _CMP_LE_OQ), x.a),
          _mm256_and_ps(_mm256_cmp_ps(y.b, z.b, _CMP_LE_OQ), x.b)};
}
inline bool has_nan(F16 x) {
  return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q)));
}
// Lanes >= n become fill.
inline F16 keep_first(F16 x, int n, float fill) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256 f = _mm256_set1_ps(fill);
  const __m256 ka = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane));
  const __m256 kb = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), lane));
  return {_mm256_blendv_ps(f, x.a, ka), _mm256_blendv_ps(f, x.b, kb)};
}

struct F8 {
  __m256 v;
};
inline F8 low_half(F16 x) {
  return {x.a};
}
inline F8 high_half(F16 x) {
  return {x.b};
}

// Sixteen int32.
struct I16 {
  __m256i a, b;
};
inline I16 zero_int16() {
  return {_mm256_setzero_si256(), _mm256_setzero_si256()};
}
// Rounds to nearest even.
inline I16 to_int(F16 x) {
  return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)};
}
// The bits of |x|, which as integers are ordered as the floats, infinity above them and NaN above all.
inline I16 magnitude(F16 x) {
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  return {_mm256_and_si256(_mm256_castps_si256(x.a), mask), _mm256_and_si256(_mm256_castps_si256(x.b), mask)};
}
inline I16 max(I16 x, I16 y) {
  return {_mm256_max_epu32(x.a, y.a), _mm256_max_epu32(x.b, y.b)};
}
inline int32_t sum(I16 x) {
  const __m256i eight = _mm256_add_epi32(x.a, x.b);
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
inline uint32_t largest(I16 x) {
  const __m256i eight = _mm256_max_epu32(x.a, x.b);
  const __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epu32(two, _mm_shuffle_epi32(two, 0xb1))));
}
// 32 values within int8 to 32-byte aligned memory.
inline void store_bytes(uint8_t* p, I16 x, I16 y) {
  const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(x.a, x.b), _mm256_packs_epi32(y.a, y.b));
  _mm256_store_si256(reinterpret_cast<__m256i*>(p),
                     _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
}

#endif

}  // namespace ktserve::KT_SIMD
