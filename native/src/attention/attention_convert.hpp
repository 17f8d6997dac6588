// Elements of tiles as others: int8 caches' from rows and to bf16, bf16 as float32. Included as simd16.hpp is.
#pragma once

#include "attention/attention_kernels.hpp"
#include "simd/math16.hpp"

namespace ktserve::KT_SIMD {

// Of an int8 tile's positions.
inline const float* scales_of(const void* tile, int head_dim) {
  return reinterpret_cast<const float*>(static_cast<const char*>(tile) + kKvBlock * head_dim);
}

struct Pair {
  F16 even, odd;
};
// Sixteen pairs of bf16 as two float vectors.
inline Pair split16(const bf16* p) {
#if KT_HAS_512
  const __m512i w = _mm512_loadu_si512(p);
  return {{_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))},
          {_mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))}};
#else
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  const __m256i a = _mm256_loadu_si256(q), b = _mm256_loadu_si256(q + 1);
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {{_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))},
          {_mm256_castsi256_ps(_mm256_and_si256(a, high)), _mm256_castsi256_ps(_mm256_and_si256(b, high))}};
#endif
}
template <class T>
float quantise(const void* from, int8_t* to, int dim) {
  const T* x = static_cast<const T*>(from);
  I16 most = zero_int16();
  for (int d = 0; d < dim; d += 16) most = max(most, magnitude(load16(x + d)));
  const uint32_t bits = largest(most);
  float top;
  std::memcpy(&top, &bits, 4);
  const bool finite = bits < 0x7f800000u;
  const F16 inverse = set16(finite && top > 1e-30f ? 127.0f / top : 0.0f);
  for (int d = 0; d < dim; d += 16) {
    float scaled[16];
    store16(scaled, finite ? round_even(mul(load16(x + d), inverse)) : zero16());
    for (int i = 0; i < 16; ++i) to[d + i] = static_cast<int8_t>(scaled[i]);
  }
  return !finite ? __builtin_nanf("") : top > 1e-30f ? top / 127.0f : 0.0f;
}

#if defined(__AVX512BF16__)  // those of bf16 products
// Sixteen pairs of int8 as whole numbers, without their scales.
inline Pair split16(const int8_t* p) {
  const __m512i pairs = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {{_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(pairs, 16), 16))},
          {_mm512_cvtepi32_ps(_mm512_srai_epi32(pairs, 16))}};
}

// Sixteen pairs under scales of their first numbers and of their second ones.
inline void expand_pairs(const int8_t* from, F16 first, F16 second, uint16_t* to) {
  const Pair pair = split16(from);
  const auto rounded = [](F16 x) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x.v)); };
  const __m512i upper = _mm512_slli_epi32(rounded(mul(pair.odd, second)), 16);
  _mm512_storeu_si512(to, _mm512_or_si512(rounded(mul(pair.even, first)), upper));
}

inline void seen_scales(const int8_t* tile, int count, int dim, float (&scales)[kKvBlock]) {
  std::memcpy(scales, tile + kKvBlock * dim, sizeof(scales));
  for (int p = count; p < kKvBlock; ++p) scales[p] = 0;
}

inline void expand_keys(const int8_t* tile, int count, uint16_t* to, int dim) {
  float scales[kKvBlock];
  seen_scales(tile, count, dim, scales);
  const F16 scale = load16(scales);
  for (int i = 0; i < kKvBlock * dim; i += 32) expand_pairs(tile + i, scale, scale, to + i);
}

inline void expand_values(const int8_t* tile, int count, uint16_t* to, int dim) {
  float scales[kKvBlock];
  seen_scales(tile, count, dim, scales);
  for (int pair = 0; pair < kKvBlock / 2; ++pair) {
    const F16 first = set16(scales[2 * pair]), second = set16(scales[2 * pair + 1]);
    for (int i = pair * 32; i < kKvBlock * dim; i += kKvBlock * 16) expand_pairs(tile + i, first, second, to + i);
  }
}
#endif

}  // namespace ktserve::KT_SIMD
