#include "gemm/grids_avx2.hpp"
#include "simd/simd16.hpp"

namespace ktserve::avx2 {
namespace {

constexpr _mm_hint kFetched = _MM_HINT_T0;
constexpr int64_t kAheadBytes = 8192;

F16 lanes(const Pair& x) {
  return {x.lo, x.hi};
}

// Byte i of each lane as float32: a quant of this format.
template <Format F>
inline __attribute__((always_inline)) __m256 byte_of(__m256i v, int i) {
  if constexpr (as_signed<F>) return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(v, 24 - 8 * i), 24));
  return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(v, 8 * i), _mm256_set1_epi32(255)));
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
    for (int i = 0; i < 16; ++i) v[i] = lanes(half_scales(block + half * 512 + 32 * i));
  } else if constexpr (F == Format::f8) {
    const Pair scale = f8_scales(panel, b);
    for (int i = 0; i < 16; ++i) v[i] = lanes(times(f8_numbers(block + half * 256 + 16 * i), scale));
  } else if constexpr (F == Format::bf16) {
    for (int i = 0; i < 8; ++i) {
      const __m256i lo = load(block + half * 512 + 64 * i);
      const __m256i hi = load(block + half * 512 + 64 * i + 32);
      const __m256i upper = _mm256_set1_epi32(-65536);
      v[2 * i] = {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
      v[2 * i + 1] = {_mm256_castsi256_ps(_mm256_and_si256(lo, upper)),
                      _mm256_castsi256_ps(_mm256_and_si256(hi, upper))};
    }
  } else {
    const int group = groups_of(F) == 2 ? half : 0;
    const Block<F> quantised(panel, block, b);
    const F16 scale = lanes(quantised.scale(group));
    F16 offset = as_signed<F> ? zero16() : mul(scale, set16(static_cast<float>(-info(F).bias)));
    if constexpr (info(F).minima) offset = lanes(minimum_of<F>(unit_scales<F>(panel, b), panel, b, group));
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m256i lo = half != 0 ? quantised.vector(4 + j, 0) : quantised.vector(j, 0);
      const __m256i hi = half != 0 ? quantised.vector(4 + j, 1) : quantised.vector(j, 1);
      for (int i = 0; i < 4; ++i) v[4 * j + i] = fma(F16{byte_of<F>(lo, i), byte_of<F>(hi, i)}, scale, offset);
    }
  }
}

// 16 x 16 bf16 of a panel, vectors of pairs along k, to those of the transpose: four values of two outputs by two of k
// are a unit of 64 bits, which keeps its corners and swaps the other two; then units are transposed.
inline __attribute__((always_inline)) void transpose_pairs(const uint8_t* from, uint8_t* to) {
  const __m256i corners = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15,  //
                                           0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
#pragma GCC unroll 2
  for (int right = 0; right < 2; ++right) {
#pragma GCC unroll 2
    for (int below = 0; below < 2; ++below) {
      __m256i v[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        v[i] = _mm256_shuffle_epi8(load(from + (4 * below + i) * 64 + 32 * right), corners);
      }
      const __m256i low[2] = {_mm256_unpacklo_epi64(v[0], v[1]), _mm256_unpacklo_epi64(v[2], v[3])};
      const __m256i high[2] = {_mm256_unpackhi_epi64(v[0], v[1]), _mm256_unpackhi_epi64(v[2], v[3])};
      const __m256i rows[4] = {
          _mm256_permute2x128_si256(low[0], low[1], 0x20), _mm256_permute2x128_si256(high[0], high[1], 0x20),
          _mm256_permute2x128_si256(low[0], low[1], 0x31), _mm256_permute2x128_si256(high[0], high[1], 0x31)};
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + (4 * right + i) * 64 + 32 * below), rows[i]);
      }
    }
  }
}

inline __attribute__((always_inline)) void store_pair(uint8_t* to, F16 a, F16 b) {
  const auto pair = [](__m256 x, __m256 y) {
    return _mm256_or_si256(round_bf16_half(x), _mm256_slli_epi32(round_bf16_half(y), 16));
  };
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), pair(a.a, b.a));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 32), pair(a.b, b.b));
}
inline __attribute__((always_inline)) void store_pair(uint8_t* to, const bf16* a, const bf16* b) {
  const auto wide = [](const bf16* p) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  };
  for (int i = 0; i < 2; ++i) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 32 * i),
                        _mm256_or_si256(wide(a + 8 * i), _mm256_slli_epi32(wide(b + 8 * i), 16)));
  }
}

// Sixteen vectors as bf16, turned: vector u of eight holds v[i][2 u], v[i][2 u + 1] in lane i.
inline __attribute__((always_inline)) void store_turned(const F16 (&v)[16], uint8_t* to) {
  alignas(64) uint8_t pairs[512];
  for (int i = 0; i < 16; i += 2) store_pair(pairs + i * 32, v[i], v[i + 1]);
  transpose_pairs(pairs, to);
}

inline void stream16(float* to, F16 v) {
  _mm256_stream_ps(to, v.a);
  _mm256_stream_ps(to + 8, v.b);
}

}  // namespace
}  // namespace ktserve::avx2

#include "training/panel_rows.hpp"

namespace ktserve {

const PanelKernels& panel_kernels_avx2() {
  return avx2::panel_table;
}

}  // namespace ktserve
