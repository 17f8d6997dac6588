// Small products of float32, c = scale c + a b, on matrices that stay in a core's caches. Included as simd16.hpp is.
//
//   b's rows are read as vectors, a's values are broadcast; kRows rows x kColumns vectors of c are held in registers.
#pragma once

#include "simd/math16.hpp"

namespace ktserve::KT_SIMD {

#if KT_HAS_512
constexpr int kProductRows = 4, kProductColumns = 4;  // 16 accumulators of 32 registers
#else
constexpr int kProductRows = 4, kProductColumns = 1;  // 8 accumulators of 16 registers
#endif

// Rows [rows, columns], `columns` a multiple of 16.
struct Matrix {
  float* at;
  int64_t stride;
};

// What c is multiplied by first: nothing is read of it, it stays, or each row has a factor.
enum class Before { zero, kept, scaled };

template <Before before, int R, int N>
inline void product_tile(Matrix c, const float* scale, const float* a, int64_t a_stride, const float* b,
                         int64_t b_stride, int64_t depth) {
  F16 sums[R][N];
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) {
      if constexpr (before == Before::zero) {
        sums[r][n] = zero16();
      } else {
        sums[r][n] = load16(c.at + r * c.stride + n * 16);
        if constexpr (before == Before::scaled) sums[r][n] = mul(sums[r][n], set16(scale[r]));
      }
    }
  }
  for (int64_t i = 0; i < depth; ++i) {
    F16 row[N];
    for (int n = 0; n < N; ++n) row[n] = load16(b + i * b_stride + n * 16);
    for (int r = 0; r < R; ++r) {
      const F16 x = set16(a[r * a_stride + i]);
      for (int n = 0; n < N; ++n) sums[r][n] = fma(row[n], x, sums[r][n]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store16(c.at + r * c.stride + n * 16, sums[r][n]);
}

template <Before before, int N>
inline void product_columns(Matrix c, const float* scale, const float* a, int64_t a_stride, const float* b,
                            int64_t b_stride, int64_t rows, int64_t depth) {
  int64_t r = 0;
  const auto tile = [&]<int R>() {
    product_tile<before, R, N>({c.at + r * c.stride, c.stride}, scale + r, a + r * a_stride, a_stride, b, b_stride,
                               depth);
    r += R;
  };
  while (r + kProductRows <= rows) tile.template operator()<kProductRows>();
  while (r < rows) tile.template operator()<1>();
}

// c [rows, columns] from a [rows, depth] and b [depth, columns]; `scale`: of each row, where c is scaled.
template <Before before>
inline void product(Matrix c, const float* scale, Matrix a, Matrix b, int64_t rows, int64_t columns, int64_t depth) {
  int64_t at = 0;
  for (; at + 16 * kProductColumns <= columns; at += 16 * kProductColumns)
    product_columns<before, kProductColumns>({c.at + at, c.stride}, scale, a.at, a.stride, b.at + at, b.stride, rows,
                                             depth);
  for (; at < columns; at += 16)
    product_columns<before, 1>({c.at + at, c.stride}, scale, a.at, a.stride, b.at + at, b.stride, rows, depth);
}

}  // namespace ktserve::KT_SIMD
