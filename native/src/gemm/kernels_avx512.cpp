// Dot products on AVX-512 with VNNI and BF16. A register tile is M activation rows by N panels of 16 outputs:
//
//              panel 0   panel 1        for each 4 k (2 k in bf16): load one vector per panel, broadcast four
//    row 0     f[0][0]   f[0][1]        (two) activations of each row from memory, M x N multiply-adds; after each
//    ...                                block of 32 k the integer sums are scaled into the float sums f
//    row M-1
//
// Each f has one chain of additions in the order of k, whatever M and N are: so the tile's shape never shows. `Floats`:
// bf16 is multiplied as float32.
#include <immintrin.h>

#include "gemm/grids_avx512.hpp"
#include "gemm/kernels.hpp"
#include "gemm/rows.hpp"
#include "gemm/tiles_avx512.hpp"

namespace ktserve {
namespace {

// Bytes from block to block where tiles read them: in the panel, or decoded.
template <Format F, bool Ready>
constexpr int64_t block_stride() {
  return Ready ? static_cast<int64_t>(sizeof(Decoded<F>)) : info(F).quant_bytes;
}

// Blocks of k whose weights stay in the first-level cache from one tile of rows to the next.
template <Format F, int N, bool Ready>
constexpr int64_t blocks_at_once() {
  return 16384 / (N * block_stride<F, Ready>());
}

// Blocks of N panels as a tile reads them: as they lie there, or decoded.
template <Format F, int N, bool Ready>
class Blocks {
 public:
  explicit Blocks(const Tile& t) : meta_(t.w), at_(t.decoded), panel_bytes_(t.panel_bytes) {
    if constexpr (!Ready) {
      at_ = t.w + meta_size(F, t.k) + t.part.first * info(F).quant_bytes;
      if constexpr (!has_grid(F)) read_unit(t.part.first);
    }
  }
  inline __attribute__((always_inline)) void begin(int64_t b) {
    if constexpr (Ready) {
      static_cast<void>(b);
    } else if constexpr (has_grid(F)) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) found_[n] = GridBlock<F>(meta_ + n * panel_bytes_, block(n), b);
    } else if constexpr (info(F).steps != 0) {
      if (b % (kSuper / kBlock) == 0) read_unit(b);
    }
  }
  inline __attribute__((always_inline)) __m512i quants(int n, int j) const {
    if constexpr (Ready) return _mm512_load_si512(block(n) + 64 * j);
    if constexpr (has_grid(F) && !Ready) return found_[n].vector(j);
    return ktserve::quants<F>(block(n), j);
  }
  inline __attribute__((always_inline)) __m512 scale(int n, int64_t b, int g) const {
    if constexpr (Ready) return _mm512_load_ps(reinterpret_cast<const Decoded<F>*>(block(n))->scales[g]);
    if constexpr (has_grid(F) && !Ready) return found_[n].scale(g);
    return scale_of<F>(unit_[n], meta_ + n * panel_bytes_, b, g);
  }
  inline __attribute__((always_inline)) __m512 minimum(int n, int64_t b, int g) const {
    if constexpr (Ready) return _mm512_load_ps(reinterpret_cast<const Decoded<F>*>(block(n))->scales[groups_of(F) + g]);
    return minimum_of<F>(unit_[n], meta_ + n * panel_bytes_, b, g);
  }
  void next() { at_ += block_stride<F, Ready>(); }

 private:
  inline __attribute__((always_inline)) const uint8_t* block(int n) const {
    return at_ + n * (Ready ? blocks_at_once<F, N, Ready>() * block_stride<F, Ready>() : panel_bytes_);
  }
  inline __attribute__((always_inline)) void read_unit(int64_t b) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) unit_[n] = unit_scales<F>(meta_ + n * panel_bytes_, b);
  }

  const uint8_t *meta_, *at_;
  int64_t panel_bytes_;
  UnitScales unit_[N];
  std::conditional_t<has_grid(F) && !Ready, GridBlock<F>, char> found_[N];
};

