// Sixteen vectors of sixteen, transposed: lane j of v[i] becomes lane i of v[j]. Included as simd16.hpp is.
#pragma once

#include "simd/simd16.hpp"

namespace ktserve::KT_SIMD {

#if KT_HAS_512

inline __attribute__((always_inline)) void transpose16(F16 (&v)[16]) {
  __m512 t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_ps(v[2 * i].v, v[2 * i + 1].v);
    t[2 * i + 1] = _mm512_unpackhi_ps(v[2 * i].v, v[2 * i + 1].v);
  }
  // u[4 q + c]: of vectors 4 q .. 4 q + 3 the lanes c, 4 + c, 8 + c, 12 + c, in 128-bit parts
  __m512 u[16];
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m512d a = _mm512_castps_pd(t[4 * q + h]);
      const __m512d b = _mm512_castps_pd(t[4 * q + 2 + h]);
      u[4 * q + 2 * h] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      u[4 * q + 2 * h + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512 low = _mm512_shuffle_f32x4(u[c], u[4 + c], 0x88);      // parts 0, 2 of each
    const __m512 low_odd = _mm512_shuffle_f32x4(u[c], u[4 + c], 0xdd);  // parts 1, 3
    const __m512 high = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0x88);
    const __m512 high_odd = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0xdd);
    v[c].v = _mm512_shuffle_f32x4(low, high, 0x88);
    v[8 + c].v = _mm512_shuffle_f32x4(low, high, 0xdd);
    v[4 + c].v = _mm512_shuffle_f32x4(low_odd, high_odd, 0x88);
    v[12 + c].v = _mm512_shuffle_f32x4(low_odd, high_odd, 0xdd);
  }
}

#else

inline __attribute__((always_inline)) void transpose8(__m256 (&v)[8]) {
  __m256 t[8], u[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(v[2 * i], v[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(v[2 * i], v[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int q = 0; q < 2; ++q) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      u[4 * q + 2 * h] = _mm256_shuffle_ps(t[4 * q + h], t[4 * q + 2 + h], 0x44);
      u[4 * q + 2 * h + 1] = _mm256_shuffle_ps(t[4 * q + h], t[4 * q + 2 + h], 0xee);
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    v[c] = _mm256_permute2f128_ps(u[c], u[4 + c], 0x20);
    v[4 + c] = _mm256_permute2f128_ps(u[c], u[4 + c], 0x31);
  }
}

inline __attribute__((always_inline)) void transpose16(F16 (&v)[16]) {
  __m256 block[8];
  const auto swap_in = [&](int row, bool right, int to_row, bool to_right) __attribute__((always_inline)) {
    __m256 other[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      block[i] = right ? v[row + i].b : v[row + i].a;
      other[i] = to_right ? v[to_row + i].b : v[to_row + i].a;
    }
    transpose8(block);
    transpose8(other);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      (to_right ? v[to_row + i].b : v[to_row + i].a) = block[i];
      (right ? v[row + i].b : v[row + i].a) = other[i];
    }
  };
  swap_in(0, true, 8, false);
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) block[i] = half != 0 ? v[8 + i].b : v[i].a;
    transpose8(block);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) (half != 0 ? v[8 + i].b : v[i].a) = block[i];
  }
}

#endif

}  // namespace ktserve::KT_SIMD
