// Blocks of grids' formats to quants of 8 bits: 16 rows at a time, a word of signs and a byte of each index in a lane.
// Included by files compiled for AVX-512 only, hence internal linkage.
#pragma once

#include "gemm/blocks_avx512.hpp"
#include "gemm/decoded.hpp"
#include "packing/grid_blocks.hpp"

namespace ktserve {
namespace {

// Four bytes of eight signs in each lane.
template <Format F>
inline __attribute__((always_inline)) __m512i grid_signs(__m512i words) {
  if constexpr (!info(F).grid.parity) return words;
  const auto at = [words](unsigned left, int mask) {
    return _mm512_and_si512(_mm512_slli_epi32(words, left), _mm512_set1_epi32(mask));
  };
  const __m512i seven =
      _mm512_or_si512(_mm512_or_si512(at(0, 0x7f), at(1, 0x7f00)), _mm512_or_si512(at(2, 0x7f0000), at(3, 0x7f000000)));
  const __m128i odd = _mm_setr_epi8(0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0);
  const __m512i folded = _mm512_and_si512(_mm512_xor_si512(seven, _mm512_srli_epi16(seven, 4)), _mm512_set1_epi8(15));
  return _mm512_or_si512(seven, _mm512_shuffle_epi8(_mm512_broadcast_i32x4(odd), folded));
}

// Index i of each lane; `high`: what `Grid` says of upper bits, at bit 8 for index 0.
template <Format F>
inline __attribute__((always_inline)) __m512i grid_index(__m512i low, __m512i high, int i) {
  constexpr int upper = info(F).grid.index_bits - 8;
  const auto right = static_cast<unsigned>(i % 4 * 8);
  const __m512i index = _mm512_and_si512(_mm512_srli_epi32(low, right), _mm512_set1_epi32(255));
  if constexpr (upper == 0) return index;
  const __m512i above = _mm512_srli_epi32(high, static_cast<unsigned>(i * upper));
  return _mm512_or_si512(index, _mm512_and_si512(above, _mm512_set1_epi32(((1 << upper) - 1) << 8)));
}

// Vector j of 8 with its signs: entries, and under the bias 128 less those that are negative.
inline __attribute__((always_inline)) __m512i with_signs(__m512i values, __m512i signs, int j) {
  const __m128i lanes = _mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c);
  const __m128i bytes = _mm_or_si128(lanes, _mm_set1_epi32(0x01010101 * (j / 2)));
  const __m512i bits = _mm512_set1_epi32(j % 2 == 0 ? 0x08040201 : static_cast<int>(0x80402010));
  const __m512i spread = _mm512_shuffle_epi8(signs, _mm512_broadcast_i32x4(bytes));
  return _mm512_mask_sub_epi8(values, _mm512_test_epi8_mask(spread, bits), _mm512_set1_epi8(-128), values);
}

// Block `index` of a panel, at `block`.
template <Format F>
inline void decode(const uint8_t* panel, const uint8_t* block, int64_t index, Decoded<F>& to) {
  constexpr Grid grid = info(F).grid;
  const auto& table = grid_of<F>();
  const uint8_t* meta = unit_of<F>(panel, index);
  const int64_t b = index % (kSuper / kBlock);
  const auto bytes_of = [meta](int64_t at) __attribute__((always_inline)) {
    return _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(meta + at)));
  };
  const __m512i words = _mm512_load_si512(block);
  const __m512i signs = grid_signs<F>(words);
  __m512i high = _mm512_srli_epi32(words, 20);
  if constexpr (grid.high != 0) high = _mm512_slli_epi32(bytes_of(grid.high + 16 * b), 8);
  const auto store = [&](int j, __m512i values) __attribute__((always_inline)) {
    _mm512_store_si512(to.quants + 64 * j, with_signs(values, signs, j));
  };
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#pragma GCC unroll 8
  for (int i = 0; i < kBlock / grid.values; ++i) {
    const __m512i at = grid_index<F>(_mm512_load_si512(block + kGridWords + i / 4 * 64), high, i);
    if constexpr (grid.values == 4) {
      store(i, _mm512_i32gather_epi32(at, table, 4));
    } else {
      const __m512i first = _mm512_i32gather_epi64(_mm512_castsi512_si256(at), table, 8);  // rows 0 .. 7
      const __m512i second = _mm512_i32gather_epi64(_mm512_extracti64x4_epi64(at, 1), table, 8);
      store(2 * i, _mm512_permutex2var_epi32(first, even, second));
      store(2 * i + 1, _mm512_permutex2var_epi32(first, odd, second));
    }
  }
  const __m512 d = _mm512_mul_ps(half_scales(meta), _mm512_set1_ps(grid.step));
  for (int g = 0; g < groups_of(F); ++g) {
    __m512i factor = _mm512_srli_epi32(words, 28);
    if constexpr (info(F).steps != 0) {
      const int64_t nth = b * groups_of(F) + g;
      const __m512i pair = bytes_of(info(F).steps + 16 * (nth / 2));
      factor = _mm512_and_si512(_mm512_srl_epi32(pair, _mm_cvtsi64_si128(nth % 2 * 4)), _mm512_set1_epi32(15));
    }
    const __m512i twice = _mm512_or_si512(_mm512_slli_epi32(factor, 1), _mm512_set1_epi32(1));
    _mm512_store_ps(to.scales[g], _mm512_mul_ps(d, _mm512_cvtepi32_ps(twice)));
  }
}

// Block `index` of a panel as vectors: as it lies there, or decoded.
template <Format F>
class Block {
 public:
  Block(const uint8_t* panel, const uint8_t* block, int64_t index) : panel_(panel), block_(block), index_(index) {
    if constexpr (has_grid(F)) {
      decode<F>(panel, block, index, decoded_);
      block_ = decoded_.quants;
    }
  }
  inline __attribute__((always_inline)) __m512i vector(int j) const { return quants<F>(block_, j); }
  inline __attribute__((always_inline)) __m512 scale(int g) const {
    if constexpr (has_grid(F)) return _mm512_load_ps(decoded_.scales[g]);
    return scale_of<F>(panel_, index_, g);
  }

 private:
  const uint8_t *panel_, *block_;
  int64_t index_;
  std::conditional_t<has_grid(F), Decoded<F>, char> decoded_;
};

}  // namespace
}  // namespace ktserve
