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

// A block of a panel whose entries have been looked up: signs, and the codes of each vector of indices.
template <Format F>
class GridBlock {
 public:
  GridBlock() = default;
  // Block `index` of a panel, at `block`.
  inline __attribute__((always_inline)) GridBlock(const uint8_t* panel, const uint8_t* block, int64_t index)
      : meta_(unit_of<F>(panel, index)), in_unit_(index % (kSuper / kBlock)), words_(_mm512_load_si512(block)) {
    signs_ = grid_signs<F>(words_);
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      __mmask64 above[2] = {};
      if constexpr (grid.high != 0) {
        find_above<F>(bytes_at(grid.high + 16 * in_unit_), 0, 0, v, above);
      } else if constexpr (grid.index_bits > 8) {
        find_above<F>(words_, 3, 4, v, above);
      }
      const __m512i low = _mm512_load_si512(block + kGridWords + v * 64);
      first_[v] = codes_at<F>(codes_of<F>().first, low, above);
      second_[v] = codes_at<F>(codes_of<F>().second, low, above);
    }
  }

  // Vector j of 8: under the bias, negative where a sign's bit is set, which is bit 5 of the index of a value.
  inline __attribute__((always_inline)) __m512i vector(int j) const {
    __m512i code;
    if constexpr (grid.values == 8) {
      code = bits_from(j % 2 == 0 ? first_[0] : second_[0], j / 2, 2, 0);
    } else {
      const __m512i third = bits_from(second_[j / 4], j % 4, 1, -2);
      code = chosen(3, bits_from(first_[j / 4], j % 4, 2, 0), third);
    }
    const __m512i sign = bits_from(signs_, j / 2, 1, j % 2 * 4 - 5);
    return _mm512_permutexvar_epi8(chosen(32, sign, code), _mm512_load_si512(codes_of<F>().values));
  }

  inline __attribute__((always_inline)) __m512 scale(int g) const {
    __m512i factor = _mm512_srli_epi32(words_, 28);
    if constexpr (info(F).steps != 0) {
      const int64_t nth = in_unit_ * groups_of(F) + g;
      const __m512i pair = bytes_at(info(F).steps + 16 * (nth / 2));
      factor = _mm512_and_si512(_mm512_srl_epi32(pair, _mm_cvtsi64_si128(nth % 2 * 4)), _mm512_set1_epi32(15));
    }
    const __m512i twice = _mm512_or_si512(_mm512_slli_epi32(factor, 1), _mm512_set1_epi32(1));
    const __m512 d = _mm512_mul_ps(half_scales(meta_), _mm512_set1_ps(grid.step));
    return _mm512_mul_ps(d, _mm512_cvtepi32_ps(twice));
  }

 private:
  static constexpr Grid grid = info(F).grid;
  static constexpr int kVectors = kBlock / grid.values / 4;

  // In every byte, these bits of one and the others of another.
  static inline __attribute__((always_inline)) __m512i chosen(char bits, __m512i of, __m512i others) {
    return _mm512_ternarylogic_epi32(_mm512_set1_epi8(bits), of, others, 0xca);
  }

  inline __attribute__((always_inline)) __m512i bytes_at(int64_t at) const {
    return _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(meta_ + at)));
  }

  const uint8_t* meta_;
  int64_t in_unit_;
  __m512i words_, signs_, first_[kVectors], second_[kVectors];
};

// The same in memory.
template <Format F>
inline void decode(const uint8_t* panel, const uint8_t* block, int64_t index, Decoded<F>& to) {
  const GridBlock<F> found(panel, block, index);
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) _mm512_store_si512(to.quants + 64 * j, found.vector(j));
  for (int g = 0; g < groups_of(F); ++g) _mm512_store_ps(to.scales[g], found.scale(g));
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
