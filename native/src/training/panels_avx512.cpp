#include "gemm/blocks_avx512.hpp"
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
  } else if constexpr (F == Format::bf16) {
    const __m512i upper = _mm512_set1_epi32(-65536);
    for (int i = 0; i < 8; ++i) {
      const __m512i pairs = _mm512_load_si512(block + half * 512 + 64 * i);
      v[2 * i] = {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))};
      v[2 * i + 1] = {_mm512_castsi512_ps(_mm512_and_si512(pairs, upper))};
    }
  } else {
    const int group = groups_of(F) == 2 ? half : 0;
    const F16 scale = {scale_of<F>(panel, b, group)};
    F16 offset = mul(scale, set16(static_cast<float>(-info(F).bias)));
    if constexpr (info(F).minima) offset = {minimum_of<F>(panel, b, group)};
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m512i u = half != 0 ? quants<F>(block, 4 + j) : quants<F>(block, j);
      for (int i = 0; i < 4; ++i) v[4 * j + i] = fma(byte_of(u, i), scale, offset);
    }
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
