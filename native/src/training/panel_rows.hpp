// PanelKernels, written once on sixteen-float vectors; included by panels_avx2.cpp and panels_avx512.cpp behind
// what they give for their instruction set: block_values, and transpose_pairs of bf16 in the packed layout.
#pragma once

#include "simd/math16.hpp"
#include "simd/transpose16.hpp"
#include "training/panels.hpp"

namespace ktserve::KT_SIMD {
namespace {

constexpr int64_t kTransposedBytes = 512;  // of 16 x 16 bf16

// Rows n and n + 1 of a panel as the dot product of bf16 pairs reads them: lane i holds a[i], then b[i].
#if KT_HAS_512
inline __attribute__((always_inline)) __m512i halves(F16 x) {
  return _mm512_cvtepu16_epi32(round_bf16(x));
}
inline __attribute__((always_inline)) void store_pair(uint8_t* to, F16 a, F16 b) {
  _mm512_storeu_si512(to, _mm512_or_si512(halves(a), _mm512_slli_epi32(halves(b), 16)));
}
#else
inline __attribute__((always_inline)) void store_pair(uint8_t* to, F16 a, F16 b) {
  const auto pair = [](__m256 x, __m256 y) {
    return _mm256_or_si256(round_bf16_half(x), _mm256_slli_epi32(round_bf16_half(y), 16));
  };
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), pair(a.a, b.a));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 32), pair(a.b, b.b));
}
#endif

inline float* floats(uint8_t* p) {
  return reinterpret_cast<float*>(p);
}

// Vectors of 16 outputs that follow one another along the sum, from `row` on: to their place in a panel.
inline __attribute__((always_inline)) void store_along(const F16 (&v)[16], Format to, int64_t row, uint8_t* panel) {
  if (to == Format::f32) {
    for (int i = 0; i < 16; ++i) store16(floats(panel + (row + i) * 64), v[i]);
    return;
  }
  for (int i = 0; i < 16; i += 2) store_pair(panel + (row + i) * 32, v[i], v[i + 1]);
}

// Half a block of a panel, 16 outputs by 16 of k, to rows [row, row + 16) of the sum of a panel of the transpose.
template <Format F>
inline __attribute__((always_inline)) void transpose_half(const uint8_t* panel, int64_t k, int64_t b, int half,
                                                          Format to, int64_t row, uint8_t* out) {
  if (F == Format::bf16 && to == Format::bf16) {
    transpose_pairs(panel + b * info(F).quant_bytes + half * kTransposedBytes, out + row * 32);
    return;
  }
  F16 v[16];
  block_values<F>(panel, k, b, half, v);
  if (to == Format::f32) {
    transpose16(v);
    store_along(v, to, row, out);
    return;
  }
  alignas(64) uint8_t pairs[kTransposedBytes];
  for (int i = 0; i < 16; i += 2) store_pair(pairs + i * 32, v[i], v[i + 1]);
  transpose_pairs(pairs, out + row * 32);
}

template <Format F>
void transpose_format(const uint8_t* w, int64_t panels, int64_t k, int64_t first, int64_t count, Format to,
                      uint8_t* out, int64_t out_bytes) {
  constexpr int64_t ahead = 2;  // panels: a few lines of each are read, which no prefetcher of the CPU foresees
  const int64_t size = panel_size(F, k);
  for (int64_t p = 0; p < panels; ++p) {
    const uint8_t* panel = w + p * size;
    for (int64_t b = first / kBlock; b < (first + count) / kBlock; ++b) {
      if (p + ahead < panels) {
        const uint8_t* next = panel + ahead * size + meta_size(F, k) + b * info(F).quant_bytes;
        for (int64_t at = 0; at < info(F).quant_bytes; at += 64) _mm_prefetch(next + at, _MM_HINT_T0);
      }
#pragma GCC unroll 1
      for (int half = 0; half < 2; ++half) {
        transpose_half<F>(panel, k, b, half, to, p * kPanel, out + ((b - first / kBlock) * 2 + half) * out_bytes);
      }
    }
  }
}

void transpose(Format format, const uint8_t* w, int64_t panels, int64_t k, int64_t first, int64_t count, Format to,
               uint8_t* out, int64_t out_bytes) {
  with_format(format,
              [&](auto f) { transpose_format<decltype(f)::value>(w, panels, k, first, count, to, out, out_bytes); });
}

void pack_matrix(const float* rows, int64_t stride, int64_t n, int64_t k, Format to, uint8_t* out) {
  const int64_t size = panel_size(to, k);
  const int64_t padded = padded_k(k);
  for (int64_t p = 0; p < panels_of(n); ++p, out += size) {
    const int64_t count = least(kPanel, n - p * kPanel);
    for (int64_t i = 0; i < padded; i += 16) {
      F16 v[16];
      for (int64_t r = 0; r < 16; ++r) {
        const float* at = rows + (p * kPanel + r) * stride + i;
        v[r] = r < count && i < k ? load_some(at, k - i) : zero16();
      }
      transpose16(v);
      store_along(v, to, i, out);
    }
  }
}

