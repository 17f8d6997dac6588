// Blocks of grids' formats to quants of 8 bits: 8 rows at a time, a word of signs and a byte of each index in a lane.
// Included by files compiled for AVX2, hence internal linkage.
#pragma once

#include "gemm/blocks_avx2.hpp"
#include "gemm/decoded.hpp"
#include "packing/grid_blocks.hpp"

namespace ktserve {
namespace {

// Four bytes of eight signs in each lane.
template <Format F>
inline __attribute__((always_inline)) __m256i grid_signs(__m256i words) {
  if constexpr (!info(F).grid.parity) return words;
  const auto at = [words](int left, int mask) {
    return _mm256_and_si256(_mm256_slli_epi32(words, left), _mm256_set1_epi32(mask));
  };
  const __m256i seven =
      _mm256_or_si256(_mm256_or_si256(at(0, 0x7f), at(1, 0x7f00)), _mm256_or_si256(at(2, 0x7f0000), at(3, 0x7f000000)));
  const __m256i odd = _mm256_setr_epi8(0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0,  //
                                       0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0);
  const __m256i folded = _mm256_and_si256(_mm256_xor_si256(seven, _mm256_srli_epi16(seven, 4)), _mm256_set1_epi8(15));
  return _mm256_or_si256(seven, _mm256_shuffle_epi8(odd, folded));
}

// Index i of each lane; `high`: what `Grid` says of upper bits, at bit 8 for index 0.
template <Format F>
inline __attribute__((always_inline)) __m256i grid_index(__m256i low, __m256i high, int i) {
  constexpr int upper = info(F).grid.index_bits - 8;
  const __m256i index = _mm256_and_si256(_mm256_srli_epi32(low, i % 4 * 8), _mm256_set1_epi32(255));
  if constexpr (upper == 0) return index;
  const __m256i above = _mm256_srli_epi32(high, i * upper);
  return _mm256_or_si256(index, _mm256_and_si256(above, _mm256_set1_epi32(((1 << upper) - 1) << 8)));
}

// Vector j of 8 with its signs: entries, and under the bias 128 less those that are negative.
inline __attribute__((always_inline)) __m256i with_signs(__m256i values, __m256i signs, int j) {
  const int byte = j / 2;
  const __m256i lane = _mm256_set1_epi32(0x01010101 * byte);
  const __m256i lanes = _mm256_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0, 0x04040404, 0x08080808, 0x0c0c0c0c);
  const __m256i bits = _mm256_set1_epi32(j % 2 == 0 ? 0x08040201 : static_cast<int>(0x80402010));
  const __m256i spread = _mm256_shuffle_epi8(signs, _mm256_or_si256(lane, lanes));
  const __m256i negative = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bits), bits);
  // 128 - v = ~v - 127
  return _mm256_sub_epi8(_mm256_xor_si256(values, negative), _mm256_and_si256(negative, _mm256_set1_epi8(127)));
}

// Entries of 4 values of 8 rows; of 8 values of rows 0, 1, 4, 5 and 2, 3, 6, 7, of which one shuffle makes 4 values of
// each of 8 rows. Loads one by one: on several CPUs gathers are slower.
inline __attribute__((always_inline)) __m256i entries_at(const uint32_t* table, __m256i index) {
  alignas(32) uint32_t at[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(at), index);
  const auto four = [&](int i) __attribute__((always_inline)) {
    return _mm_setr_epi32(static_cast<int>(table[at[i]]), static_cast<int>(table[at[i + 1]]),
                          static_cast<int>(table[at[i + 2]]), static_cast<int>(table[at[i + 3]]));
  };
  return _mm256_set_m128i(four(4), four(0));
}

