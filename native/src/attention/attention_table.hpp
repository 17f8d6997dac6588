// What one instruction set gives to attention.cpp; included by attention_avx2.cpp and attention_avx512.cpp.
#pragma once

#include "attention/attention_wide.hpp"

namespace ktserve::KT_SIMD {

inline float exp2_one(float x) {
  float y[16];
  store16(y, exp2_16(set16(x)));
  return y[0];
}

inline void merge_row(float* top, float* total, float* sums, float top2, float total2, const float* sums2, int dim) {
  const float highest = top2 > *top ? top2 : *top;
  const float old_factor = exp2_one(*top - highest), new_factor = exp2_one(top2 - highest);
  const F16 f = set16(old_factor), g = set16(new_factor);
  for (int d = 0; d < dim; d += 16) store16(sums + d, fma(load16(sums + d), f, mul(load16(sums2 + d), g)));
  *total = *total * old_factor + total2 * new_factor;
  *top = highest;
}

template <class T>
void finish_row(void* out, const float* sums, float total, int dim) {
  const F16 t = set16(total);
  for (int d = 0; d < dim; d += 16) store16(static_cast<T*>(out) + d, div(load16(sums + d), t));
}

inline void to_bf16(const float* from, uint16_t* to, int dim) {
  convert(from, dim, reinterpret_cast<bf16*>(to));
}

using Chunk = void (*)(const ChunkWork&);

// `bf16_products`: what the first two chunks multiply.
constexpr AttentionKernels attention_table(bool bf16_products, Chunk of_bf16, Chunk mixed, Chunk int8,
                                           Chunk int8_float) {
  return {bf16_products,
          of_bf16,
          attend_chunk<false, float, float>,
          mixed,
          merge_row,
          finish_row<bf16>,
          finish_row<float>,
          to_bf16,
          quantise<bf16>,
          quantise<float>,
          expand_keys,
          expand_values,
          int8,
          int8_float};
}

}  // namespace ktserve::KT_SIMD
