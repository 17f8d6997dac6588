// 32 half-precision numbers. Included by files compiled for AMX only; where the compiler or (with emulated tiles) the
// machine lacks AVX512-FP16, two float32 vectors compute the same.
#pragma once

#include <immintrin.h>

namespace ktserve {
namespace {

#if defined(__AVX512FP16__)

using Half = __m512h;

inline __attribute__((always_inline)) Half half_bits(__m512i bits) {
  return _mm512_castsi512_ph(bits);
}
inline __attribute__((always_inline)) __m512i bits_of(Half h) {
  return _mm512_castph_si512(h);
}
inline __attribute__((always_inline)) Half half_of_u16(__m512i v) {
  return _mm512_cvtepu16_ph(v);
}
inline __attribute__((always_inline)) Half half_all(float v) {
  return _mm512_set1_ph(static_cast<_Float16>(v));
}
inline __attribute__((always_inline)) Half multiply(Half a, Half b) {
  return _mm512_mul_ph(a, b);
}
inline __attribute__((always_inline)) Half multiply_add(Half a, Half b, Half c) {
  return _mm512_fmadd_ph(a, b, c);
}

#else

using Half = __m512i;

inline Half half_bits(__m512i bits) {
  return bits;
}
inline __m512i bits_of(Half h) {
  return h;
}
template <class Low>
inline Half of_halves(Low&& low) {
  const auto narrow = [](__m512 v) { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); };
  return _mm512_inserti64x4(_mm512_castsi256_si512(narrow(low(0))), narrow(low(1)), 1);
}
inline __m256i half_of(__m512i v, int upper) {
  return upper != 0 ? _mm512_extracti64x4_epi64(v, 1) : _mm512_castsi512_si256(v);
}
inline Half half_of_u16(__m512i v) {
  return of_halves([v](int upper) { return _mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(half_of(v, upper))); });
}
inline Half half_all(float v) {
  return of_halves([v](int) { return _mm512_set1_ps(v); });
}
inline Half multiply(Half a, Half b) {
  return of_halves([a, b](int upper) {
    return _mm512_mul_ps(_mm512_cvtph_ps(half_of(a, upper)), _mm512_cvtph_ps(half_of(b, upper)));
  });
}
inline Half multiply_add(Half a, Half b, Half c) {
  return of_halves([a, b, c](int upper) {
    return _mm512_fmadd_ps(_mm512_cvtph_ps(half_of(a, upper)), _mm512_cvtph_ps(half_of(b, upper)),
                           _mm512_cvtph_ps(half_of(c, upper)));
  });
}

#endif

}  // namespace
}  // namespace ktserve
