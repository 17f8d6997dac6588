// What one instruction set gives to attention.cpp; included by attention_avx2.cpp and attention_avx512.cpp.
#pragma once

#include "attention/attention_int16.hpp"

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
using Expand = void (*)(const int8_t* tile, int count, uint16_t* to, int head_dim);

constexpr AttentionKernels attention_table(Chunk of_bf16, Chunk mixed, Chunk of_int16, Chunk int16_mixed, Expand keys,
                                           Expand values) {
  return {attend_chunk<float, float>,
          of_bf16,
          mixed,
          of_int16,
          int16_mixed,
          merge_row,
          finish_row<bf16>,
          finish_row<float>,
          to_bf16,
          quantise<bf16>,
          quantise<float>,
          keys,
          values,
          int16_keys,
          int16_values,
          int16_of_int8,
          kRows};
}

}  // namespace ktserve::KT_SIMD