template <class T>
void pack_transpose_of(const RowView& rows, int64_t n, int64_t k, Format to, uint8_t* out) {
  const int64_t size = panel_size(to, k);
  const auto values = [&](int64_t row, int64_t column) __attribute__((always_inline)) {
    const T* at = reinterpret_cast<const T*>(rows.data + row * rows.stride) + column;
    return row < k ? load_some(at, n - column) : zero16();
  };
  for (int64_t row = 0; row < padded_k(k); row += 2) {
    for (int64_t column = 0; column < n; column += kPanel) {
      uint8_t* panel = out + column / kPanel * size;
      const F16 a = values(row, column);
      const F16 b = values(row + 1, column);
      if (to == Format::f32) {
        store16(floats(panel + row * 64), a);
        store16(floats(panel + row * 64 + 64), b);
      } else {
        store_pair(panel + row * 32, a, b);
      }
    }
  }
}

void pack_transpose(const RowView& rows, int64_t n, int64_t k, Format to, uint8_t* out) {
  rows.bf16 ? pack_transpose_of<bf16>(rows, n, k, to, out) : pack_transpose_of<float>(rows, n, k, to, out);
}

template <class T>
void transpose_rows_of(const RowView& rows, int64_t m, int64_t n, const float* scale, Format to, uint8_t* out,
                       int64_t out_bytes) {
  for (int64_t i = 0; i < n; i += 16) {
    for (int64_t j = 0; j < padded_k(m); j += 16) {
      F16 v[16];
      for (int64_t r = 0; r < 16; ++r) {
        const T* at = reinterpret_cast<const T*>(rows.data + (j + r) * rows.stride) + i;
        v[r] = j + r < m ? load_some(at, n - i) : zero16();
        if (scale != nullptr && j + r < m) v[r] = mul(v[r], set16(scale[j + r]));
      }
      transpose16(v);
      for (int64_t r = 0; r < least(16, n - i); ++r) {
        uint8_t* row = out + (i + r) * out_bytes;
        if (to == Format::f32)
          store16(floats(row) + j, v[r]);
        else
          store16(reinterpret_cast<bf16*>(row) + j, v[r]);
      }
    }
  }
}

void transpose_rows(const RowView& rows, int64_t m, int64_t n, const float* scale, Format to, uint8_t* out,
                    int64_t out_bytes) {
  rows.bf16 ? transpose_rows_of<bf16>(rows, m, n, scale, to, out, out_bytes)
            : transpose_rows_of<float>(rows, m, n, scale, to, out, out_bytes);
}

void add_transposed(const float* from, int64_t from_stride, int64_t m, int64_t n, float* to, int64_t to_stride) {
  for (int64_t j = 0; j < n; j += 16) {
    for (int64_t i = 0; i < m; i += 16) {
      F16 v[16];
      for (int64_t r = 0; r < 16; ++r) v[r] = i + r < m ? load_some(from + (i + r) * from_stride + j, n - j) : zero16();
      transpose16(v);
      for (int64_t r = 0; r < least(16, n - j); ++r) {
        float* at = to + (j + r) * to_stride + i;
        store_some(at, ktserve::KT_SIMD::add(load_some(at, m - i), v[r]), m - i);
      }
    }
  }
}

void add_row(const float* from, int64_t n, float* to) {
  by_vectors(n, [&](int64_t i, int64_t left) __attribute__((always_inline)) {
    store_some(to + i, ktserve::KT_SIMD::add(load_some(to + i, left), load_some(from + i, left)), left);
  });
}

template <class From, class To>
float gated(const GatedArgs& a) {
  const From* gate = static_cast<const From*>(a.gate);
  const From* up = static_cast<const From*>(a.up);
  To* const d_gate = reinterpret_cast<To*>(a.d_gate);
  To* const d_up = reinterpret_cast<To*>(a.d_up);
  To* const h = reinterpret_cast<To*>(a.h);
  const F16 one = set16(1.0f);
  const F16 weight = set16(a.weight);
  F16 total = zero16();
  for (int64_t i = 0; i < a.n; i += 16) {
    const F16 g = load16(gate + i);
    const F16 u = load16(up + i);
    const F16 dh = load16(a.dh + i);
    const F16 sigmoid = div(one, ktserve::KT_SIMD::add(one, exp16(sub(zero16(), g))));
    const F16 silu = mul(g, sigmoid);
    const F16 product = mul(silu, u);
    total = fma(dh, product, total);
    const F16 weighted = mul(weight, dh);
    store16(d_up + i, mul(weighted, silu));
    // silu' = sigmoid (1 + g (1 - sigmoid))
    const F16 slope = fma(g, mul(sigmoid, sub(one, sigmoid)), sigmoid);
    store16(d_gate + i, mul(mul(weighted, u), slope));
    if (h != nullptr) store16(h + i, product);
  }
  return sum(total);
}

float gated_backward(const GatedArgs& a) {
  if (a.to == Format::f32) return a.bf16 ? gated<bf16, float>(a) : gated<float, float>(a);
  return a.bf16 ? gated<bf16, bf16>(a) : gated<float, bf16>(a);
}

constexpr PanelKernels panel_table = {transpose,      pack_matrix, pack_transpose, transpose_rows,
                                      add_transposed, add_row,     gated_backward};

}  // namespace
}  // namespace ktserve::KT_SIMD
