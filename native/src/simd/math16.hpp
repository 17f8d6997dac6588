// What is the same for AVX2 and AVX-512: sums, powers, and loops over rows of any length. Included as simd16.hpp is.
#pragma once

#include "simd/simd16.hpp"

namespace ktserve::KT_SIMD {

inline F16& operator+=(F16& a, F16 b) {
  return a = add(a, b);
}

// Sum of the lanes, always in the same tree: (i, i+8), then (i, i+4), (i, i+2), (i, i+1).
inline float sum(F16 x) {
  const __m256 h = _mm256_add_ps(low_half(x).v, high_half(x).v);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

inline float largest(F16 x) {
  const __m256 h = _mm256_max_ps(low_half(x).v, high_half(x).v);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

// 2^f for |f| <= 1/2: the polynomial of degree 6 with the smallest largest relative error, 5e-9.
inline F16 exp2_fraction(F16 f) {
  F16 p = set16(1.57128117e-4f);
  p = fma(p, f, set16(1.34174339e-3f));
  p = fma(p, f, set16(9.61726345e-3f));
  p = fma(p, f, set16(5.55027165e-2f));
  p = fma(p, f, set16(2.40226552e-1f));
  p = fma(p, f, set16(6.93147242e-1f));
  return fma(p, f, set16(1.0f));
}

// 2^x within 1 ulp. Below -160 it is 0, from 128 on infinity; NaN stays NaN.
inline F16 exp2_16(F16 x) {
  x = min(set16(128.0f), max(set16(-160.0f), x));
  const F16 n = round_even(x);
  return scale2(exp2_fraction(sub(x, n)), n);
}

// e^x within 1 ulp, as a power of two: x log2(e) is carried in two parts, so that large |x| keeps its last place.
inline F16 exp16(F16 x) {
  x = min(set16(89.0f), max(set16(-110.0f), x));
  const F16 log2e = set16(1.44269502f);
  const F16 n = round_even(mul(x, log2e));
  const F16 f = fma(x, set16(1.92596303e-8f), fms(x, log2e, n));
  return scale2(exp2_fraction(f), n);
}

// Full vectors, or the first `left` lanes of one.
template <class T>
inline F16 load_some(const T* p, int64_t left) {
  return left >= 16 ? load16(p) : load_part(p, static_cast<int>(left));
}
template <class T>
inline void store_some(T* p, F16 x, int64_t left) {
  if (left >= 16)
    store16(p, x);
  else
    store_part(p, x, static_cast<int>(left));
}

// Calls f(i, left) for each vector of n values from i on; `left` is a constant where vectors are full.
template <class F>
inline __attribute__((always_inline)) void by_vectors(int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) f(i, int64_t{16});
  if (i < n) f(i, n & 15);
}

template <class From, class To>
inline void convert(const From* from, int64_t n, To* to) {
  by_vectors(n, [&](int64_t i, int64_t left)
                    __attribute__((always_inline)) { store_some(to + i, load_some(from + i, left), left); });
}

inline F16 sigmoid16(F16 x) {
  const F16 one = set16(1.0f);
  return div(one, add(one, exp16(sub(zero16(), x))));
}

// x / (1 + e^-x); 0 for very negative x.
inline F16 silu16(F16 x) {
  return div(x, add(set16(1.0f), exp16(sub(zero16(), x))));
}

}  // namespace ktserve::KT_SIMD
