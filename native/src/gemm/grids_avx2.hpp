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

// The indices of a block that have more than 8 bits, of rows 8 h .. in at[h], four of a row side by side: rows 0, 1, 4,
// 5, 2, 3, 6, 7. Made blocks ahead of the look-ups, since a load of what was just stored waits for the cache.
template <Format F, bool Long = (info(F).grid.index_bits > 8)>
struct Indices {
  alignas(32) uint16_t at[2][kBlock / info(F).grid.values / 4][32];
};
template <Format F>
struct Indices<F, false> {};

// What stands above bit 8 of four indices of each lane, a byte each; `high`: those bits, one index's behind another's.
template <Format F>
inline __attribute__((always_inline)) __m256i above_bytes(__m256i high) {
  constexpr int upper = info(F).grid.index_bits - 8;
  const auto at = [high](int i) {
    return _mm256_and_si256(_mm256_slli_epi32(high, i * (8 - upper)), _mm256_set1_epi32(((1 << upper) - 1) << 8 * i));
  };
  return _mm256_or_si256(_mm256_or_si256(at(0), at(1)), _mm256_or_si256(at(2), at(3)));
}

// Of block b of a unit.
template <Format F>
inline __attribute__((always_inline)) void find_indices(const uint8_t* meta, const uint8_t* block, int64_t b,
                                                        Indices<F>& to) {
  constexpr Grid grid = info(F).grid;
  if constexpr (grid.index_bits > 8) {
    for (int h = 0; h < 2; ++h) {
      __m256i high = _mm256_srli_epi32(load(block + 32 * h), 28);
      if constexpr (grid.high != 0) {
        const auto* bytes = reinterpret_cast<const __m128i*>(meta + grid.high + 16 * b + 8 * h);
        high = _mm256_cvtepu8_epi32(_mm_loadl_epi64(bytes));
      }
#pragma GCC unroll 2
      for (int v = 0; v < kBlock / grid.values / 4; ++v) {
        const __m256i low = load(block + kGridWords + v * 64 + 32 * h);
        const __m256i above = above_bytes<F>(v == 0 ? high : _mm256_srli_epi32(high, 4 * (grid.index_bits - 8)));
        auto* at = reinterpret_cast<__m256i*>(to.at[h][v]);
        _mm256_store_si256(at, _mm256_unpacklo_epi8(low, above));
        _mm256_store_si256(at + 1, _mm256_unpackhi_epi8(low, above));
      }
    }
  }
}

// The signs of vector j of 8, as those of bytes that are not 0: a byte's bit, with 127 added.
inline __attribute__((always_inline)) __m256i signs_of(__m256i signs, int j) {
  const __m256i lane = _mm256_set1_epi32(0x01010101 * (j / 2));
  const __m256i lanes = _mm256_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0, 0x04040404, 0x08080808, 0x0c0c0c0c);
  const __m256i bits = _mm256_set1_epi32(j % 2 == 0 ? 0x08040201 : static_cast<int>(0x80402010));
  const __m256i spread = _mm256_shuffle_epi8(signs, _mm256_or_si256(lane, lanes));
  return _mm256_add_epi8(_mm256_and_si256(spread, bits), _mm256_set1_epi8(127));
}

// Entries of 4 values of 8 rows; of 8 values of rows 0, 1, 4, 5 and 2, 3, 6, 7, of which one shuffle makes 4 values of
// each of 8 rows. Loads one by one: on several CPUs gathers are slower.
template <class At>
inline __attribute__((always_inline)) __m256i entries_at(const uint32_t* table, const At& at) {
  const auto four = [&](int row) __attribute__((always_inline)) {
    return _mm_setr_epi32(static_cast<int>(table[at(row)]), static_cast<int>(table[at(row + 1)]),
                          static_cast<int>(table[at(row + 2)]), static_cast<int>(table[at(row + 3)]));
  };
  return _mm256_set_m128i(four(4), four(0));
}

template <class At>
inline __attribute__((always_inline)) Pair entries_at(const uint64_t* table, const At& at) {
  const auto two = [&](int row) __attribute__((always_inline)) {
    const __m128 low = _mm_castsi128_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(table + at(row))));
    return _mm_loadh_pi(low, reinterpret_cast<const __m64*>(table + at(row + 1)));
  };
  return {_mm256_set_m128(two(4), two(0)), _mm256_set_m128(two(6), two(2))};
}

