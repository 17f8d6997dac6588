// What a register tile of the dot products reads and writes, and the tiles of formats that are plain numbers. Included
// by files compiled for AVX2, hence internal linkage.
#pragma once

#include "gemm/blocks_avx2.hpp"
#include "gemm/prefetch.hpp"

namespace ktserve {
namespace {

// What a tile reads and writes: a panel and rows of its own. Blocks [part.first, part.first + part.count) of k are
// added to `out`, where sums wait, exactly, from one part of k to the next; `begins`: nothing waits there yet.
struct Tile {
  const uint8_t* w;
  const uint8_t* decoded;  // the part's blocks, where tiles read them so
  const uint8_t* next;     // the panel that follows, to be fetched meanwhile
  int64_t k;
  const uint8_t* x;
  int64_t stride;
  float* out;
  int64_t out_stride;
  Part part;
  bool begins;
};

template <int M>
inline __attribute__((always_inline)) void begin(Pair (&f)[M], const Tile& t) {
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) {
    const float* at = t.out + m * t.out_stride;
    f[m] =
        t.begins ? Pair{_mm256_setzero_ps(), _mm256_setzero_ps()} : Pair{_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)};
  }
}

template <int M>
inline __attribute__((always_inline)) void end(const Pair (&f)[M], const Tile& t) {
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) {
    _mm256_storeu_ps(t.out + m * t.out_stride, f[m].lo);
    _mm256_storeu_ps(t.out + m * t.out_stride + 8, f[m].hi);
  }
}

__m256 even(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
}
__m256 odd(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-65536)));
}

// Row m of up to six, as a base and an index register: odd multiples of the stride are kept from the compiler, which
// would otherwise carry a pointer per row through the loop.
struct Rows {
  int64_t one, three, five;
  explicit Rows(int64_t stride) : one(stride), three(3 * stride), five(5 * stride) {
    __asm__("" : "+r"(one), "+r"(three), "+r"(five));
  }
  inline __attribute__((always_inline)) int64_t operator[](int m) const {
    return m == 3 ? three : m == 5 ? five : m * one;
  }
};

// Even k of a pair of all rows, then odd k: ten sums leave no room for more than one row's value at a time.
template <int M>
inline __attribute__((always_inline)) void add_pair(Pair (&f)[M], const uint8_t* w, const uint8_t* x,
                                                    const Rows& rows) {
  const __m256 lo_even = even(load(w)), hi_even = even(load(w + 32));
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) {
    const __m256 v = even(_mm256_set1_epi32(word(x + rows[m])));
    f[m].lo = _mm256_fmadd_ps(lo_even, v, f[m].lo);
    f[m].hi = _mm256_fmadd_ps(hi_even, v, f[m].hi);
  }
  __asm__("" : "+r"(x));  // read again, rather than spilled
  const __m256 lo_odd = odd(load(w)), hi_odd = odd(load(w + 32));
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) {
    const __m256 v = odd(_mm256_set1_epi32(word(x + rows[m])));
    f[m].lo = _mm256_fmadd_ps(lo_odd, v, f[m].lo);
    f[m].hi = _mm256_fmadd_ps(hi_odd, v, f[m].hi);
  }
}

template <int M, bool Alone>
void tile_bf16(const Tile& t) {
  constexpr int64_t pairs = kBlock / 2;
  Pair f[M];
  begin(f, t);
  const Rows rows(t.stride);
  const int64_t size = panel_size(Format::bf16, t.k);
  Prefetch<pairs, lines_of<Format::bf16>(M, 1, pairs, Alone)> next(t.next, size, padded_k(t.k) / kBlock, t.part);
  const int64_t last = (t.part.first + t.part.count) * pairs;
  for (int64_t i = t.part.first * pairs; i < last; ++i) {
    next.advance();
    if constexpr (M > 3) {
      add_pair(f, t.w + i * 64, t.x + i * 4, rows);
      continue;
    }
    const __m256i lo = load(t.w + i * 64);
    const __m256i hi = load(t.w + i * 64 + 32);
    const __m256 lo_even = even(lo), lo_odd = odd(lo), hi_even = even(hi), hi_odd = odd(hi);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const __m256i v = _mm256_set1_epi32(word(t.x + m * t.stride + i * 4));
      f[m].lo = _mm256_fmadd_ps(lo_odd, odd(v), _mm256_fmadd_ps(lo_even, even(v), f[m].lo));
      f[m].hi = _mm256_fmadd_ps(hi_odd, odd(v), _mm256_fmadd_ps(hi_even, even(v), f[m].hi));
    }
  }
  end(f, t);
}

// Row k of 16 weights of f32, f16 or f8, as float32; `scale`: f8's.
template <Format F>
inline __attribute__((always_inline)) Pair weights(const uint8_t* w, int64_t k, Pair scale) {
  if constexpr (F == Format::f8) return times(f8_numbers(w + k * 16), scale);
  if constexpr (F == Format::f16) return half_scales(w + k * 32);
  return {_mm256_castsi256_ps(load(w + k * 64)), _mm256_castsi256_ps(load(w + k * 64 + 32))};
}

template <Format F, int M, bool Alone>
void tile_f32(const Tile& t) {
  Pair f[M];
  begin(f, t);
  const Rows rows(t.stride);
  const int64_t size = panel_size(F, t.k);
  constexpr int steps = static_cast<int>(info(F).quant_bytes / 64);  // a line each
  Prefetch<steps, lines_of<F>(M, 1, steps, Alone)> next(t.next, size, padded_k(t.k) / kBlock, t.part);
  const uint8_t* const numbers = t.w + meta_size(F, t.k);
  constexpr int each = static_cast<int>(kBlock) / steps;
  const int64_t last = (t.part.first + t.part.count) * kBlock;
  Pair scale{};
  const auto add = [&](int64_t i) __attribute__((always_inline)) {
    const Pair w = weights<F>(numbers, i, scale);
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
      const __m256 v = _mm256_castsi256_ps(_mm256_set1_epi32(word(t.x + rows[m] + i * 4)));
      f[m].lo = _mm256_fmadd_ps(w.lo, v, f[m].lo);
      f[m].hi = _mm256_fmadd_ps(w.hi, v, f[m].hi);
    }
  };
  for (int64_t i = t.part.first * kBlock; i < last; i += each) {
    if (F == Format::f8 && i % kBlock == 0) scale = f8_scales(t.w, i / kBlock);
    next.advance();
    if constexpr (M > 2 && F != Format::f8) {  // measured: 3% slower unrolled
#pragma GCC unroll 1
      for (int j = 0; j < each; ++j) add(i + j);
    } else {
#pragma GCC unroll 4
      for (int j = 0; j < each; ++j) add(i + j);
    }
  }
  end(f, t);
}

}  // namespace
}  // namespace ktserve