template <Format F, int M, int N, bool Alone, bool Ready>
void tile(const Tile& t) {
  static_assert(M <= 6);
  constexpr int groups = groups_of(F);
  constexpr int steps = 8 / groups;
  const RowLayout row = row_layout(F, t.k);
  const Rows rows(t.stride);
  const uint8_t* x = t.x + t.part.first * kBlock;
  const uint8_t* scales = t.x + row.scale + t.part.first * 4;
  const uint8_t* inits = t.x + row.init + t.part.first * groups * 4;
  const uint8_t* sums = t.x + row.sum + t.part.first * groups * 4;
  __m512 f[M][N];
  begin(f, t);
  PrefetchAbreast<F, N, Alone> next(t.next, t.panel_bytes, t.k / kBlock, t.part);
  Blocks<F, N, Ready> blocks(t);
  for (int64_t b = t.part.first; b < t.part.first + t.part.count; ++b) {
    next.begin(b);
    blocks.begin(b);
#pragma GCC unroll 2
    for (int g = 0; g < groups; ++g) {
      __m512i acc[M][N];
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        __m512i start = _mm512_setzero_si512();
        if constexpr (info(F).bias != 0) start = _mm512_set1_epi32(word(inits + rows[m] + g * 4));
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) acc[m][n] = start;
      }
#pragma GCC unroll 8
      for (int j = g * steps; j < (g + 1) * steps; ++j) {
        next.advance(j);
        __m512i u[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) u[n] = blocks.quants(n, j);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
          const __m512i v = _mm512_set1_epi32(word(x + rows[m] + 4 * j));
#pragma GCC unroll 4
          for (int n = 0; n < N; ++n) acc[m][n] = _mm512_dpbusd_epi32(acc[m][n], u[n], v);
        }
      }
      __m512 scale[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) scale[n] = blocks.scale(n, b, g);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const __m512 xs = broadcast(scales + rows[m]);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
          f[m][n] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[m][n]), _mm512_mul_ps(scale[n], xs), f[m][n]);
        }
      }
      if constexpr (info(F).minima) {
        __m512 minimum[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) minimum[n] = blocks.minimum(n, b, g);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
          const __m512 sum = broadcast(sums + rows[m] + g * 4);
#pragma GCC unroll 4
          for (int n = 0; n < N; ++n) f[m][n] = _mm512_fmadd_ps(minimum[n], sum, f[m][n]);
        }
      }
    }
    if constexpr (info(F).minima) sums += groups * 4;
    blocks.next();
    x += kBlock;
    scales += 4;
    inits += groups * 4;
  }
  end(f, t);
}

using Kernel = void (*)(const Tile&);

// How a format's weights reach the products: as they lie in panels, as float32 (bf16), or decoded first.
enum class By { panels, floats, decoded };

template <Format F, By How, int M, int N, bool Alone>
constexpr Kernel tile_for() {
  if constexpr (How == By::floats)
    return &tile_bf16_floats<M, N, Alone>;
  else if constexpr (F == Format::bf16)
    return &tile_bf16<M, N, Alone>;
  else if constexpr (plain(F))
    return &tile_f32<F, M, N, Alone>;
  else
    return &tile<F, M, N, Alone, How == By::decoded>;
}

// The most rows of a tile: what 32 registers hold with two panels. Four panels are for one row.
template <Format F, int N>
constexpr int most_rows() {
  return N > 2 ? 1 : plain(F) ? 12 : 6;
}

// The tile of so many rows: `alone`, or one of several that share panels and are all at least half of the largest.
template <Format F, By How, int N, int M = most_rows<F, N>()>
Kernel tile_of(int64_t rows, bool alone) {
  if constexpr (M > 1) {
    if (rows < M) return tile_of<F, How, N, M - 1>(rows, alone);
  }
  if constexpr (N <= 2 && M >= most_rows<F, N>() / 2) {
    if (!alone) return tile_for<F, How, M, N, false>();
  }
  return tile_for<F, How, M, N, true>();
}

// Blocks [first, first + count) of a panel.
template <Format F>
void decode_blocks(const uint8_t* panel, int64_t k, int64_t first, int64_t count, Decoded<F>* to) {
  const uint8_t* block = panel + meta_size(F, k) + first * info(F).quant_bytes;
  for (int64_t b = first; b < first + count; ++b, ++to, block += info(F).quant_bytes) {
    if constexpr (has_grid(F)) {
      decode<F>(panel, block, b, *to);
    } else {
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) _mm512_store_si512(to->quants + 64 * j, quants<F>(block, j));
      const UnitScales unit = unit_scales<F>(panel, b);
      for (int g = 0; g < groups_of(F); ++g) {
        _mm512_store_ps(to->scales[g], scale_of<F>(unit, panel, b, g));
        if constexpr (info(F).minima) _mm512_store_ps(to->scales[groups_of(F) + g], minimum_of<F>(unit, panel, b, g));
      }
    }
  }
}

