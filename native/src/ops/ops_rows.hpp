// The row operations, written once on sixteen-float vectors; included by ops_avx2.cpp and ops_avx512.cpp.
// Everything is computed in float32 and rounded once, when it is stored. A row is read twice at most:
//
//   norm           x (+ residual) -> [ . . . . ] 4 sums of squares -> 1/rms -> x * rms * weight
//   rotate         a head's values alone, halves or neighbours together
//   q, k heads     [ first half | second half | rest ] -> 1/rms -> (a cos - b sin | b cos + a sin | rest), NeoX style
//
// Tails shorter than a vector are masked loads and stores of the same code.
#pragma once

#include "ops/ops_kernels.hpp"
#include "simd/math16.hpp"

namespace ktserve::KT_SIMD {

inline F16 load_weight(const void* weight, bool is_bf16, int64_t i, int64_t left) {
  if (is_bf16) return load_some(static_cast<const bf16*>(weight) + i, left);
  return load_some(static_cast<const float*>(weight) + i, left);
}

inline float inverse_rms(float squares, int64_t dim, float eps) {
  return 1.0f / __builtin_sqrtf(squares / static_cast<float>(dim) + eps);
}

template <class T>
void norm_rows(const Norm& n, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(n.x) + row * n.x_stride;
    T* out = static_cast<T*>(n.out) + row * n.out_stride;
    T* residual = n.residual == nullptr ? nullptr : static_cast<T*>(n.residual) + row * n.residual_stride;
    F16 squares[4] = {zero16(), zero16(), zero16(), zero16()};
    for (int64_t i = 0; i < n.dim; i += 16) {
      F16 v = load_some(x + i, n.dim - i);
      if (residual != nullptr) {
        store_some(residual + i, add(load_some(residual + i, n.dim - i), v), n.dim - i);
        v = load_some(residual + i, n.dim - i);
      }
      squares[i / 16 % 4] = fma(v, v, squares[i / 16 % 4]);
    }
    const float total = sum(add(add(squares[0], squares[1]), add(squares[2], squares[3])));
    const F16 scale = set16(inverse_rms(total, n.dim, n.eps));
    const T* source = residual != nullptr ? residual : x;
    for (int64_t i = 0; i < n.dim; i += 16) {
      const F16 v = mul(load_some(source + i, n.dim - i), scale);
      store_some(out + i, mul(v, load_weight(n.weight, n.weight_bf16, i, n.dim - i)), n.dim - i);
    }
  }
}

// Elements i and half + i of a head, which are a and b before.
template <class T>
inline void rotate(T* head, int half, int i, F16 a, F16 b, const float* cos, const float* sin) {
  const int left = half - i;
  const F16 c = load_some(cos + i, left);
  const F16 s = load_some(sin + i, left);
  store_some(head + i, fnma(b, s, mul(a, c)), left);
  store_some(head + half + i, fma(a, s, mul(b, c)), left);
}

template <class T>
inline void rope_head(const QkNormRope& r, T* head, const void* weight, const float* cos, const float* sin) {
  const int half = r.rotary_dim / 2;
  if (weight == nullptr) {
    for (int i = 0; i < half; i += 16)
      rotate(head, half, i, load_some(head + i, half - i), load_some(head + half + i, half - i), cos, sin);
    return;
  }
  F16 squares = zero16();
  for (int i = 0; i < half; i += 16) {
    const F16 a = load_some(head + i, half - i);
    const F16 b = load_some(head + half + i, half - i);
    squares = fma(a, a, squares);
    squares = fma(b, b, squares);
  }
  for (int i = r.rotary_dim; i < r.head_dim; i += 16) {
    const F16 rest = load_some(head + i, r.head_dim - i);
    squares = fma(rest, rest, squares);
  }
  const F16 scale = set16(inverse_rms(sum(squares), r.head_dim, r.eps));
  for (int i = 0; i < half; i += 16) {
    const int left = half - i;
    const F16 a = mul(mul(load_some(head + i, left), scale), load_weight(weight, r.weight_bf16, i, left));
    const F16 b = mul(mul(load_some(head + half + i, left), scale), load_weight(weight, r.weight_bf16, half + i, left));
    rotate(head, half, i, a, b, cos, sin);
  }
  for (int i = r.rotary_dim; i < r.head_dim; i += 16) {
    const int left = r.head_dim - i;
    const F16 rest = mul(mul(load_some(head + i, left), scale), load_weight(weight, r.weight_bf16, i, left));
    store_some(head + i, rest, left);
  }
}

template <class T>
void qk_norm_rope_rows(const QkNormRope& r, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    const int64_t entry = r.positions[t] * (r.rotary_dim / 2);
    T* q = static_cast<T*>(r.q) + t * r.q_stride;
    T* k = static_cast<T*>(r.k) + t * r.k_stride;
    for (int h = 0; h < r.heads; ++h) rope_head(r, q + h * r.head_dim, r.q_weight, r.cos + entry, r.sin + entry);
    for (int h = 0; h < r.kv_heads; ++h) rope_head(r, k + h * r.head_dim, r.k_weight, r.cos + entry, r.sin + entry);
  }
}

template <class T>
void silu_mul_rows(const SiluMul& s, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = static_cast<const T*>(s.gate) + row * s.gate_stride;
    const T* up = static_cast<const T*>(s.up) + row * s.up_stride;
    T* out = static_cast<T*>(s.out) + row * s.out_stride;
    for (int64_t i = 0; i < s.dim; i += 16) {
      const int64_t left = s.dim - i;
      store_some(out + i, mul(silu16(load_some(gate + i, left)), load_some(up + i, left)), left);
    }
  }
}

