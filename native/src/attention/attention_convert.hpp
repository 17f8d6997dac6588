// Elements of tiles as others: int8 caches' from rows and to bf16, bf16 and int8 as float32. Included as simd16.hpp is.
#pragma once

#include "attention/attention_kernels.hpp"
#include "simd/math16.hpp"

namespace ktserve::KT_SIMD {

// The bytes of a K or V tile of a cache of T.
template <class T>
int64_t cache_tile_bytes(int head_dim) {
  return kKvBlock * (head_dim * static_cast<int64_t>(sizeof(T)) + (sizeof(T) == 1 ? 4 : 0));
}

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
// Sixteen pairs of int8 as whole numbers, without their scales.
inline Pair split16(const int8_t* p) {
#if KT_HAS_512
  const __m512i pairs = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {{_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(pairs, 16), 16))},
          {_mm512_cvtepi32_ps(_mm512_srai_epi32(pairs, 16))}};
#else
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  const __m256i a = _mm256_cvtepi8_epi16(_mm_loadu_si128(q)), b = _mm256_cvtepi8_epi16(_mm_loadu_si128(q + 1));
  const auto even = [](__m256i x) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(x, 16), 16)); };
  const auto odd = [](__m256i x) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(x, 16)); };
  return {{even(a), even(b)}, {odd(a), odd(b)}};
#endif
}

// So many elements, a multiple of 32, of 16 pairs in turn: the first of each, then the second, which is a float32
// cache's order.
template <class T>
inline void widen(const T* from, int count, float* to) {
  for (int i = 0; i < count; i += 32) {
    const Pair pair = split16(from + i);
    store16(to + i, pair.even);
    store16(to + i + 16, pair.odd);
  }
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

// 32 elements under two vectors of scales.
inline void expand_pairs(const int8_t* from, F16 low, F16 high, bf16* to) {
  float wide[32];
  for (int i = 0; i < 32; ++i) wide[i] = from[i];
  store16(to, mul(load16(wide), low));
  store16(to + 16, mul(load16(wide + 16), high));
}

inline void seen_scales(const int8_t* tile, int count, int dim, float (&scales)[kKvBlock]) {
  std::memcpy(scales, tile + kKvBlock * dim, sizeof(scales));
  for (int p = count; p < kKvBlock; ++p) scales[p] = 0;
}

inline void expand_keys(const int8_t* tile, int count, uint16_t* to, int dim) {
  float scales[kKvBlock], twice[32];
  seen_scales(tile, count, dim, scales);
  for (int i = 0; i < 32; ++i) twice[i] = scales[i / 2];
  const F16 low = load16(twice), high = load16(twice + 16);
  for (int i = 0; i < kKvBlock * dim; i += 32) expand_pairs(tile + i, low, high, reinterpret_cast<bf16*>(to) + i);
}

inline void expand_values(const int8_t* tile, int count, uint16_t* to, int dim) {
  float scales[kKvBlock], both[16];
  seen_scales(tile, count, dim, scales);
  for (int pair = 0; pair < kKvBlock / 2; ++pair) {
    for (int i = 0; i < 16; ++i) both[i] = scales[2 * pair + i % 2];
    const F16 scale = load16(both);
    for (int i = pair * 32; i < kKvBlock * dim; i += kKvBlock * 16)
      expand_pairs(tile + i, scale, scale, reinterpret_cast<bf16*>(to) + i);
  }
}

}  // namespace ktserve::KT_SIMD