template <Format F, By How, int N>
void dot_panels(const DotArgs& a, int64_t panel) {
  constexpr bool ready = How == By::decoded;
  const int64_t size = panel_size(F, a.k);
  const int64_t blocks = padded_k(a.k) / kBlock;
  const uint8_t* next = a.next != nullptr && panel + N >= a.panels ? a.next : a.w + (panel + N) * size;
  // Equal tiles rather than full ones and a rest: 7 rows are 4 + 3, not 6 + 1.
  const int64_t tiles = (a.rows + most_rows<F, N>() - 1) / most_rows<F, N>();
  constexpr bool parts = How != By::panels;  // even if the panels are read once
  constexpr int64_t at_once = How == By::floats ? kFloatBlocks : blocks_at_once<F, N, ready>();
  const int64_t step = tiles == 1 && !parts ? blocks : at_once;
  Decoded<F> decoded[ready ? N * at_once : 1];
  for (int64_t first = 0; first < blocks; first += step) {
    const int64_t count = blocks - first < step ? blocks - first : step;
    if constexpr (ready) {
      for (int64_t n = 0; n < N; ++n)
        decode_blocks<F>(a.w + (panel + n) * size, a.k, first, count, decoded + n * at_once);
    }
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t row = a.rows * t / tiles;
      const int64_t rows = a.rows * (t + 1) / tiles - row;
      tile_of<F, How, N>(rows, tiles == 1)({a.w + panel * size,
                                            decoded->quants,
                                            next,
                                            size,
                                            a.k,
                                            a.x + row * a.x_stride,
                                            a.x_stride,
                                            a.out + row * a.out_stride + panel * kPanel,
                                            a.out_stride,
                                            {first, count, t, tiles},
                                            first == 0 && !a.adds});
    }
  }
}

template <Format F, By How>
void dot_format(const DotArgs& a) {
  int64_t p = 0;
  if (a.rows == 1) {  // memory is the limit; these are what it delivers fastest
    if constexpr (How == By::floats) {
      // two panels: with one, its chain of additions would be the limit
    } else if constexpr (plain(F)) {
      for (; p < a.panels; ++p) dot_panels<F, How, 1>(a, p);
    } else {
      if constexpr (!has_grid(F))  // four looked up at once do not fit the registers
        for (; p + 4 <= a.panels; p += 4) dot_panels<F, How, 4>(a, p);
    }
  }
  for (; p + 2 <= a.panels; p += 2) dot_panels<F, How, 2>(a, p);
  if (p < a.panels) dot_panels<F, How, 1>(a, p);
}

// Blocks are decoded first where so many tiles of rows read them that it pays (measured): sooner if quants are put
// together from two planes, or a block has two scales.
template <Format F, bool Floats>
void dot_rows(const DotArgs& a) {
  if constexpr (F == Format::bf16 && Floats) {
    dot_format<F, By::floats>(a);
  } else if constexpr (has_grid(F)) {
    a.rows > most_rows<F, 2>() ? dot_format<F, By::decoded>(a) : dot_format<F, By::panels>(a);
  } else if constexpr (plain(F) || low_bits(F) == 8) {
    dot_format<F, By::panels>(a);
  } else {
    constexpr int64_t few = (upper_bits(F) != 0 || groups_of(F) == 2 ? 1 : 2) * most_rows<F, 2>();
    a.rows > few ? dot_format<F, By::decoded>(a) : dot_format<F, By::panels>(a);
  }
}

template <bool Floats>
void dot(const DotArgs& a) {
  with_format(a.format, [&](auto f) { dot_rows<decltype(f)::value, Floats>(a); });
}

}  // namespace

const Kernels& kernels_avx512(bool bf16_as_floats) {
  static constexpr Kernels dots = avx512::row_kernels(Isa::avx512, dot<false>);
  static constexpr Kernels floats = avx512::row_kernels(Isa::avx512, dot<true>);
  return bf16_as_floats ? floats : dots;
}

}  // namespace ktserve
