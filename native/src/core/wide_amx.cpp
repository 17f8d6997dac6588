// Dot products of quantised weights with many bf16 rows: panels are dequantised to bf16 by parts of k, once for all
// rows, and multiplied on bf16 tiles. While the tile unit computes with one part the vector unit makes the next one:
//
//   u8 x 64: 4 k of 16 outputs -> 4 x float32 x 16 -> scale u + offset -> bf16, pairs of k       a quarter block: twice
#include <immintrin.h>

#include "core/amx.hpp"
#include "core/bf16_tiles.hpp"
#include "core/blocks_avx512.hpp"

namespace ktserve {
namespace {

template <Format F>
class Dequantised {
 public:
  static constexpr int64_t kPart = 8;  // two parts of two panels and the rows' share fit the first-level cache

  explicit Dequantised(const DotArgs& a) : a_(a), size_(panel_size(F, a.k)), meta_(meta_size(F, a.k)) {}

  const uint8_t* w() const { return parts_[now_]; }
  int64_t panel_bytes() const { return kPart * kTileBytes; }

  void aim(const Span& span, int64_t steps) {
    const int64_t panels = a_.panels - span.panel < 2 ? a_.panels - span.panel : 2;
    span_ = span;
    at_ = 0;
    end_ = panels > 0 ? panels * span.count * 4 : 0;
    share_ = (end_ + steps - 1) / steps;
  }
  inline __attribute__((always_inline)) void step() {
    for (int64_t i = 0; i < share_ && at_ < end_; ++i) quarter(at_++);
  }
  void turn() {
    while (at_ < end_) quarter(at_++);
    now_ = 1 - now_;
  }

 private:
  // The f32 of byte i of every lane, exactly.
  template <int I>
  static inline __attribute__((always_inline)) __m512 values(__m512i v) {
    if constexpr (I == 0) return _mm512_cvtepi32_ps(_mm512_and_si512(v, _mm512_set1_epi32(255)));
    if constexpr (I == 3) return _mm512_cvtepi32_ps(_mm512_srli_epi32(v, 24));
    // On another port than the shifts.
    const __m512i take =
        _mm512_broadcast_i32x4(_mm_setr_epi8(I, -1, -1, -1, 4 + I, -1, -1, -1, 8 + I, -1, -1, -1, 12 + I, -1, -1, -1));
    return _mm512_cvtepi32_ps(_mm512_shuffle_epi8(v, take));
  }

  // Blocks of the first panel, then of the second.
  inline __attribute__((always_inline)) void quarter(int64_t i) {
    const int64_t block = i / 4 % span_.count;
    const int64_t panel = i / 4 >= span_.count ? 1 : 0;
    const uint8_t* const from = a_.w + (span_.panel + panel) * size_;
    const uint8_t* const quants_of_block = from + meta_ + (span_.first + block) * info(F).quant_bytes;
    uint8_t* const to = parts_[1 - now_] + (panel * kPart + block) * kTileBytes + i % 4 * 256;
    switch (i % 4) {
      case 0:
        _mm_prefetch(quants_of_block + 4096, _MM_HINT_T0);
        return convert<0>(from, quants_of_block, span_.first + block, to);
      case 1:
        if constexpr (info(F).quant_bytes > 256) _mm_prefetch(quants_of_block + 4096 + 128, _MM_HINT_T0);
        return convert<1>(from, quants_of_block, span_.first + block, to);
      case 2:
        return convert<2>(from, quants_of_block, span_.first + block, to);
      default:
        return convert<3>(from, quants_of_block, span_.first + block, to);
    }
  }

  template <int Quarter>
  static inline __attribute__((always_inline)) void convert(const uint8_t* panel, const uint8_t* block, int64_t index,
                                                            uint8_t* to) {
    const __m512 scale = scale_of<F>(panel, index, Quarter / 2);
    const __m512 offset = info(F).minima ? minimum_of<F>(panel, index)
                                         : _mm512_mul_ps(scale, _mm512_set1_ps(static_cast<float>(-info(F).bias)));
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const __m512i v = quants<F>(block, 2 * Quarter + j);
      store(to + j * 128, fma(values<0>(v), scale, offset), fma(values<1>(v), scale, offset));
      store(to + j * 128 + 64, fma(values<2>(v), scale, offset), fma(values<3>(v), scale, offset));
    }
  }
  static inline __attribute__((always_inline)) __m512 fma(__m512 v, __m512 scale, __m512 offset) {
    return _mm512_fmadd_ps(v, scale, offset);
  }
  static inline __attribute__((always_inline)) void store(uint8_t* to, __m512 even, __m512 odd) {
    const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even));
    _mm512_store_si512(to, _mm512_permutexvar_epi16(pairs, both));
  }

  alignas(64) uint8_t parts_[2][2 * kPart * kTileBytes];
  const DotArgs& a_;
  int64_t size_, meta_;
  int now_ = 0;
  Span span_{};
  int64_t at_ = 0, end_ = 0, share_ = 0;
};

template <Format F>
void dot_format(const DotArgs& a) {
  Dequantised<F> source(a);
  dot_by_parts(a, source);
}

}  // namespace

void dot_wide_amx(const DotArgs& a) {
  with_format(a.format, [&](auto f) {
    // Others are never asked for.
    if constexpr (!plain(decltype(f)::value)) dot_format<decltype(f)::value>(a);
  });
}

}  // namespace ktserve