// Rows 8 h .. 8 h + 7 of block b of a unit: `take(j, values, signs)` for each of 8 vectors.
template <Format F, class Take>
inline __attribute__((always_inline)) void look_up(const uint8_t* block, int h, const Indices<F>& indices, Take take) {
  constexpr Grid grid = info(F).grid;
  const auto& table = grid_of<F>();
  const __m256i signs = grid_signs<F>(load(block + 32 * h));
#pragma GCC unroll 8
  for (int i = 0; i < kBlock / grid.values; ++i) {
    const auto at = [&](int row) __attribute__((always_inline)) -> size_t {
      if constexpr (grid.index_bits > 8) {
        return indices.at[h][i / 4][((row >> 1 & 1) * 4 + (row >> 2) * 2 + (row & 1)) * 4 + i % 4];
      } else {
        return block[kGridWords + i / 4 * 64 + 32 * h + 4 * row + i % 4];
      }
    };
    if constexpr (grid.values == 4) {
      take(i, entries_at(table, at), signs_of(signs, i));
    } else {
      const Pair entries = entries_at(table, at);
      const __m256i first = _mm256_castps_si256(_mm256_shuffle_ps(entries.lo, entries.hi, 0x88));
      take(2 * i, first, signs_of(signs, 2 * i));
      const __m256i second = _mm256_castps_si256(_mm256_shuffle_ps(entries.lo, entries.hi, 0xdd));
      take(2 * i + 1, second, signs_of(signs, 2 * i + 1));
    }
  }
}

// The scales of group g of block b of a unit, of rows 8 h .. 8 h + 7.
template <Format F>
inline __attribute__((always_inline)) __m256 grid_scales(const uint8_t* meta, const uint8_t* block, int64_t b, int h,
                                                         int g) {
  const auto* half = reinterpret_cast<const __m128i*>(meta + 16 * h);
  const __m256 d = _mm256_mul_ps(_mm256_cvtph_ps(_mm_load_si128(half)), _mm256_set1_ps(info(F).grid.step));
  __m256i factor = _mm256_srli_epi32(load(block + 32 * h), 28);
  if constexpr (info(F).steps != 0) {
    const int64_t nth = b * groups_of(F) + g;
    const auto* bytes = reinterpret_cast<const __m128i*>(meta + info(F).steps + 16 * (nth / 2) + 8 * h);
    const __m256i pair = _mm256_cvtepu8_epi32(_mm_loadl_epi64(bytes));
    factor = _mm256_and_si256(_mm256_srl_epi32(pair, _mm_cvtsi64_si128(nth % 2 * 4)), _mm256_set1_epi32(15));
  }
  const __m256i odd = _mm256_or_si256(_mm256_slli_epi32(factor, 1), _mm256_set1_epi32(1));
  return _mm256_mul_ps(d, _mm256_cvtepi32_ps(odd));
}

template <Format F>
inline __attribute__((always_inline)) void decode_rows(const uint8_t* meta, const uint8_t* block, int64_t b, int h,
                                                       const Indices<F>& indices, Decoded<F>& to) {
  look_up<F>(block, h, indices, [&](int j, __m256i values, __m256i signs) __attribute__((always_inline)) {
    const __m256i quants = _mm256_add_epi8(_mm256_sign_epi8(values, signs), _mm256_set1_epi8(info(F).bias));
    _mm256_store_si256(reinterpret_cast<__m256i*>(to.quants + 64 * j + 32 * h), quants);
  });
  for (int g = 0; g < groups_of(F); ++g) _mm256_store_ps(to.scales[g] + 8 * h, grid_scales<F>(meta, block, b, h, g));
}

// Blocks [first, first + count) of a panel, whose quants begin at `blocks`; `Most`: the largest count.
template <Format F, int64_t Most>
inline void decode(const uint8_t* panel, const uint8_t* blocks, int64_t first, int64_t count, Decoded<F>* to) {
  constexpr int64_t unit = kSuper / kBlock;
  Indices<F> indices[Most];
  const auto block = [blocks](int64_t b) { return blocks + b * info(F).quant_bytes; };
  for (int64_t b = 0; b < count; ++b)
    find_indices<F>(unit_of<F>(panel, first + b), block(b), (first + b) % unit, indices[b]);
  for (int64_t b = 0; b < count; ++b) {
    for (int h = 0; h < 2; ++h)
      decode_rows<F>(unit_of<F>(panel, first + b), block(b), (first + b) % unit, h, indices[b], to[b]);
  }
}

// Block `index` of a panel as vectors: as it lies there, or decoded.
template <Format F>
class Block {
 public:
  Block(const uint8_t* panel, const uint8_t* block, int64_t index) : panel_(panel), block_(block), index_(index) {
    if constexpr (has_grid(F)) {
      decode<F, 1>(panel, block, index, 1, &decoded_);
      block_ = decoded_.quants;
    }
  }
  inline __attribute__((always_inline)) __m256i vector(int j, int h) const { return quants<F>(block_, j, h); }
  Pair scale(int g) const {
    if constexpr (has_grid(F)) return load_pair(decoded_.scales[g]);
    return scale_of<F>(unit_scales<F>(panel_, index_), panel_, index_, g);
  }

 private:
  const uint8_t *panel_, *block_;
  int64_t index_;
  std::conditional_t<has_grid(F), Decoded<F>, char> decoded_;
};

}  // namespace
}  // namespace ktserve
