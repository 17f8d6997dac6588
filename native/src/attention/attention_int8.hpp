// The tiles of an int8 cache: rows to them, and from them what is multiplied. Included as attention_tiles.hpp is.
#pragma once

#include "attention/attention_kernels.hpp"
#include "simd/math16.hpp"

namespace ktserve::KT_SIMD {

#if defined(__AVX512BF16__) && KT_HAS_512
constexpr bool kDot = true;  // bf16 queries and probabilities go into the dot product as they are
using Whole = bf16;          // what an element of int8 is multiplied as
#else
constexpr bool kDot = false;
using Whole = float;
#endif

inline int64_t int8_tile_bytes(int head_dim) {
  return kKvBlock * (static_cast<int64_t>(head_dim) + 4);
}

// Of a tile's positions.
inline const float* scales_of(const int8_t* tile, int head_dim) {
  return reinterpret_cast<const float*>(tile + kKvBlock * head_dim);
}

// 16 pairs of elements: as pairs, or as float32 the first of each, then the second, which is a float32 cache's order.
inline void whole_numbers(const int8_t* from, Whole* to) {
#if defined(__AVX512BF16__) && KT_HAS_512
  const __m512i pairs = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  const auto bits = [](__m512i x) { return _mm512_castps_si512(_mm512_cvtepi32_ps(x)); };
  const __m512i first = bits(_mm512_srai_epi32(_mm512_slli_epi32(pairs, 16), 16));
  const __m512i second = bits(_mm512_srai_epi32(pairs, 16));  // the low half of a number of 8 bits is zeros
  _mm512_storeu_si512(to, _mm512_or_si512(_mm512_srli_epi32(first, 16), second));
#elif KT_HAS_512
  const __m512i pairs = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  store16(to, {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(pairs, 16), 16))});
  store16(to + 16, {_mm512_cvtepi32_ps(_mm512_srai_epi32(pairs, 16))});
#else
  for (int half = 0; half < 2; ++half) {
    const __m256i pairs = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + half));
    const __m256i first = _mm256_srai_epi32(_mm256_slli_epi32(pairs, 16), 16);
    _mm256_storeu_ps(to + 8 * half, _mm256_cvtepi32_ps(first));
    _mm256_storeu_ps(to + 8 * half + 16, _mm256_cvtepi32_ps(_mm256_srai_epi32(pairs, 16)));
  }
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