template <class T>
void add_gated_rows(const AddGated& g, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(g.x) + row * g.x_stride;
    const T* base = static_cast<const T*>(g.base) + row * g.base_stride;
    T* out = static_cast<T*>(g.out) + row * g.out_stride;
    const F16 gate = g.gate == nullptr ? set16(1.0f) : sigmoid16(set16(g.gate[row]));
    for (int64_t i = 0; i < g.dim; i += 16) {
      const int64_t left = g.dim - i;
      store_some(out + i, fma(load_some(x + i, left), gate, load_some(base + i, left)), left);
    }
  }
}

template <class T>
void gate_heads_rows(const GateHeads& g, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    for (int64_t h = 0; h < g.heads; ++h) {
      const T* gate = static_cast<const T*>(g.gate) + token * g.gate_stride + h * g.gate_head_stride;
      T* x = static_cast<T*>(g.x) + token * g.x_stride + h * g.dim;
      for (int64_t i = 0; i < g.dim; i += 16) {
        const int64_t left = g.dim - i;
        store_some(x + i, mul(load_some(x + i, left), sigmoid16(load_some(gate + i, left))), left);
      }
    }
  }
}

template <class T>
void softmax_row(const void* x, float* out, int64_t n) {
  const T* in = static_cast<const T*>(x);
  constexpr float nothing = -__builtin_inff();
  F16 highest = set16(nothing);
  for (int64_t i = 0; i < n; i += 16)
    highest = max(highest, n - i >= 16 ? load16(in + i) : load_part(in + i, static_cast<int>(n - i), nothing));
  const F16 top = set16(largest(highest));
  F16 total = zero16();
  for (int64_t i = 0; i < n; i += 16) {
    const F16 v = n - i >= 16 ? load16(in + i) : load_part(in + i, static_cast<int>(n - i), nothing);
    const F16 p = exp16(sub(v, top));
    store_some(out + i, p, n - i);
    total = add(total, p);
  }
  const F16 divisor = set16(sum(total));
  for (int64_t i = 0; i < n; i += 16) store_some(out + i, div(load_some(out + i, n - i), divisor), n - i);
}

template <class T>
void sigmoid_row(const void* x, float* out, int64_t n) {
  const T* in = static_cast<const T*>(x);
  for (int64_t i = 0; i < n; i += 16) store_some(out + i, sigmoid16(load_some(in + i, n - i)), n - i);
}

// The row is read in chunks for its largest value; only the first chunk that has it is looked through for the place.
template <class T>
int64_t largest_place(const void* x, int64_t n) {
  constexpr int64_t kChunk = 4096;
  constexpr float nothing = -__builtin_inff();
  const T* in = static_cast<const T*>(x);
  float best = nothing;
  int64_t from = 0;
  for (int64_t begin = 0; begin < n; begin += kChunk) {
    const int64_t end = least(n, begin + kChunk);
    F16 highest = set16(nothing);
    bool nan = false;
    for (int64_t i = begin; i < end; i += 16) {
      const F16 v = end - i >= 16 ? load16(in + i) : load_part(in + i, static_cast<int>(end - i), nothing);
      nan |= has_nan(v);
      highest = max(v, highest);
    }
    if (nan || largest(highest) > best) {
      best = nan ? __builtin_nanf("") : largest(highest);
      from = begin;
    }
    if (nan) break;
  }
  int64_t place = from;
  for (float v = to_float(in[place]); v != best && v == v; v = to_float(in[place])) ++place;
  return place;
}

template <class T>
void rotate_rows(const Rotate& r, int64_t begin, int64_t end) {
  const int half = r.dim / 2;
  float head[kMaxRotary], turned[kMaxRotary];
  for (int64_t token = begin; token < end; ++token) {
    const float* cos = r.cos + r.positions[token] * half;
    const float* sin = r.sin + r.positions[token] * half;
    for (int64_t h = 0; h < r.heads; ++h) {
      convert(static_cast<const T*>(r.x) + token * r.x_stride + h * r.x_head_stride, r.dim, head);
      for (int i = 0; i < half; ++i) {
        const float a = r.interleaved ? head[2 * i] : head[i];
        const float b = r.interleaved ? head[2 * i + 1] : head[half + i];
        turned[i] = a * cos[i] - b * sin[i];
        turned[half + i] = b * cos[i] + a * sin[i];
      }
      convert(turned, r.dim, static_cast<T*>(r.out) + token * r.out_stride + h * r.out_head_stride);
    }
  }
}

constexpr OpsKernels kOps = {
    {norm_rows<float>, norm_rows<bf16>},           {qk_norm_rope_rows<float>, qk_norm_rope_rows<bf16>},
    {rotate_rows<float>, rotate_rows<bf16>},       {silu_mul_rows<float>, silu_mul_rows<bf16>},
    {add_gated_rows<float>, add_gated_rows<bf16>}, {gate_heads_rows<float>, gate_heads_rows<bf16>},
    {softmax_row<float>, softmax_row<bf16>},       {sigmoid_row<float>, sigmoid_row<bf16>},
    {largest_place<float>, largest_place<bf16>}};

}  // namespace ktserve::KT_SIMD
