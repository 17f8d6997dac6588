// What a register tile of the dot products reads and writes, and the tiles of formats that are plain numbers. Included
// by files compiled for AVX-512 only, hence internal linkage.
#pragma once

#include "gemm/blocks_avx512.hpp"
#include "gemm/prefetch.hpp"

namespace ktserve {
namespace {

// What a tile reads and writes: panels and rows of its own. Blocks [part.first, part.first + part.count) of k are added
// to `out`, where sums wait, exactly, from one part of k to the next; `begins`: nothing waits there yet.
struct Tile {
  const uint8_t* w;
  const uint8_t* decoded;  // the part's blocks, panel by panel, of a grid's format
  const uint8_t* next;     // the panels that follow, to be fetched meanwhile
  int64_t panel_bytes;
  int64_t k;
  const uint8_t* x;
  int64_t stride;
  float* out;
  int64_t out_stride;
  Part part;
  bool begins;
};

template <int M, int N>
inline __attribute__((always_inline)) void begin(__m512 (&f)[M][N], const Tile& t) {
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      f[m][n] = t.begins ? _mm512_setzero_ps() : _mm512_loadu_ps(t.out + m * t.out_stride + n * kPanel);
    }
  }
}

template <int M, int N>
inline __attribute__((always_inline)) void end(const __m512 (&f)[M][N], const Tile& t) {
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) _mm512_storeu_ps(t.out + m * t.out_stride + n * kPanel, f[m][n]);
  }
}

// Row m of up to six, as a base and an index register: odd multiples of the stride are kept from the compiler, which
// would otherwise carry a pointer per row and array through the loop and spill them.
struct Rows {
  int64_t one, three, five;
  explicit Rows(int64_t stride) : one(stride), three(3 * stride), five(5 * stride) {
    __asm__("" : "+r"(one), "+r"(three), "+r"(five));
  }
  inline __attribute__((always_inline)) int64_t operator[](int m) const {
    return m == 3 ? three : m == 5 ? five : m * one;
  }
};

template <int M, int N, bool Alone>
void tile_bf16(const Tile& t) {
  __m512 f[M][N];
  begin(f, t);
  constexpr int64_t pairs = kBlock / 2;
  Prefetch<8, lines_of<Format::bf16>(M, N, 8, Alone)> next(t.next, N * t.panel_bytes, padded_k(t.k) / kBlock, t.part);
  const int64_t last = (t.part.first + t.part.count) * pairs;
  for (int64_t pair = t.part.first * pairs; pair < last; pair += 2) {
    next.advance();
#pragma GCC unroll 2
    for (int64_t i = pair; i < pair + 2; ++i) {
      __m512i v[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) v[n] = _mm512_load_si512(t.w + n * t.panel_bytes + i * 64);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const __m512i xv = _mm512_set1_epi32(word(t.x + m * t.stride + i * 4));
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
          f[m][n] = _mm512_dpbf16_ps(f[m][n], reinterpret_cast<__m512bh>(v[n]), reinterpret_cast<__m512bh>(xv));
        }
      }
    }
  }
  end(f, t);
}

// Blocks of a part of k whose rows are made float32.
constexpr int64_t kFloatBlocks = 8;

// The same by products of float32, for CPUs whose dot product of bf16 is the slower one. Rows become float32 once for
// all panels of the tile, weights in registers: first those of even k, then those of odd k.
template <int M, int N, bool Alone>
void tile_bf16_floats(const Tile& t) {
  alignas(64) float x[M][kFloatBlocks * kBlock];
  for (int m = 0; m < M; ++m) {
    const uint8_t* from = t.x + m * t.stride + t.part.first * kBlock * 2;
    for (int64_t i = 0; i < t.part.count * kBlock; i += 16) {
      const __m256i numbers = _mm256_load_si256(reinterpret_cast<const __m256i*>(from + i * 2));
      _mm512_store_ps(x[m] + i, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16)));
    }
  }
  __m512 f[M][N];
  begin(f, t);
  constexpr int64_t pairs = kBlock / 2;
  Prefetch<8, lines_of<Format::bf16>(M, N, 8, Alone)> next(t.next, N * t.panel_bytes, padded_k(t.k) / kBlock, t.part);
  const uint8_t* w = t.w + t.part.first * pairs * 64;
  for (int64_t pair = 0; pair < t.part.count * pairs; pair += 2) {
    next.advance();
#pragma GCC unroll 2
    for (int64_t i = pair; i < pair + 2; ++i) {
      __m512 even[N], odd[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const __m512i both = _mm512_load_si512(w + n * t.panel_bytes + i * 64);
        even[n] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
        odd[n] = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(-65536)));
      }
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const __m512 first = _mm512_set1_ps(x[m][2 * i]), second = _mm512_set1_ps(x[m][2 * i + 1]);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) f[m][n] = _mm512_fmadd_ps(odd[n], second, _mm512_fmadd_ps(even[n], first, f[m][n]));
      }
    }
  }
  end(f, t);
}

// Row k of 16 weights of f32, f16 or f8, as float32; `scale`: f8's.
template <Format F>
inline __attribute__((always_inline)) __m512 weights(const uint8_t* w, int64_t k, __m512 scale) {
  if constexpr (F == Format::f8) return _mm512_mul_ps(f8_numbers(w + k * 16), scale);
  if constexpr (F == Format::f16) return half_scales(w + k * 32);
  return _mm512_load_ps(w + k * 64);
}

template <Format F, int M, int N, bool Alone>
void tile_f32(const Tile& t) {
  __m512 f[M][N];
  begin(f, t);
  constexpr int steps = static_cast<int>(info(F).quant_bytes / 64);  // a line each
  Prefetch<steps, lines_of<F>(M, N, steps, Alone)> next(t.next, N * t.panel_bytes, padded_k(t.k) / kBlock, t.part);
  const uint8_t* const numbers = t.w + meta_size(F, t.k);
  const int64_t end_of_part = (t.part.first + t.part.count) * kBlock;
  const int64_t last = end_of_part < t.k ? end_of_part : t.k;
  __m512 scale[N];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) scale[n] = _mm512_setzero_ps();
  for (int64_t i = t.part.first * kBlock; i < last; ++i) {
    if (i % (kBlock / steps) == 0) next.advance();
    if (F == Format::f8 && i % kBlock == 0) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) scale[n] = f8_scales(t.w + n * t.panel_bytes, i / kBlock);
    }
    __m512 v[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) v[n] = weights<F>(numbers + n * t.panel_bytes, i, scale[n]);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const __m512 xv = broadcast(t.x + m * t.stride + i * 4);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) f[m][n] = _mm512_fmadd_ps(v[n], xv, f[m][n]);
    }
  }
  end(f, t);
}

}  // namespace
}  // namespace ktserve
