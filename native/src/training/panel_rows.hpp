// PanelKernels, written once on sixteen-float vectors; included by panels_avx2.cpp and panels_avx512.cpp behind
// what they give for their instruction set: kFetched, the cache to which weights are fetched before they are turned,
// and kAheadBytes, how many of them; block_values; store_pair of floats and of bf16, as the dot product of pairs reads
// two rows of a panel: lane i holds a[i], then b[i]; transpose_pairs of bf16 in the packed layout; store_turned.
#pragma once

#include "simd/math16.hpp"
#include "simd/transpose16.hpp"
#include "training/few_products.hpp"
#include "training/panels.hpp"

namespace ktserve::KT_SIMD {
namespace {

constexpr int64_t kTurnedBytes = 512;  // of 16 x 16 bf16
constexpr int64_t kFetchedRows = 8;    // parts of rows are short runs of memory, and are fetched so far ahead

inline float* floats(uint8_t* p) {
  return reinterpret_cast<float*>(p);
}

// Sixteen rows of sixteen values that follow one another along the sum, from `at` on: to their place in a panel of
// these rows.
inline __attribute__((always_inline)) void store_rows(F16 (&v)[16], Format to, int64_t at, uint8_t* panel) {
  if (to == Format::bf16) return store_turned(v, panel + at * 32);
  transpose16(v);
  for (int i = 0; i < 16; ++i) store16(floats(panel + (at + i) * 64), v[i]);
}

// Half a block of a panel, 16 outputs by 16 of k, to rows [row, row + 16) of the sum of a panel of the transpose.
template <Format F>
inline __attribute__((always_inline)) void transpose_half(const uint8_t* panel, int64_t k, int64_t b, int half,
                                                          Format to, int64_t row, uint8_t* out) {
  if (F == Format::bf16 && to == Format::bf16) {
    transpose_pairs(panel + b * info(F).quant_bytes + half * kTurnedBytes, out + row * 32);
    return;
  }
  F16 v[16];
  block_values<F>(panel, k, b, half, v);
  store_rows(v, to, row, out);
}

inline void fetch(const uint8_t* from, int64_t bytes) {
  const uint8_t* const end = from + bytes;
  for (from -= reinterpret_cast<uintptr_t>(from) % 64; from < end; from += 64) _mm_prefetch(from, kFetched);
}

// What a panel has of columns [first, first + count): scales and quants.
template <Format F>
inline void fetch_columns(const uint8_t* panel, int64_t k, int64_t first, int64_t count) {
  constexpr int64_t unit = info(F).unit;
  const int64_t units = (first + count + unit - 1) / unit - first / unit;
  fetch(panel + first / unit * info(F).meta_bytes, units * info(F).meta_bytes);
  fetch(panel + meta_size(F, k) + first / kBlock * info(F).quant_bytes, count / kBlock * info(F).quant_bytes);
}

// Each panel is read once, all columns of it, while those behind it are fetched: the runs are too short for the
// prefetchers of a CPU.
template <Format F>
void transpose_format(const uint8_t* w, int64_t panels, int64_t k, int64_t first, int64_t count, Format to,
                      uint8_t* out, int64_t out_bytes, const NextColumns& next) {
  const int64_t size = panel_size(F, k);
  const int64_t blocks = count / kBlock;
  const int64_t ahead = (kAheadBytes + blocks * info(F).quant_bytes - 1) / (blocks * info(F).quant_bytes);
  for (int64_t p = 0; p < least(ahead, panels); ++p) fetch_columns<F>(w + p * size, k, first, count);
  for (int64_t p = 0; p < panels; ++p) {
    const uint8_t* panel = w + p * size;
    if (p + ahead < panels)
      fetch_columns<F>(panel + ahead * size, k, first, count);
    else if (next.w != nullptr)
      fetch_columns<F>(next.w + (p + ahead - panels) * panel_size(F, next.k), next.k, next.first, count);
    for (int64_t b = 0; b < blocks; ++b) {
#pragma GCC unroll 1
      for (int half = 0; half < 2; ++half) {
        transpose_half<F>(panel, k, first / kBlock + b, half, to, p * kPanel, out + (2 * b + half) * out_bytes);
      }
    }
  }
}

void transpose(Format format, const uint8_t* w, int64_t panels, int64_t k, int64_t first, int64_t count, Format to,
               uint8_t* out, int64_t out_bytes, const NextColumns& next) {
  with_format(format, [&](auto f) {
    transpose_format<decltype(f)::value>(w, panels, k, first, count, to, out, out_bytes, next);
  });
}

void pack_matrix(const float* rows, int64_t stride, int64_t n, int64_t k, Format to, uint8_t* out) {
  const int64_t size = panel_size(to, k);
  const int64_t each = to == Format::f32 ? 64 : 32;  // bytes of a panel for one of k
  for (int64_t p = 0; p < panels_of(n); ++p, out += size) {
    const int64_t count = least(kPanel, n - p * kPanel);
    for (int64_t i = 0; i < k; i += 16) {
      F16 v[16];
      for (int64_t r = 0; r < 16; ++r) {
        v[r] = r < count ? load_some(rows + (p * kPanel + r) * stride + i, k - i) : zero16();
      }
      store_rows(v, to, i, out);
    }
    const int64_t end = round_up(k, 16) * each;
    if (end < size) std::memset(out + end, 0, static_cast<size_t>(size - end));
  }
}

template <class T>
void pack_transpose_of(const RowView& rows, int64_t n, int64_t k, Format to, uint8_t* out) {
  const int64_t size = panel_size(to, k);
  alignas(64) static constexpr uint8_t zeros[32] = {};
  const auto at = [&](int64_t row) { return row < k ? reinterpret_cast<const T*>(rows.row(row)) : nullptr; };
  const auto values = [&](const T* row, int64_t column) __attribute__((always_inline)) {
    return row != nullptr ? load_some(row + column, n - column) : zero16();
  };
  const auto fetch_row = [&](int64_t row) {
    if (row < k) fetch(rows.row(row), n * static_cast<int64_t>(sizeof(T)));
  };
  for (int64_t row = 0; row < kFetchedRows; ++row) fetch_row(row);
  for (int64_t row = 0; row < padded_k(k); row += 2) {
    fetch_row(row + kFetchedRows);
    fetch_row(row + kFetchedRows + 1);
    const T* const even = at(row);
    const T* const odd = at(row + 1);
    for (int64_t column = 0; column < n; column += kPanel) {
      uint8_t* panel = out + column / kPanel * size;
      if (to == Format::f32) {
        store16(floats(panel + row * 64), values(even, column));
        store16(floats(panel + row * 64 + 64), values(odd, column));
        continue;
      }
      if constexpr (sizeof(T) == 2) {
        if (n - column >= kPanel) {
          const auto* none = reinterpret_cast<const T*>(zeros);
          store_pair(panel + row * 32, even != nullptr ? even + column : none, odd != nullptr ? odd + column : none);
          continue;
        }
      }
      store_pair(panel + row * 32, values(even, column), values(odd, column));
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
        v[r] = j + r < m ? load_some(reinterpret_cast<const T*>(rows.row(j + r)) + i, n - i) : zero16();
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

// A line that nobody reads soon goes past the caches, which would read it from memory first.
inline __attribute__((always_inline)) bool whole_lines(const float* to, int64_t n) {
  return n % 16 == 0 && reinterpret_cast<uintptr_t>(to) % 64 == 0;
}

void put_transposed(const float* from, int64_t from_stride, int64_t m, int64_t n, float* to, bool adds) {
  const bool streams = !adds && whole_lines(to, m);
  for (int64_t j = 0; j < n; j += 16) {
    for (int64_t i = 0; i < m; i += 16) {
      F16 v[16];
      for (int64_t r = 0; r < 16; ++r) v[r] = i + r < m ? load_some(from + (i + r) * from_stride + j, n - j) : zero16();
      transpose16(v);
      for (int64_t r = 0; r < least(16, n - j); ++r) {
        float* at = to + (j + r) * m + i;
        if (streams)
          stream16(at, v[r]);
        else
          store_some(at, adds ? add(load_some(at, m - i), v[r]) : v[r], m - i);
      }
    }
  }
}

void put_row(const float* from, int64_t n, float* to, bool adds) {
  if (!adds && whole_lines(to, n)) {
    for (int64_t i = 0; i < n; i += 16) stream16(to + i, load16(from + i));
    return;
  }
  by_vectors(n, [&](int64_t i, int64_t left) __attribute__((always_inline)) {
    const F16 v = load_some(from + i, left);
    store_some(to + i, adds ? add(load_some(to + i, left), v) : v, left);
  });
}

// h = soft * factor, and its slopes: soft's by gate is `slope`, h's by up is `by_up`.
struct Gated {
  F16 soft, factor, slope, by_up;
};

template <bool Clamped>
inline __attribute__((always_inline)) Gated gated_parts(const Activation& by, F16 gate, F16 up) {
  const F16 one = set16(1.0f);
  if constexpr (Clamped) {
    const F16 most = set16(by.limit), lowest = set16(-by.limit), alpha = set16(by.alpha);
    const F16 g = min(most, gate);
    const F16 steep = mul(alpha, g);
    const F16 sigmoid = div(one, add(one, exp16(sub(zero16(), steep))));
    const F16 soft = mul(g, sigmoid);
    const F16 slope = fma(steep, mul(sigmoid, sub(one, sigmoid)), sigmoid);
    return {soft, add(max(lowest, min(most, up)), one), where_most(gate, most, slope),
            where_most(lowest, up, where_most(up, most, soft))};
  } else {
    const F16 sigmoid = div(one, add(one, exp16(sub(zero16(), gate))));
    const F16 silu = mul(gate, sigmoid);
    // silu' = sigmoid (1 + g (1 - sigmoid))
    return {silu, up, fma(gate, mul(sigmoid, sub(one, sigmoid)), sigmoid), silu};
  }
}

template <class From, class To, bool Clamped>
float gated(const GatedArgs& a) {
  const From* gate = static_cast<const From*>(a.gate);
  const From* up = static_cast<const From*>(a.up);
  To* const d_gate = reinterpret_cast<To*>(a.d_gate);
  To* const d_up = reinterpret_cast<To*>(a.d_up);
  To* const h = reinterpret_cast<To*>(a.h);
  const F16 weight = set16(a.weight);
  F16 total = zero16();
  for (int64_t i = 0; i < a.n; i += 16) {
    const Gated parts = gated_parts<Clamped>(a.activation, load16(gate + i), load16(up + i));
    const F16 dh = load16(a.dh + i);
    const F16 product = mul(parts.soft, parts.factor);
    total = fma(dh, product, total);
    const F16 weighted = mul(weight, dh);
    store16(d_up + i, mul(weighted, parts.by_up));
    store16(d_gate + i, mul(mul(weighted, parts.factor), parts.slope));
    if (h != nullptr) store16(h + i, product);
  }
  return sum(total);
}

template <class From, class To>
float gated_by(const GatedArgs& a) {
  return a.activation.clamped() ? gated<From, To, true>(a) : gated<From, To, false>(a);
}

float gated_backward(const GatedArgs& a) {
  if (a.to == Format::f32) return a.bf16 ? gated_by<bf16, float>(a) : gated_by<float, float>(a);
  return a.bf16 ? gated_by<bf16, bf16>(a) : gated_by<float, bf16>(a);
}

// 16 columns of some rows: += the sums over 16 ranks.
template <int Rows>
inline __attribute__((always_inline)) void add_sums(const F16 (&m)[16], const float* x, float* out, int64_t stride) {
  F16 sums[Rows];
#pragma GCC unroll 4
  for (int i = 0; i < Rows; ++i) sums[i] = load16(out + i * stride);
#pragma GCC unroll 16
  for (int l = 0; l < 16; ++l) {
#pragma GCC unroll 4
    for (int i = 0; i < Rows; ++i) sums[i] = fma(m[l], set16(x[i * kFewSumsRank + l]), sums[i]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < Rows; ++i) store16(out + i * stride, sums[i]);
}

void few_sums(const FewSums& a) {
  float x[kFewSumsRows * kFewSumsRank];
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t l = 0; l < a.rank; l += 16) {
      const uint8_t* row = a.x.data + i * a.x.stride;
      const F16 values = a.x.bf16 ? load_some(reinterpret_cast<const bf16*>(row) + l, a.rank - l)
                                  : load_some(reinterpret_cast<const float*>(row) + l, a.rank - l);
      store16(x + i * kFewSumsRank + l, values);
    }
  }
  for (int64_t j = 0; j < a.n; j += 16) {
    for (int64_t l = 0; l < a.rank; l += 16) {
      const int64_t ranks = least(16, a.rank - l);
      F16 m[16];
      if (a.transposed) {
        for (int64_t i = 0; i < 16; ++i) m[i] = load_some(a.m + (j + i) * a.stride + l, ranks);
        transpose16(m);
      } else {
        for (int64_t i = 0; i < 16; ++i) m[i] = i < ranks ? load16(a.m + (l + i) * a.stride + j) : zero16();
      }
      int64_t i = 0;
      for (; i + 4 <= a.rows; i += 4) {
        add_sums<4>(m, x + i * kFewSumsRank + l, a.out + i * a.out_stride + j, a.out_stride);
      }
      const float* rest = x + i * kFewSumsRank + l;
      float* out = a.out + i * a.out_stride + j;
      switch (a.rows - i) {
        case 1:
          add_sums<1>(m, rest, out, a.out_stride);
          break;
        case 2:
          add_sums<2>(m, rest, out, a.out_stride);
          break;
        case 3:
          add_sums<3>(m, rest, out, a.out_stride);
          break;
        default:
          break;
      }
    }
  }
}

constexpr PanelKernels panel_table = {transpose, pack_matrix,    pack_transpose, transpose_rows, put_transposed,
                                      put_row,   gated_backward, few_sums,       few_dots,       few_gradient,
                                      0,         nullptr};

}  // namespace
}  // namespace ktserve::KT_SIMD
