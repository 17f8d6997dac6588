// Dot products of quantised weights with many bf16 rows: blocks of panels are dequantised to bf16, once for all rows,
// and multiplied on bf16 tiles. While the tile unit computes with some the vector unit makes the next ones
// (half_blocks_amx.hpp), scaled by powers of two. Activations come times 2^48, so that no product is too small for
// float32 (beyond 2^79 they are infinite, and spoil their own row), and the sums are brought back at the end.
#include <immintrin.h>

#include "gemm/bf16_tiles.hpp"
#include "gemm/half_blocks_amx.hpp"
#include "simd/amx.hpp"

namespace ktserve {
namespace {

constexpr int kActivationExponent = 48;

// Dequantises a pair of panels, and fetches what comes kFetch blocks later into the second-level cache.
template <Format F>
class Dequantiser {
 public:
  explicit Dequantiser(const DotArgs& a)
      : a_(a), size_(panel_size(F, a.k)), meta_(meta_size(F, a.k)), blocks_(a.k / kBlock) {}

  void pair(int64_t panel) {
    panel_ = panel;
    from_ = a_.w + panel * size_;
    const bool last = panel + 2 >= a_.panels && a_.next != nullptr;
    behind_ = last ? a_.next : from_ + 2 * size_;
  }

  // Block `index` of panel n (0, 1) of the pair, 1 KB. Block 0 of a panel comes first.
  inline __attribute__((always_inline)) void block(int64_t n, int64_t index, uint8_t* to) {
    const uint8_t* panel = from_ + n * size_;
    if (index == 0) scale_panel(panel, n);
    fetch(n, index);
    HalfBlocks<F>::convert(panel, panel + meta_ + index * info(F).quant_bytes, index, _mm512_load_ps(up_[n]), to);
  }

  // Sums of the pair of panels from `panel` on to results.
  void finish(int64_t panel, float* out, int64_t stride, int64_t rows) const {
    for (int64_t n = 0; n < 2 && panel + n < a_.panels; ++n) {
      const __m512 back = _mm512_load_ps(back_[panel / 2 % 2][n]);
      for (int64_t r = 0; r < rows; ++r) {
        float* at = out + r * stride + n * kPanel;
        _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), back));
      }
    }
  }

 private:
  static constexpr int64_t kFetch = 8;  // blocks: some 4 KB of each panel

  // Beyond a panel's end the next pair follows. Its scales are all read at its begin, so a share of them is fetched
  // with each block of this pair.
  inline __attribute__((always_inline)) void fetch(int64_t n, int64_t index) const {
    const int64_t later = index + kFetch;
    const uint8_t* panel = (later < blocks_ ? from_ : behind_) + n * size_;
    const uint8_t* p = panel + meta_ + (later < blocks_ ? later : later - blocks_) * info(F).quant_bytes;
    for (int64_t i = 0; i < info(F).quant_bytes; i += 64) _mm_prefetch(p + i, _MM_HINT_T1);
    constexpr int64_t share = (info(F).meta_bytes * kBlock / info(F).unit + 63) / 64 * 64;
    if (index * share < meta_) _mm_prefetch(behind_ + n * size_ + index * share, _MM_HINT_T1);
  }

  // The power of two of each output of a panel.
  void scale_panel(const uint8_t* panel, int64_t n) {
    const __m512 exponent = HalfBlocks<F>::exponents(panel, a_.k / info(F).unit);
    const __m512 one = _mm512_set1_ps(1);
    const __m512 bias = _mm512_set1_ps(-kBitsExponent - kActivationExponent);
    _mm512_store_ps(up_[n], _mm512_scalef_ps(one, exponent));
    _mm512_store_ps(back_[panel_ / 2 % 2][n], _mm512_scalef_ps(one, _mm512_sub_ps(bias, exponent)));
  }

  alignas(64) float up_[2][16];       // of the pair being dequantised
  alignas(64) float back_[2][2][16];  // of it and of the one before
  const DotArgs& a_;
  int64_t size_, meta_, blocks_;
  int64_t panel_ = 0;  // first of the pair
  const uint8_t *from_ = nullptr, *behind_ = nullptr;
};

// A source for dot_by_parts: one part is multiplied while the next is made, panel by panel.
//
// A store that is in flight delays loads of the same address modulo 4 KB. A step reads block b of both panels (b modulo
// 4: panels are whole pages apart), so the blocks that are made beside it are those of b - 1 modulo 4.
template <Format F>
class Parts {
 public:
  explicit Parts(const DotArgs& a) : a_(a), weights_(a) {}

