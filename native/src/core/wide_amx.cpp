// Dot products of quantised weights with many bf16 rows: panels are dequantised to bf16 by parts of k, once for all
// rows, and multiplied on bf16 tiles. While the tile unit computes with one part the vector unit makes the next one, in
// half precision, 32 weights at a time:
//
//     u8 -> u16           h = f16(u) scale + offset      bits: s eeeee mmmmmmmmmm
//                         (h + 4) >> 3, without copies of s:   s 000eeeee mmmmmmm      = bf16 of h 2^-112
//
// scale and offset carry a power of two of each output that brings its largest weight near 2^15: what is then below
// the least normal half is 2^-28 of that and counts as zero. Activations come times 2^48, so that no product is too
// small for float32, and the sums are brought back when they are complete.
#include <immintrin.h>

#include "core/amx.hpp"
#include "core/bf16_tiles.hpp"
#include "core/blocks_avx512.hpp"
#include "core/half_lanes.hpp"

namespace ktserve {
namespace {

constexpr int kActivationExponent = 48;
constexpr int kBitsExponent = -112;  // bf16's exponent bias is 127, half's 15

// |weight| <= d * most_quant<F> + |m| * most_minimum<F>
template <Format F>
constexpr float most_quant() {
  constexpr int bits = info(F).quant_bytes == 512 ? 8 : 4 + upper_bits(F);
  constexpr int most = info(F).bias != 0 ? info(F).bias : (1 << bits) - 1;
  return static_cast<float>(most * (info(F).unit == kBlock ? 1 : F == Format::k6 ? 128 : 255));
}
template <Format F>
constexpr float most_minimum() {
  return !info(F).minima ? 0 : info(F).unit == kBlock ? 1 : 255;
}

template <Format F>
class Dequantised {
 public:
#ifndef KP1
#define KP1 8
#define KP2 64
#endif
  static int64_t part_blocks(int64_t groups) { return groups == 1 ? KP1 : KP2; }
  static constexpr int64_t kPart = 64;

  explicit Dequantised(const DotArgs& a) : a_(a), size_(panel_size(F, a.k)), meta_(meta_size(F, a.k)) {}

  const uint8_t* w() const { return parts_[now_]; }
  int64_t panel_bytes() const { return kPart * kTileBytes; }

