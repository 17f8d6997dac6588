// Products in float32 throughout: routers, float32 models and their adapters. Panels of [k][16 outputs] floats.
#pragma once

#include <cstdint>

namespace ktserve {

// out[r][16 p + i] = sum_k w[p][k][i] x[r][k]
struct WideDot {
  const float* w;
  int64_t panels;
  int64_t k;
  const float* x;
  int64_t x_stride;  // floats from row to row
  int64_t rows;
  float* out;
  int64_t out_stride;
};

struct WideKernels {
  void (*dot)(const WideDot&);
  // out[16 p + i] += sum_r b[p][r][i] t[r]
  void (*lora_b)(const float* b, int64_t panels, int64_t rank, const float* t, float* out);
  // out[i] = x[i] + bias[i] (bias may be null), rounded once.
  void (*store_float)(const float* x, const float* bias, int64_t n, void* out);
  void (*store_bf16)(const float* x, const float* bias, int64_t n, void* out);
};

extern const WideKernels kWideAvx2;
extern const WideKernels kWideAvx512;

}  // namespace ktserve