  const uint8_t* w() const { return parts_[now_]; }
  int64_t block_bytes() const { return kTileBytes; }
  int64_t panel_bytes() const { return kPart * kTileBytes; }

  void aim(int64_t panel, int64_t first, int64_t count, int64_t steps) {
    if (first == 0) weights_.pair(panel);
    const int64_t left = a_.panels - panel;
    first_ = first;
    count_ = count;
    end_ = count * (left < 0 ? 0 : left < 2 ? left : 2);
    steps_ = steps;
    made_ = due_ = n_ = index_ = 0;
  }
  // b: of the block that is multiplied.
  inline __attribute__((always_inline)) void step(int64_t b) {
    for (due_ += end_; due_ >= steps_ && ((b - 1 - index_) & 3) == 0 && made_ < end_; due_ -= steps_) unit();
  }
  void turn() {
    while (made_ < end_) unit();
    now_ = 1 - now_;
  }
  void finish(int64_t panel, float* out, int64_t stride, int64_t rows) const {
    weights_.finish(panel, out, stride, rows);
  }

 private:
  inline __attribute__((always_inline)) void unit() {
    weights_.block(n_, first_ + index_, parts_[1 - now_] + (n_ * kPart + index_) * kTileBytes);
    ++made_;
    if (++index_ < count_) return;
    index_ = 0;
    n_ = 1;
  }

  alignas(64) uint8_t parts_[2][kPart * 2 * kTileBytes];
  const DotArgs& a_;
  Dequantiser<F> weights_;
  int now_ = 0;
  int64_t first_ = 0, count_ = 0, steps_ = 1;
  int64_t made_ = 0, end_ = 0, due_ = 0, n_ = 0, index_ = 0;
};

// One group of rows: blocks go through a ring, C stays in the tiles for all of k. A block is made in the slot that was
// read one step before, for the same reason.
template <Format F>
void dot_one_group(const DotArgs& a) {
  constexpr int64_t slots = 4;
  alignas(64) uint8_t ring[slots * 2 * kTileBytes];
  Dequantiser<F> weights(a);
  const int64_t blocks = a.k / kBlock;
  const int64_t decoded = blocks < slots - 1 ? blocks : slots - 1;
  int64_t panel = 0, index = 0, slot = 0;  // to be made
  const auto make = [&](int64_t, int n) __attribute__((always_inline)) {
    if (panel + n < a.panels) weights.block(n, index, ring + (2 * slot + n) * kTileBytes);
    if (n == 0) return;
    slot = (slot + 1) & (slots - 1);
    if (++index < blocks) return;
    index = 0;
    panel += 2;
    weights.pair(panel);
  };
  weights.pair(0);
  configure(a.rows < 16 ? a.rows : 16, a.rows - 16);
  for (int64_t i = 0; i < decoded; ++i) {
    make(i, 0);
    make(i, 1);
  }
  for (int64_t p = 0; p < a.panels; p += 2) {
    float* out = a.out + p * kPanel;
    product({ring, 2 * kTileBytes, kTileBytes, p / 2 * blocks, slots - 1, a.x, a.x_stride, blocks, out,
             a.out_stride * 4, true},
            a.rows, p + 1 < a.panels, make);
    weights.finish(p, out, a.out_stride, a.rows);
  }
  TILE_RELEASE();
}

template <Format F>
void dot_format(const DotArgs& a) {
  if (a.rows <= kGroup) return dot_one_group<F>(a);
  Parts<F> source(a);
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

void pack_dequantised_f32(const float* x, int64_t k, int64_t first, int64_t last, uint8_t* row) {
  pack(k, first, last, row, [x](int64_t i, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, x + i); });
}

void pack_dequantised_bf16(const uint16_t* x, int64_t k, int64_t first, int64_t last, uint8_t* row) {
  pack(k, first, last, row, [x](int64_t i, __mmask16 mask) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x + i)), 16));
  });
}

void dot_dequantised_amx(const DotArgs& a) {
  with_format(a.format, [&](auto f) {
    // Others are never asked for.
    if constexpr (!plain(decltype(f)::value)) dot_format<decltype(f)::value>(a);
  });
}

}  // namespace ktserve
