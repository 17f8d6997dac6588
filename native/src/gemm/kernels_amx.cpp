// bf16 dot products on AMX tiles (bf16_tiles.hpp); of quantised formats those with many rows are in int8_amx.cpp and
// dequantised_amx.cpp, all else is AVX-512's.
//
// Every number of rows uses these tiles, and adds in the order of k: a row does not see its neighbours.
#include <xmmintrin.h>

#include "gemm/bf16_tiles.hpp"
#include "gemm/kernels.hpp"
#include "simd/amx.hpp"

namespace ktserve {
namespace {

constexpr int64_t kInt8Rows = 12;  // fewer of a quantised format are faster without tiles

// One group of rows: each pair of panels is read from end to end, once. Both are prefetched kFetch blocks early, beyond
// their ends those of the next pair.
void dot_one_group(const DotArgs& a) {
  constexpr int64_t kFetch = 8;
  const int64_t size = panel_size(Format::bf16, a.k);
  const int64_t blocks = padded_k(a.k) / kBlock;
  configure(a.rows < 16 ? a.rows : 16, a.rows - 16);
  for (int64_t p = 0; p < a.panels; p += 2) {
    const uint8_t* w = a.w + p * size;
    const uint8_t* behind = (p + 2 >= a.panels && a.next != nullptr ? a.next : w + 2 * size) - blocks * kTileBytes;
    const Product c{
        w,       kTileBytes,      size, 0, -1, a.x, a.x_stride, blocks, a.out + p * kPanel, a.out_stride * 4,
        !a.adds, tail_of(a, p, 0)};
    product(c, a.rows, p + 1 < a.panels, [&](int64_t b, int half) __attribute__((always_inline)) {
      const uint8_t* next = (b + kFetch < blocks ? w : behind) + (b + kFetch) * kTileBytes + half * size;
      for (int64_t i = 0; i < kTileBytes; i += 64) _mm_prefetch(next + i, _MM_HINT_T1);
    });
  }
  TILE_RELEASE();
}

// The packed form is what the tiles read; the next part is fetched into the second-level cache.
class Packed {
 public:
  explicit Packed(const DotArgs& a) : a_(a), size_(panel_size(Format::bf16, a.k)) {}

  const uint8_t* w() const { return now_; }
  int64_t block_bytes() const { return kTileBytes; }
  int64_t panel_bytes() const { return size_; }

  void aim(int64_t panel, int64_t first, int64_t count, int64_t steps) {
    const bool behind = panel >= a_.panels && a_.next != nullptr;
    next_ = at_ = (behind ? a_.next : a_.w + panel * size_) + first * kTileBytes;
    end_ = next_ + count * kTileBytes;
    share_ = (count * kTileBytes / 64 + steps - 1) / steps;
  }
  inline __attribute__((always_inline)) void step(int64_t) {
    for (int64_t i = 0; i < share_ && at_ < end_; ++i, at_ += 64) {
      _mm_prefetch(at_, _MM_HINT_T1);
      _mm_prefetch(at_ + size_, _MM_HINT_T1);
    }
  }
  void turn() { now_ = next_; }
  void finish(int64_t, float*, int64_t, int64_t) const {}

 private:
  const DotArgs& a_;
  int64_t size_;
  const uint8_t *now_ = nullptr, *next_ = nullptr, *at_ = nullptr, *end_ = nullptr;
  int64_t share_ = 0;
};

void dot_bf16(const DotArgs& a) {
  if (a.rows <= kGroup) return dot_one_group(a);
  Packed source(a);
  dot_by_parts(a, source);
}

void dot(const DotArgs& a) {
  if (a.format == Format::bf16) return dot_bf16(a);
  if (!plain(a.format) && a.rows >= kInt8Rows) return dot_int8_amx(a);
  kernels_avx512().dot(a);
}

// Measured: fewer rows are faster with vdpbusd, more than twelve slower on int8 tiles.
int64_t dequantised_rows(Format format) {
  return plain(format) ? 0 : 12;
}

}  // namespace

const Kernels& kernels_amx() {
  static const Kernels table = [] {
    Kernels k = kernels_avx512();
    k.isa = Isa::amx;
    k.dot = dot;
    k.dequantised_rows = dequantised_rows;
    k.dot_dequantised = dot_dequantised_amx;
    k.pack_dequantised_f32 = pack_dequantised_f32;
    k.pack_dequantised_bf16 = pack_dequantised_bf16;
    k.tails = true;
    return k;
  }();
  return table;
}

}  // namespace ktserve
