#include "gemm/grids_avx512.hpp"
#include "simd/simd16.hpp"

namespace ktserve::avx512 {
namespace {

// Byte i of each lane as float32.
inline __attribute__((always_inline)) F16 byte_of(__m512i v, int i) {
  const __m512i shifted = _mm512_srl_epi32(v, _mm_cvtsi32_si128(8 * i));
  return {_mm512_cvtepi32_ps(_mm512_and_si512(shifted, _mm512_set1_epi32(255)))};
}

// The values of k = 16 half .. 16 half + 15 of block b of a panel, one vector of 16 outputs each.
template <Format F>
inline __attribute__((always_inline)) void block_values(const uint8_t* panel, int64_t k, int64_t b, int half,
                                                        F16 (&v)[16]) {
  const uint8_t* block = panel + meta_size(F, k) + b * info(F).quant_bytes;
  if constexpr (F == Format::f32) {
    const float* values = reinterpret_cast<const float*>(block) + half * 256;
    for (int i = 0; i < 16; ++i) v[i] = load16(values + 16 * i);
  } else if constexpr (F == Format::f16) {
    for (int i = 0; i < 16; ++i) {
      v[i] = {_mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(block + half * 512 + 32 * i)))};
    }
  } else if constexpr (F == Format::f8) {
    const __m512 scale = f8_scales(panel, b);
    for (int i = 0; i < 16; ++i) v[i] = {_mm512_mul_ps(f8_numbers(block + half * 256 + 16 * i), scale)};
  } else if constexpr (F == Format::bf16) {
    const __m512i upper = _mm512_set1_epi32(-65536);
    for (int i = 0; i < 8; ++i) {
      const __m512i pairs = _mm512_load_si512(block + half * 512 + 64 * i);
      v[2 * i] = {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))};
      v[2 * i + 1] = {_mm512_castsi512_ps(_mm512_and_si512(pairs, upper))};
    }
  } else {
    const int group = groups_of(F) == 2 ? half : 0;
    const Block<F> quantised(panel, block, b);
    const F16 scale = {quantised.scale(group)};
    F16 offset = mul(scale, set16(static_cast<float>(-info(F).bias)));
    if constexpr (info(F).minima) offset = {minimum_of<F>(panel, b, group)};
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m512i u = half != 0 ? quantised.vector(4 + j) : quantised.vector(j);
      for (int i = 0; i < 4; ++i) v[4 * j + i] = fma(byte_of(u, i), scale, offset);
    }
  }
}

// 16 x 16 bf16 of a panel, vectors of pairs along k, to those of the transpose: four values of two outputs by two of k
// are a unit of 64 bits, which keeps its corners and swaps the other two; then units are transposed.
inline __attribute__((always_inline)) void transpose_pairs(const uint8_t* from, uint8_t* to) {
  const __m512i corners = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  // t[i]: of vectors 2 (i / 2), 2 (i / 2) + 1 the units i % 2, i % 2 + 2, ..
  __m512i t[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    const __m512i a = _mm512_shuffle_epi8(_mm512_load_si512(from + i * 64), corners);
    const __m512i b = _mm512_shuffle_epi8(_mm512_load_si512(from + i * 64 + 64), corners);
    t[i] = _mm512_unpacklo_epi64(a, b);
    t[i + 1] = _mm512_unpackhi_epi64(a, b);
  }
#pragma GCC unroll 2
  for (int odd = 0; odd < 2; ++odd) {
    const __m512i even_above = _mm512_shuffle_i64x2(t[odd], t[2 + odd], 0x88);  // units odd, 4 + odd
    const __m512i odd_above = _mm512_shuffle_i64x2(t[odd], t[2 + odd], 0xdd);   // units 2 + odd, 6 + odd
    const __m512i even_below = _mm512_shuffle_i64x2(t[4 + odd], t[6 + odd], 0x88);
    const __m512i odd_below = _mm512_shuffle_i64x2(t[4 + odd], t[6 + odd], 0xdd);
    _mm512_storeu_si512(to + odd * 64, _mm512_shuffle_i64x2(even_above, even_below, 0x88));
    _mm512_storeu_si512(to + (4 + odd) * 64, _mm512_shuffle_i64x2(even_above, even_below, 0xdd));
    _mm512_storeu_si512(to + (2 + odd) * 64, _mm512_shuffle_i64x2(odd_above, odd_below, 0x88));
    _mm512_storeu_si512(to + (6 + odd) * 64, _mm512_shuffle_i64x2(odd_above, odd_below, 0xdd));
  }
}

}  // namespace
}  // namespace ktserve::avx512

#include "training/panel_rows.hpp"

namespace ktserve {

const PanelKernels& panel_kernels_avx512() {
  return avx512::panel_table;
}

}  // namespace ktserve
