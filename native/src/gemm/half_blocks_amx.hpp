// Blocks of quantised panels to bf16, in half precision, 32 weights at a time:
//
//     u8 -> u16           h = f16(u) scale + offset      bits: s eeeee mmmmmmmmmm
//                         (h + 4) >> 3, without copies of s:   s 000eeeee mmmmmmm      = bf16 of h 2^-112
//
// scale and offset carry a power of two of each output that brings its largest weight near 2^15: what is then below
// the least normal half is 2^-28 of that and counts as zero.
//
// Included by files compiled for AMX only, hence internal linkage.
#pragma once

#include <immintrin.h>

#include "gemm/grids_avx512.hpp"
#include "simd/half_lanes.hpp"

namespace ktserve {
namespace {

constexpr int kBitsExponent = -112;  // bf16's exponent bias is 127, half's 15

// |weight| <= d * most_quant<F> + |m| * most_minimum<F>
template <Format F>
constexpr float most_step() {
  return has_grid(F)          ? 31 * info(F).grid.step
         : info(F).steps == 0 ? 1
         : nibble_steps(F)    ? 15
         : info(F).minima     ? 255
                              : 128;
}
template <Format F>
constexpr float most_quant() {
  constexpr int range = (1 << (low_bits(F) + upper_bits(F))) - 1;
  constexpr int most = info(F).bias != 0 ? info(F).bias : zero_points(F) ? range + 16 : range;
  return static_cast<float>(most) * most_step<F>();
}
template <Format F>
constexpr float most_minimum() {
  return info(F).minima ? most_step<F>() : 0;
}

template <Format F>
class HalfBlocks {
 public:
  // That power's exponent for each output, by the scales of `units` units of a panel from `meta` on.
  static __m512 exponents(const uint8_t* meta, int64_t units) {
    __m512 most = largest_scale(meta, units, 0);
    most = _mm512_mul_ps(most, _mm512_set1_ps(most_quant<F>()));
    if constexpr (info(F).minima && !zero_points(F)) {
      most = _mm512_fmadd_ps(largest_scale(meta, units, kMinimum), _mm512_set1_ps(most_minimum<F>()), most);
    }
    most = _mm512_max_ps(_mm512_set1_ps(0x1p-100f), most);  // NaN stays
    return _mm512_sub_ps(_mm512_set1_ps(14), _mm512_getexp_ps(most));
  }

  // Block `index` of a panel, whose quants are at `quants`: 1 KB. up: 2 to those exponents.
  static inline __attribute__((always_inline)) void convert(const uint8_t* panel, const uint8_t* quants, int64_t index,
                                                            __m512 up, uint8_t* to) {
    constexpr int groups = groups_of(F);
    const Block<F> block(panel, quants, index);
#pragma GCC unroll 2
    for (int g = 0; g < groups; ++g) {
      const Half scale = pairs(_mm512_mul_ps(block.scale(g), up));
      Half offset = multiply(scale, half_all(-info(F).bias));
      if constexpr (info(F).minima) offset = pairs(_mm512_mul_ps(minimum_of<F>(panel, index, g), up));
#pragma GCC unroll 8
      for (int j = g * 8 / groups; j < (g + 1) * 8 / groups; ++j) {
        const __m512i v = block.vector(j);
        store(to + j * 128, words<0>(v), scale, offset);
        store(to + j * 128 + 64, words<2>(v), scale, offset);
      }
    }
  }

 private:
  // The largest magnitude of each output's d, m or dmin, which lie at `offset` in a unit's meta.
  static __m512 largest_scale(const uint8_t* meta, int64_t units, int64_t offset) {
    if constexpr (info(F).exponents) {
      __m512 most = _mm512_setzero_ps();
      for (int64_t i = 0; i < units; ++i) {
        most = _mm512_max_ps(most, exponent_scales(meta + i * info(F).meta_bytes + offset));
      }
      return most;
    }
    __m256i most = _mm256_setzero_si256();  // ordered as integers, NaN above all
    for (int64_t i = 0; i < units; ++i) {
      const auto* d = reinterpret_cast<const __m256i*>(meta + i * info(F).meta_bytes + offset);
      most = _mm256_max_epu16(most, _mm256_and_si256(_mm256_loadu_si256(d), _mm256_set1_epi16(0x7fff)));
    }
    return _mm512_cvtph_ps(most);
  }

  // 16 values to half precision, each for both k of a pair.
  static inline __attribute__((always_inline)) Half pairs(__m512 v) {
    const __m512i dequantised =
        _mm512_cvtepu16_epi32(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    return half_bits(_mm512_or_si512(dequantised, _mm512_slli_epi32(dequantised, 16)));
  }

  // Bytes i and i + 1 of every lane as u16.
  template <int I>
  static inline __attribute__((always_inline)) __m512i words(__m512i v) {
    const __m128i take =
        _mm_setr_epi8(I, -1, I + 1, -1, 4 + I, -1, 5 + I, -1, 8 + I, -1, 9 + I, -1, 12 + I, -1, 13 + I, -1);
    return _mm512_shuffle_epi8(v, _mm512_broadcast_i32x4(take));
  }
  static inline __attribute__((always_inline)) void store(uint8_t* to, __m512i u, Half scale, Half offset) {
    const __m512i h = bits_of(multiply_add(half_of_u16(u), scale, offset));
    const __m512i shifted = _mm512_mulhrs_epi16(h, _mm512_set1_epi16(1 << 12));  // rounds
    _mm512_store_si512(to, _mm512_and_si512(shifted, _mm512_set1_epi16(static_cast<int16_t>(0x8fff))));
  }
};

}  // namespace
}  // namespace ktserve
