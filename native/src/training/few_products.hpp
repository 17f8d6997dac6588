// LoRA's products of a few rows, from the float32 matrices and to the float32 gradients as they lie in memory: no
// panels are made of them. Included by panel_rows.hpp.
#pragma once

#include "simd/math16.hpp"
#include "training/panels.hpp"

namespace ktserve::KT_SIMD {
namespace {

// out[i][j] = <x[i], m[j]> for `Rows` rows and `Ranks` rows of m, all of k values that follow one another.
template <int Rows, int Ranks>
inline __attribute__((always_inline)) void add_dots(const FewDots& a, const float* x, int64_t j, float* out) {
  F16 sums[Rows][Ranks];
#pragma GCC unroll 4
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
    for (int r = 0; r < Ranks; ++r) sums[i][r] = zero16();
  }
  for (int64_t l = 0; l < a.k; l += 16) {
    F16 m[Ranks];
#pragma GCC unroll 4
    for (int r = 0; r < Ranks; ++r) m[r] = load16(a.m + (j + r) * a.stride + l);
#pragma GCC unroll 4
    for (int i = 0; i < Rows; ++i) {
      const F16 v = load16(x + i * a.k + l);
#pragma GCC unroll 4
      for (int r = 0; r < Ranks; ++r) sums[i][r] = fma(m[r], v, sums[i][r]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
    for (int r = 0; r < Ranks; ++r) out[i * a.out_stride + j + r] = sum(sums[i][r]);
  }
}

template <int Rows, int Ranks>
void dots_of_rows(const FewDots& a, const float* x, float* out) {
  int64_t j = 0;
  for (; j + Ranks <= a.rank; j += Ranks) add_dots<Rows, Ranks>(a, x, j, out);
  for (; j < a.rank; ++j) add_dots<Rows, 1>(a, x, j, out);
}

// out[i][j .. j + 16) = sum over l of x[i][l] m[l][j .. j + 16); Chains sums of each, which are added up in the end.
template <int Rows, int Chains>
void sums_of_rows(const FewDots& a, const float* x, float* out) {
  for (int64_t j = 0; j < a.rank; j += 16) {
    F16 sums[Rows][Chains];
#pragma GCC unroll 4
    for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
      for (int c = 0; c < Chains; ++c) sums[i][c] = zero16();
    }
    const auto add_all = [&](auto load) __attribute__((always_inline)) {
      for (int64_t l = 0; l < a.k; l += Chains) {
#pragma GCC unroll 4
        for (int c = 0; c < Chains; ++c) {
          const F16 m = load(a.m + (l + c) * a.stride + j);
#pragma GCC unroll 4
          for (int i = 0; i < Rows; ++i) sums[i][c] = fma(m, set16(x[i * a.k + l + c]), sums[i][c]);
        }
      }
    };
    const int64_t ranks = a.rank - j;
    if (ranks >= 16)
      add_all([](const float* m) __attribute__((always_inline)) { return load16(m); });
    else
      add_all([ranks](const float* m) __attribute__((always_inline)) { return load_some(m, ranks); });
#pragma GCC unroll 4
    for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
      for (int c = 1; c < Chains; ++c) sums[i][0] = add(sums[i][0], sums[i][c]);
      store_some(out + i * a.out_stride + j, sums[i][0], ranks);
    }
  }
}

void few_dots(const FewDots& a) {
  int64_t i = 0;
  const auto rows = [&](int64_t count, auto each) {
    for (; i + count <= a.rows; i += count) each(a.x + i * a.k, a.out + i * a.out_stride);
  };
  if (a.transposed) {
    rows(4, [&](const float* x, float* out) { sums_of_rows<4, 1>(a, x, out); });
    rows(2, [&](const float* x, float* out) { sums_of_rows<2, 2>(a, x, out); });
    rows(1, [&](const float* x, float* out) { sums_of_rows<1, 4>(a, x, out); });
  } else {
    rows(4, [&](const float* x, float* out) { dots_of_rows<4, 1>(a, x, out); });
    rows(2, [&](const float* x, float* out) { dots_of_rows<2, 2>(a, x, out); });
    rows(1, [&](const float* x, float* out) { dots_of_rows<1, 4>(a, x, out); });
  }
}

inline F16 values_at(const RowView& rows, int64_t row, int64_t column, int64_t left) {
  const uint8_t* from = rows.row(row);
  return rows.bf16 ? load_some(reinterpret_cast<const bf16*>(from) + column, left)
                   : load_some(reinterpret_cast<const float*>(from) + column, left);
}

inline __attribute__((always_inline)) void put16(float* to, F16 v, bool streams, bool adds, int64_t left) {
  if (streams)
    stream16(to, v);
  else
    store_some(to, adds ? add(load_some(to, left), v) : v, left);
}

// Count vectors of a row of the gradient, from x's on.
template <int Count>
inline __attribute__((always_inline)) void add_products(const FewGradient& a, const float* u, const float* x,
                                                        int64_t x_stride, float* to, bool streams) {
  F16 sums[Count];
#pragma GCC unroll 4
  for (int q = 0; q < Count; ++q) sums[q] = zero16();
  for (int64_t i = 0; i < a.rows; ++i) {
    const F16 factor = set16(u[i * kFewSumsRank]);
#pragma GCC unroll 4
    for (int q = 0; q < Count; ++q) sums[q] = fma(factor, load16(x + i * x_stride + 16 * q), sums[q]);
  }
#pragma GCC unroll 4
  for (int q = 0; q < Count; ++q) put16(to + 16 * q, sums[q], streams, a.adds, 16);
}

// The same of Count rows of the transposed gradient, 16 of their ranks at most.
template <int Count>
inline __attribute__((always_inline)) void add_transposed(const FewGradient& a, const float* u, const float* x,
                                                          int64_t x_stride, float* to, bool streams, int64_t ranks) {
  F16 sums[Count];
#pragma GCC unroll 4
  for (int q = 0; q < Count; ++q) sums[q] = zero16();
  for (int64_t i = 0; i < a.rows; ++i) {
    const F16 factors = load16(u + i * kFewSumsRank);
#pragma GCC unroll 4
    for (int q = 0; q < Count; ++q) sums[q] = fma(factors, set16(x[i * x_stride + q]), sums[q]);
  }
#pragma GCC unroll 4
  for (int q = 0; q < Count; ++q) put16(to + q * a.rank, sums[q], streams, a.adds, ranks);
}

void few_gradient(const FewGradient& a) {
  constexpr int64_t kColumns = 512;  // 32 KB of float32 at most, which the first-level cache keeps
  alignas(64) float u[kFewGradientRows * kFewSumsRank];
  alignas(64) float x[kFewGradientRows * kColumns];
  for (int64_t i = 0; i < a.rows; ++i) {
    const F16 scale = set16(a.scale == nullptr ? 1.0f : a.scale[i]);
    for (int64_t j = 0; j < a.rank; j += 16) {
      store16(u + i * kFewSumsRank + j, mul(values_at(a.u, i, j, a.rank - j), scale));
    }
  }
  const bool whole = reinterpret_cast<uintptr_t>(a.to) % 64 == 0 && !a.adds;
  const bool streams = whole && (a.transposed ? a.rank % 16 == 0 : a.stride % 16 == 0);
  for (int64_t first = 0; first < a.columns; first += kColumns) {
    const int64_t columns = least(kColumns, a.columns - first);
    for (int64_t i = 0; i < a.rows; ++i) {
      for (int64_t c = 0; c < columns; c += 16) store16(x + i * kColumns + c, values_at(a.x, i, first + c, 16));
    }
    if (a.transposed) {
      for (int64_t c = 0; c < columns; c += 4) {
        float* const to = a.to + (first + c) * a.rank;
        for (int64_t j = 0; j < a.rank; j += 16) {
          add_transposed<4>(a, u + j, x + c, kColumns, to + j, streams, a.rank - j);
        }
      }
      continue;
    }
    for (int64_t j = 0; j < a.rank; ++j) {
      float* const to = a.to + j * a.stride + first;
      int64_t c = 0;
      for (; c + 64 <= columns; c += 64) add_products<4>(a, u + j, x + c, kColumns, to + c, streams);
      for (; c < columns; c += 16) add_products<1>(a, u + j, x + c, kColumns, to + c, streams);
    }
  }
}

}  // namespace
}  // namespace ktserve::KT_SIMD
