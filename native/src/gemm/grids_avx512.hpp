// Blocks of grids' formats to quants of 8 bits: 16 rows at a time, a word of signs and a byte of each index in a lane.
// Entries come from registers: gathers take longer, and several times as long on some CPUs.
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

// A byte of the codes of the 64 entries of a vector of indices: eight bits of each index in `low`, those above in
// masks. Two registers hold 128 entries, of which bits 0 to 6 choose.
template <Format F>
inline __attribute__((always_inline)) __m512i codes_at(const uint8_t* table, __m512i low, const __mmask64* above) {
  constexpr int tables = 1 << (info(F).grid.index_bits - 7);
  __m512i found[tables];
#pragma GCC unroll 8
  for (int t = 0; t < tables; ++t) {
    const uint8_t* at = table + 128 * t;
    found[t] = _mm512_permutex2var_epi8(_mm512_load_si512(at), low, _mm512_load_si512(at + 64));
  }
  __mmask64 chosen = _mm512_movepi8_mask(low);
#pragma GCC unroll 3
  for (int left = tables / 2, bit = 0; left > 0; left /= 2, ++bit) {
    if (bit > 0) chosen = above[bit - 1];
#pragma GCC unroll 4
    for (int t = 0; t < left; ++t) found[t] = _mm512_mask_blend_epi8(chosen, found[2 * t], found[2 * t + 1]);
  }
  return found[0];
}

// Every byte: 8 bits from bit 8 i + step * (its place in a lane of 4) + first of its lane on.
inline __attribute__((always_inline)) __m512i bits_from(__m512i codes, int i, int step, int first) {
  const auto from = [&](int lane, int byte) {
    return static_cast<char>((32 * lane + 8 * i + step * byte + first) & 63);
  };
  const __m128i at = _mm_setr_epi8(from(0, 0), from(0, 1), from(0, 2), from(0, 3),  //
                                   from(1, 0), from(1, 1), from(1, 2), from(1, 3),  //
                                   from(0, 0), from(0, 1), from(0, 2), from(0, 3),  //
                                   from(1, 0), from(1, 1), from(1, 2), from(1, 3));
  return _mm512_multishift_epi64_epi8(_mm512_broadcast_i32x4(at), codes);
}

// The bits of indices above eight, a mask a bit, of the entries of vector v of indices; `high`: bits in the byte `at`
// of each lane, those of index 0 from bit `first` on.
template <Format F>
inline __attribute__((always_inline)) void find_above(__m512i high, int at, int first, int v, __mmask64* above) {
  constexpr int upper = info(F).grid.index_bits - 8;
  const __m128i lanes = _mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c);
  const __m128i bytes = _mm_or_si128(lanes, _mm_set1_epi32(0x01010101 * at));
  const __m512i spread = _mm512_shuffle_epi8(high, _mm512_broadcast_i32x4(bytes));
#pragma GCC unroll 2
  for (int bit = 0; bit < upper; ++bit) {
    uint32_t bits = 0;
    for (int i = 0; i < 4; ++i) bits |= 1u << (first + (4 * v + i) * upper + bit) << 8 * i;
    above[bit] = _mm512_test_epi8_mask(spread, _mm512_set1_epi32(static_cast<int>(bits)));
  }
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
  const auto& codes = codes_of<F>();
  const uint8_t* meta = unit_of<F>(panel, index);
  const int64_t b = index % (kSuper / kBlock);
  const auto bytes_of = [meta](int64_t at) __attribute__((always_inline)) {
    return _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(meta + at)));
  };
  const __m512i words = _mm512_load_si512(block);
  const __m512i signs = grid_signs<F>(words);
  const auto store = [&](int j, __m512i values) __attribute__((always_inline)) {
    _mm512_store_si512(to.quants + 64 * j, with_signs(values, signs, j));
  };
  const __m512i values = _mm512_load_si512(codes.values);
#pragma GCC unroll 2
  for (int v = 0; v < kBlock / grid.values / 4; ++v) {
    __mmask64 above[2] = {};
    if constexpr (grid.high != 0) {
      find_above<F>(bytes_of(grid.high + 16 * b), 0, 0, v, above);
    } else if constexpr (grid.index_bits > 8) {
      find_above<F>(words, 3, 4, v, above);
    }
    const __m512i low = _mm512_load_si512(block + kGridWords + v * 64);
    const __m512i first = codes_at<F>(codes.first, low, above);
    const __m512i second = codes_at<F>(codes.second, low, above);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      if constexpr (grid.values == 8) {
        store(2 * i, _mm512_permutexvar_epi8(bits_from(first, i, 2, 0), values));
        store(2 * i + 1, _mm512_permutexvar_epi8(bits_from(second, i, 2, 0), values));
      } else {
        const __m512i third = bits_from(second, i, 1, -2);
        const __m512i code = _mm512_ternarylogic_epi32(_mm512_set1_epi8(3), bits_from(first, i, 2, 0), third,
                                                       0xca);  // 3 ? first : third
        store(4 * v + i, _mm512_permutexvar_epi8(code, values));
      }
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
