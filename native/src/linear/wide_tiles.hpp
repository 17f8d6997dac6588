// The float32 product, written once on sixteen-float vectors. A tile is R rows by N panels:
//
//                panel 0      panel 1         k runs downwards; lane = output, so nothing is summed across lanes
//    x row 0     acc[0][0]    acc[0][1]       for each k: load 16 weights of each panel, broadcast x[r][k]
//    x row 1     acc[1][0]    acc[1][1]
//
// One chain of additions per output, in the order of k, whatever R and N are.
#pragma once

#include "linear/wide_kernels.hpp"
#include "ops/simd16.hpp"

namespace ktserve::KT_SIMD {

#if KT_HAS_512
constexpr int kWideRows = 8;
#else
constexpr int kWideRows = 4;
#endif

template <int R, int N>
void wide_tile(const WideDot& d, int64_t row, int64_t panel) {
  F16 acc[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) acc[r][n] = zero16();
  const float* w = d.w + panel * d.k * 16;
  const float* x = d.x + row * d.x_stride;
  for (int64_t k = 0; k < d.k; ++k) {
    F16 weights[N];
    for (int n = 0; n < N; ++n) weights[n] = load16(w + (n * d.k + k) * 16);
    for (int r = 0; r < R; ++r) {
      const F16 value = set16(x[r * d.x_stride + k]);
      for (int n = 0; n < N; ++n) acc[r][n] = fma(weights[n], value, acc[r][n]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store16(d.out + (row + r) * d.out_stride + (panel + n) * 16, acc[r][n]);
}

inline void wide_rows(const WideDot& d, int64_t panel) {
  int64_t row = 0;
  for (; row + kWideRows <= d.rows; row += kWideRows) wide_tile<kWideRows, 1>(d, row, panel);
  for (; row + 2 <= d.rows; row += 2) wide_tile<2, 1>(d, row, panel);
  if (row < d.rows) wide_tile<1, 1>(d, row, panel);
}

inline void wide_dot(const WideDot& d) {
  int64_t panel = 0;
  if (d.rows == 1)  // several panels hide the latency of one row's chains
    for (; panel + 4 <= d.panels; panel += 4) wide_tile<1, 4>(d, 0, panel);
  for (; panel < d.panels; ++panel) wide_rows(d, panel);
}

inline void wide_lora_b(const float* b, int64_t panels, int64_t rank, const float* t, float* out) {
  for (int64_t p = 0; p < panels; ++p, out += 16) {
    F16 acc = load16(out);
    for (int64_t r = 0; r < rank; ++r, b += 16) acc = fma(load16(b), set16(t[r]), acc);
    store16(out, acc);
  }
}

template <class T>
void wide_store(const float* x, const float* bias, int64_t n, void* out) {
  T* to = static_cast<T*>(out);
  for (int64_t i = 0; i < n; i += 16) {
    const int left = static_cast<int>(least(16, n - i));
    F16 v = left == 16 ? load16(x + i) : load_part(x + i, left);
    if (bias != nullptr) v = add(v, left == 16 ? load16(bias + i) : load_part(bias + i, left));
    if (left == 16)
      store16(to + i, v);
    else
      store_part(to + i, v, left);
  }
}

constexpr WideKernels kWide = {wide_dot, wide_lora_b, wide_store<float>, wide_store<bf16>};

}  // namespace ktserve::KT_SIMD