  void aim(const Span& span, const Span& then, int64_t slots) {
    next_ = span;
    ahead_ = then;
    const int64_t left = a_.panels - span.panel;
    panels_ = left < 0 ? 0 : left < 2 ? left : 2;
    units_ = panels_ * span.count;
    slots_ = slots;
    due_ = 0;
    panel_ = 0;
    begin_panel();
  }
  inline __attribute__((always_inline)) void slot() {
    due_ += units_;
    if (due_ < slots_) return;
    due_ -= slots_;
    unit();
  }
  void turn() {
    while (panel_ < panels_) unit();
    now_ = 1 - now_;
  }
  void finish(float* out, int64_t stride, int64_t rows, int64_t panels) const {
    for (int64_t n = 0; n < panels; ++n) {
      const __m512 back = _mm512_load_ps(back_[(next_.panel / 2 + 1) % 2][n]);
      for (int64_t r = 0; r < rows; ++r) {
        float* at = out + r * stride + n * kPanel;
        _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), back));
      }
    }
  }

 private:
  // A block of one panel; those of the first panel come first.
  inline __attribute__((always_inline)) void unit() {
    if (index_ == 0) scale_panel();
    prefetch();
    convert();
    to_ += kTileBytes;
    from_ += info(F).quant_bytes;
    if (++index_ < next_.first + next_.count) return;
    ++panel_;
    begin_panel();
  }

  void begin_panel() {
    from_panel_ = a_.w + (next_.panel + panel_) * size_;
    from_ = from_panel_ + meta_ + next_.first * info(F).quant_bytes;
    to_ = parts_[1 - now_] + panel_ * kPart * kTileBytes;
    index_ = next_.first;
    const uint8_t* panel = a_.w + (ahead_.panel + panel_) * size_;
    fetch_ = panel + meta_ + ahead_.first * info(F).quant_bytes;
    fetch_meta_ = panel;
    meta_share_ = ahead_.first == 0 ? (meta_ / next_.count + 63) / 64 * 64 : 0;
  }

  // The same block of the part after the next, with a share of the scales if a panel begins there.
  inline __attribute__((always_inline)) void prefetch() {
    for (int64_t i = 0; i < info(F).quant_bytes; i += 64) _mm_prefetch(fetch_ + i, _MM_HINT_T1);
    fetch_ += info(F).quant_bytes;
    for (int64_t i = 0; i < meta_share_; i += 64) _mm_prefetch(fetch_meta_ + i, _MM_HINT_T1);
    fetch_meta_ += meta_share_;
  }

  // The power of two of each output of a panel.
  void scale_panel() {
    const __m256i magnitude = _mm256_set1_epi16(0x7fff);
    __m256i quant = _mm256_setzero_si256();
    __m256i minimum = quant;
    const uint8_t* const end = from_panel_ + a_.k / info(F).unit * info(F).meta_bytes;
    for (const uint8_t* at = from_panel_; at < end; at += info(F).meta_bytes) {
      const auto* d = reinterpret_cast<const __m256i*>(at);  // ordered as integers, NaN above all
      quant = _mm256_max_epu16(quant, _mm256_and_si256(_mm256_load_si256(d), magnitude));
      if constexpr (info(F).minima)
        minimum = _mm256_max_epu16(minimum, _mm256_and_si256(_mm256_load_si256(d + 1), magnitude));
    }
    __m512 most = _mm512_mul_ps(_mm512_cvtph_ps(quant), _mm512_set1_ps(most_quant<F>()));
    most = _mm512_fmadd_ps(_mm512_cvtph_ps(minimum), _mm512_set1_ps(most_minimum<F>()), most);
    most = _mm512_max_ps(_mm512_set1_ps(0x1p-100f), most);  // NaN stays
    const __m512 exponent = _mm512_sub_ps(_mm512_set1_ps(14), _mm512_getexp_ps(most));
    const __m512 one = _mm512_set1_ps(1);
    const __m512 bias = _mm512_set1_ps(-kBitsExponent - kActivationExponent);
    _mm512_store_ps(up_[panel_], _mm512_scalef_ps(one, exponent));
    _mm512_store_ps(back_[next_.panel / 2 % 2][panel_], _mm512_scalef_ps(one, _mm512_sub_ps(bias, exponent)));
  }

  // 16 values to half precision, each for both k of a pair.
  static inline __attribute__((always_inline)) Half pairs(__m512 v) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    return half_bits(_mm512_or_si512(wide, _mm512_slli_epi32(wide, 16)));
  }

  inline __attribute__((always_inline)) void convert() const {
    constexpr int groups = info(F).group == 16 ? 2 : 1;
    const __m512 up = _mm512_load_ps(up_[panel_]);
#pragma GCC unroll 2
    for (int g = 0; g < groups; ++g) {
      const Half scale = pairs(_mm512_mul_ps(scale_of<F>(from_panel_, index_, g), up));
      Half offset = multiply(scale, half_all(-info(F).bias));
      if constexpr (info(F).minima) offset = pairs(_mm512_mul_ps(minimum_of<F>(from_panel_, index_), up));
#pragma GCC unroll 8
      for (int j = g * 8 / groups; j < (g + 1) * 8 / groups; ++j) {
        const __m512i v = quants<F>(from_, j);
        store(to_ + j * 128, words<0>(v), scale, offset);
        store(to_ + j * 128 + 64, words<2>(v), scale, offset);
      }
    }
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

  alignas(64) uint8_t parts_[2][2 * kPart * kTileBytes];
  alignas(64) float up_[2][16];       // of the pair being dequantised
  alignas(64) float back_[2][2][16];  // of it and of the one being multiplied
  const DotArgs& a_;
  int64_t size_, meta_;
  int now_ = 0;
  Span next_{}, ahead_{};
  int64_t panels_ = 0, units_ = 0, slots_ = 1, due_ = 0;
  // The unit to be made.
  int64_t panel_ = 0, index_ = 0;  // of the two panels, of the panel's blocks
  const uint8_t *from_panel_ = nullptr, *from_ = nullptr;
  uint8_t* to_ = nullptr;
  const uint8_t *fetch_ = nullptr, *fetch_meta_ = nullptr;
  int64_t meta_share_ = 0;
};

template <Format F>
void dot_format(const DotArgs& a) {
  Dequantised<F> source(a);
  dot_by_parts(a, source);
}

// load(i, mask): 16 values of float32 from i on.
template <class Load>
void pack(int64_t k, int64_t first, int64_t last, uint8_t* row, Load&& load) {
  const __m512 up = _mm512_set1_ps(0x1p48f);
  static_assert(kActivationExponent == 48);
  for (int64_t i = first; i < last; i += 16) {
    const auto mask = static_cast<__mmask16>(last - i >= 16 ? 0xffff : (1u << (last - i)) - 1);
    const __m256bh v = _mm512_cvtneps_pbh(_mm512_mul_ps(load(i - first, mask), up));
    _mm256_store_si256(reinterpret_cast<__m256i*>(row + 2 * i), reinterpret_cast<__m256i>(v));
  }
  if (last < k) return;
  const int64_t bytes = row_layout(Format::bf16, k).bytes;
  for (int64_t at = round_up(2 * last, 32); at < bytes; at += 32) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(row + at), _mm256_setzero_si256());
  }
}

}  // namespace

void pack_wide_f32(const float* x, int64_t k, int64_t first, int64_t last, uint8_t* row) {
  pack(k, first, last, row, [x](int64_t i, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, x + i); });
}

void pack_wide_bf16(const uint16_t* x, int64_t k, int64_t first, int64_t last, uint8_t* row) {
  pack(k, first, last, row, [x](int64_t i, __mmask16 mask) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x + i)), 16));
  });
}

void dot_wide_amx(const DotArgs& a) {
  with_format(a.format, [&](auto f) {
    // Others are never asked for.
    if constexpr (!plain(decltype(f)::value)) dot_format<decltype(f)::value>(a);
  });
}

}  // namespace ktserve