inline __attribute__((always_inline)) Pair entries_at(const uint64_t* table, __m256i index) {
  alignas(32) uint32_t at[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(at), index);
  const auto two = [&](int i) __attribute__((always_inline)) {
    const __m128 low = _mm_castsi128_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(table + at[i])));
    return _mm_loadh_pi(low, reinterpret_cast<const __m64*>(table + at[i + 1]));
  };
  return {_mm256_set_m128(two(4), two(0)), _mm256_set_m128(two(6), two(2))};
}

// Rows 8 h .. 8 h + 7.
template <Format F>
inline __attribute__((always_inline)) void decode_rows(const uint8_t* meta, const uint8_t* block, int64_t b, int h,
                                                       Decoded<F>& to) {
  constexpr Grid grid = info(F).grid;
  const auto& table = grid_of<F>();
  const __m256i words = load(block + 32 * h);
  const __m256i signs = grid_signs<F>(words);
  __m256i high = _mm256_srli_epi32(words, 20);
  if constexpr (grid.high != 0) {
    const auto* bytes = reinterpret_cast<const __m128i*>(meta + grid.high + 16 * b + 8 * h);
    high = _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64(bytes)), 8);
  }
  const auto store = [&](int j, __m256i values) __attribute__((always_inline)) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(to.quants + 64 * j + 32 * h), with_signs(values, signs, j));
  };
#pragma GCC unroll 8
  for (int i = 0; i < kBlock / grid.values; ++i) {
    const __m256i index = grid_index<F>(load(block + kGridWords + i / 4 * 64 + 32 * h), high, i);
    if constexpr (grid.values == 4) {
      store(i, entries_at(table, index));
    } else {
      const Pair entries = entries_at(table, index);
      store(2 * i, _mm256_castps_si256(_mm256_shuffle_ps(entries.lo, entries.hi, 0x88)));
      store(2 * i + 1, _mm256_castps_si256(_mm256_shuffle_ps(entries.lo, entries.hi, 0xdd)));
    }
  }
  const auto* half = reinterpret_cast<const __m128i*>(meta + 16 * h);
  const __m256 d = _mm256_mul_ps(_mm256_cvtph_ps(_mm_load_si128(half)), _mm256_set1_ps(grid.step));
  for (int g = 0; g < groups_of(F); ++g) {
    __m256i factor = _mm256_srli_epi32(words, 28);
    if constexpr (info(F).steps != 0) {
      const int64_t nth = b * groups_of(F) + g;
      const auto* bytes = reinterpret_cast<const __m128i*>(meta + info(F).steps + 16 * (nth / 2) + 8 * h);
      const __m256i pair = _mm256_cvtepu8_epi32(_mm_loadl_epi64(bytes));
      factor = _mm256_and_si256(_mm256_srl_epi32(pair, _mm_cvtsi64_si128(nth % 2 * 4)), _mm256_set1_epi32(15));
    }
    const __m256i odd = _mm256_or_si256(_mm256_slli_epi32(factor, 1), _mm256_set1_epi32(1));
    _mm256_store_ps(to.scales[g] + 8 * h, _mm256_mul_ps(d, _mm256_cvtepi32_ps(odd)));
  }
}

// Block `index` of a panel, at `block`.
template <Format F>
inline void decode(const uint8_t* panel, const uint8_t* block, int64_t index, Decoded<F>& to) {
  const uint8_t* meta = unit_of<F>(panel, index);
  decode_rows<F>(meta, block, index % (kSuper / kBlock), 0, to);
  decode_rows<F>(meta, block, index % (kSuper / kBlock), 1, to);
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
  inline __attribute__((always_inline)) __m256i vector(int j, int h) const { return quants<F>(block_, j, h); }
  Pair scale(int g) const {
    if constexpr (has_grid(F)) return {_mm256_load_ps(decoded_.scales[g]), _mm256_load_ps(decoded_.scales[g] + 8)};
    return scale_of<F>(panel_, index_, g);
  }

 private:
  const uint8_t *panel_, *block_;
  int64_t index_;
  std::conditional_t<has_grid(F), Decoded<F>, char> decoded_;
};

}  // namespace
}  // namespace ktserve
