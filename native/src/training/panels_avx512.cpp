#include "gemm/grids_avx512.hpp"
#include "simd/simd16.hpp"

namespace ktserve::avx512 {
namespace {

// The second level has room for more of them in flight than the 16 lines that the first one waits for.
constexpr _mm_hint kFetched = _MM_HINT_T1;
constexpr int64_t kAheadBytes = 32 << 10;

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

inline __attribute__((always_inline)) __m512i to_bf16(F16 low, F16 high) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high.v, low.v));
}

inline __attribute__((always_inline)) void store_pair(uint8_t* to, F16 a, F16 b) {
  alignas(64) static constexpr uint16_t interleave[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                          8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  _mm512_storeu_si512(to, _mm512_permutexvar_epi16(_mm512_load_si512(interleave), to_bf16(a, b)));
}
inline __attribute__((always_inline)) void store_pair(uint8_t* to, const bf16* a, const bf16* b) {
  const auto wide = [](const bf16* p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  };
  _mm512_storeu_si512(to, _mm512_or_si512(wide(a), _mm512_slli_epi32(wide(b), 16)));
}

// Sixteen vectors as bf16, turned: vector u of eight holds v[i][2 u], v[i][2 u + 1] in lane i. Two neighbours are one
// unit of 32 bits, of which two vectors fill a register; then units are transposed.
inline __attribute__((always_inline)) void store_turned(const F16 (&v)[16], uint8_t* to) {
  alignas(64) static constexpr int32_t first[16] = {0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27};
  const __m512i low = _mm512_load_si512(first);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(4));
  // t[h][q]: of vectors 4 q .. 4 q + 3 the units 4 h .. 4 h + 3, one in each 128-bit part
  __m512i t[2][4];
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    const __m512i a = to_bf16(v[4 * q], v[4 * q + 1]);
    const __m512i b = to_bf16(v[4 * q + 2], v[4 * q + 3]);
    t[0][q] = _mm512_permutex2var_epi32(a, low, b);
    t[1][q] = _mm512_permutex2var_epi32(a, high, b);
  }
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    const __m512i above[2] = {_mm512_shuffle_i32x4(t[h][0], t[h][1], 0x44),   // parts 0, 1 of each
                              _mm512_shuffle_i32x4(t[h][0], t[h][1], 0xee)};  // parts 2, 3
    const __m512i below[2] = {_mm512_shuffle_i32x4(t[h][2], t[h][3], 0x44),
                              _mm512_shuffle_i32x4(t[h][2], t[h][3], 0xee)};
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      uint8_t* at = to + (4 * h + 2 * i) * 64;
      _mm512_storeu_si512(at, _mm512_shuffle_i32x4(above[i], below[i], 0x88));
      _mm512_storeu_si512(at + 64, _mm512_shuffle_i32x4(above[i], below[i], 0xdd));
    }
  }
}

inline void stream16(float* to, F16 v) {
  _mm512_stream_ps(to, v.v);
}

}  // namespace
}  // namespace ktserve::avx512

#include "training/panel_rows.hpp"

namespace ktserve {

const PanelKernels& panel_kernels_avx512() {
  return avx512::panel_table;
}

}  // namespace ktserve
