// The gated delta rule for one head of keys and its value heads, written once on sixteen-float vectors; included by
// delta_avx2.cpp and delta_avx512.cpp. Everything is float32 but what comes in and goes out.
//
//   inputs of a chunk   raw  [ kernel - 1 before | n positions ] x [ q | k | v of each head ]
//        convolution    x    [ n ] x [ q / |q| sqrt(key_dim) | k / |k| | v .. ]
//   one position        two passes over S, in strips of columns that stay in the first cache
//   a chunk             with G the sum of decays since its beginning, what position i writes is
//                         u_i = rate_i (v_i - exp(G_i) k_i.S) - sum over j < i of rate_i exp(G_i - G_j) (k_i.k_j) u_j
//                       solved in blocks of 16 positions; then out_i = exp(G_i) q_i.S + sum over j <= i of
//                       exp(G_i - G_j) (q_i.k_j) u_j, and S = exp(G_n) S + sum of exp(G_n - G_j) k_j u_j^T
//   out                 norm(out) silu(z)
#pragma once

#include "delta/delta_kernels.hpp"
#include "delta/delta_products.hpp"
#include "simd/transpose16.hpp"

namespace ktserve::KT_SIMD {

constexpr int64_t kDeltaStride = kDeltaChunk + 16;  // of rows over positions; no power of two, for the caches' sets
constexpr float kUnitEps = 1e-6f;                   // beside the squares of a query or key

struct DeltaScratch {
  int64_t width;  // of q, k and the values of all heads
  Matrix raw, x;
  Matrix keys;             // transposed [key_dim][positions]
  Matrix kk, qk;           // products of keys with keys, of queries with keys
  Matrix system, weights;  // of a head: the system less its diagonal, negated; what outputs take of what is written
  Matrix written, out;     // [positions][value_dim]
  float *sums, *grown, *left, *rate, *decay;  // [positions]
  int64_t floats = 0;

  explicit DeltaScratch(const DeltaWork& w) : width(2 * w.key_dim + w.heads * w.value_dim) {
    const auto take = [&](int64_t rows, int64_t stride) {
      const Matrix made{w.scratch == nullptr ? nullptr : w.scratch + floats, stride};
      floats += (rows * stride + 15) / 16 * 16;
      return made;
    };
    raw = take(kDeltaChunk + w.kernel - 1, width);
    x = take(kDeltaChunk, width);
    keys = take(w.key_dim, kDeltaStride);
    Matrix* const by_positions[] = {&kk, &qk, &system, &weights};
    for (Matrix* m : by_positions) *m = take(kDeltaChunk, kDeltaStride);
    Matrix* const by_values[] = {&written, &out};
    for (Matrix* m : by_values) *m = take(kDeltaChunk, w.value_dim);
    float** const rows[] = {&sums, &grown, &left, &rate, &decay};
    for (float** row : rows) *row = take(1, kDeltaChunk).at;
  }

  Matrix q() const { return x; }
  Matrix k(const DeltaWork& w) const { return {x.at + w.key_dim, width}; }
  Matrix v(const DeltaWork& w, int64_t head) const { return {x.at + 2 * w.key_dim + head * w.value_dim, width}; }
};

inline int64_t place(DeltaPlaces of, int64_t head) {
  return of.first + head * of.step;
}

// f(column of qkv, channel, place in a row of scratch, values) for queries, keys and the values of each head.
template <class F>
inline void by_segments(const DeltaWork& w, const F& f) {
  f(w.q, w.q_channel, int64_t{0}, w.key_dim);
  f(w.k, w.k_channel, w.key_dim, w.key_dim);
  for (int64_t h = 0; h < w.heads; ++h)
    f(place(w.v, h), place(w.v_channel, h), 2 * w.key_dim + h * w.value_dim, w.value_dim);
}

inline void copy(const float* from, int64_t n, float* to) {
  std::memcpy(to, from, static_cast<size_t>(n) * sizeof(float));
}

// The inputs before the next position, which lie at the beginning of `raw`.
inline void load_past(const DeltaWork& w, const DeltaScratch& s) {
  by_segments(w, [&](int64_t, int64_t channel, int64_t at, int64_t n) {
    for (int64_t j = 0; j < w.kernel - 1; ++j) {
      float* to = s.raw.at + j * s.width + at;
      if (w.from_past == nullptr)
        std::memset(to, 0, static_cast<size_t>(n) * sizeof(float));
      else
        copy(w.from_past + j * w.channels + channel, n, to);
    }
  });
}

inline void store_past(const DeltaWork& w, const DeltaScratch& s, float* past) {
  by_segments(w, [&](int64_t, int64_t channel, int64_t at, int64_t n) {
    for (int64_t j = 0; j < w.kernel - 1; ++j) copy(s.raw.at + j * s.width + at, n, past + j * w.channels + channel);
  });
}

// Positions [first, first + n) into x; raw then begins with what the next ones look back at.
template <class T>
void convolve(const DeltaWork& w, const DeltaScratch& s, int64_t first, int64_t n) {
  const int64_t before = w.kernel - 1;
  by_segments(w, [&](int64_t column, int64_t channel, int64_t at, int64_t count) {
    const T* in = static_cast<const T*>(w.rows.qkv) + first * w.rows.qkv_stride + column;
    for (int64_t t = 0; t < n; ++t) {
      float* raw = s.raw.at + (before + t) * s.width + at;
      convert(in + t * w.rows.qkv_stride, count, raw);
      if (w.kept != nullptr) copy(raw, count, w.kept + (first + t) * w.channels + channel);
    }
    for (int64_t t = 0; t < n; ++t) {
      const float* rows = s.raw.at + t * s.width + at;
      float* out = s.x.at + t * s.width + at;
      for (int64_t i = 0; i < count; i += 16) {
        F16 sum = zero16();
        for (int64_t j = 0; j < w.kernel; ++j)
          sum = fma(load16(rows + j * s.width + i), load16(w.vectors.conv + j * w.channels + channel + i), sum);
        store16(out + i, silu16(sum));
      }
    }
  });
  std::memmove(s.raw.at, s.raw.at + n * s.width, static_cast<size_t>(before * s.width) * sizeof(float));
}

inline void to_unit(float* x, int64_t n, float scale) {
  F16 squares = zero16();
  for (int64_t i = 0; i < n; i += 16) squares = fma(load16(x + i), load16(x + i), squares);
  const F16 factor = set16(scale / __builtin_sqrtf(sum(squares) + kUnitEps));
  for (int64_t i = 0; i < n; i += 16) store16(x + i, mul(load16(x + i), factor));
}

inline void unit_rows(const DeltaWork& w, const DeltaScratch& s, int64_t n) {
  const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(w.key_dim));
  for (int64_t t = 0; t < n; ++t) {
    to_unit(s.x.at + t * s.width, w.key_dim, scale);
    to_unit(s.x.at + t * s.width + w.key_dim, w.key_dim, 1.0f);
  }
}

inline float softplus(float x) {
  return x > 20.0f ? x : __builtin_log1pf(__builtin_expf(x));
}

inline void gates(const DeltaWork& w, const DeltaScratch& s, int64_t head, int64_t first, int64_t n) {
  const int64_t of = place(w.head, head);
  for (int64_t t = 0; t < n; ++t) {
    const int64_t at = (first + t) * w.rows.gate_stride + place(w.gate, head);
    const float b = w.rows.b[at], a = w.rows.a[at];
    s.rate[t] = 1.0f / (1.0f + __builtin_expf(-b));
    s.decay[t] = w.vectors.decay[of] * softplus(a + w.vectors.dt_bias[of]);
    if (w.kept == nullptr) continue;
    w.kept_b[(first + t) * w.kept_heads + of] = b;
    w.kept_a[(first + t) * w.kept_heads + of] = a;
  }
}

// N vectors of columns of one position: S = g S + k u^T with u = rate (v - g k.S), out = g q.S + (q.k) u.
template <int N>
inline void one_strip(int64_t depth, const float* q, const float* k, const float* v, float g, float rate, float qk,
                      float* state, int64_t stride, float* out) {
  F16 seen[N], asked[N];
  for (int n = 0; n < N; ++n) seen[n] = asked[n] = zero16();
  for (int64_t d = 0; d < depth; ++d) {
    const F16 key = set16(k[d]), query = set16(q[d]);
    for (int n = 0; n < N; ++n) {
      const F16 row = load16(state + d * stride + n * 16);
      seen[n] = fma(row, key, seen[n]);
      asked[n] = fma(row, query, asked[n]);
    }
  }
  const F16 grown = set16(g);
  for (int n = 0; n < N; ++n) {
    seen[n] = mul(set16(rate), fnma(grown, seen[n], load16(v + n * 16)));
    store16(out + n * 16, fma(grown, asked[n], mul(set16(qk), seen[n])));
  }
  for (int64_t d = 0; d < depth; ++d) {
    const F16 key = set16(k[d]);
    for (int n = 0; n < N; ++n) {
      float* at = state + d * stride + n * 16;
      store16(at, fma(key, seen[n], mul(grown, load16(at))));
    }
  }
}

inline float dot(const float* a, const float* b, int64_t n) {
  F16 total = zero16();
  for (int64_t i = 0; i < n; i += 16) total = fma(load16(a + i), load16(b + i), total);
  return sum(total);
}

inline void one_position(const DeltaWork& w, const DeltaScratch& s, int64_t head) {
  float* state = w.states + place(w.state, head) * w.key_dim * w.value_dim;
  const float *q = s.q().at, *k = s.k(w).at, *v = s.v(w, head).at;
  const float g = __builtin_expf(s.decay[0]), rate = s.rate[0], qk = dot(q, k, w.key_dim);
  constexpr int kWide = KT_HAS_512 ? 4 : 2;
  int64_t at = 0;
  for (; at + 16 * kWide <= w.value_dim; at += 16 * kWide)
    one_strip<kWide>(w.key_dim, q, k, v + at, g, rate, qk, state + at, w.value_dim, s.out.at + at);
  for (; at < w.value_dim; at += 16)
    one_strip<1>(w.key_dim, q, k, v + at, g, rate, qk, state + at, w.value_dim, s.out.at + at);
}

// What the heads share of a chunk: keys transposed, zeros behind the last position, and products with them, as far as
// earlier positions go.
inline void key_products(const DeltaWork& w, const DeltaScratch& s, int64_t n) {
  const Matrix q = s.q(), k = s.k(w);
  for (int64_t t = 0; t < n; t += 16) {
    const int64_t rows = least(16, n - t);
    for (int64_t d = 0; d < w.key_dim; d += 16) {
      F16 tile[16];
      for (int64_t i = 0; i < 16; ++i) tile[i] = i < rows ? load16(k.at + (t + i) * k.stride + d) : zero16();
      transpose16(tile);
      for (int64_t i = 0; i < 16; ++i) store16(s.keys.at + (d + i) * kDeltaStride + t, tile[i]);
    }
  }
  for (int64_t t = 0; t < n; t += 16) {
    const int64_t rows = least(16, n - t);
    const auto multiply = [&](Matrix from, Matrix to) {
      product<Before::zero>({to.at + t * to.stride, to.stride}, nullptr, {from.at + t * from.stride, from.stride},
                            s.keys, rows, t + 16, w.key_dim);
    };
    multiply(k, s.kk);
    multiply(q, s.qk);
  }
}

// Of a head: the system and the weights, zeros behind what each position sees within its block of 16.
inline void decayed_products(const DeltaScratch& s, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const F16 own = set16(s.sums[i]), rate = set16(-s.rate[i]);
    for (int64_t j = 0; j <= i; j += 16) {
      const F16 between = exp16(sub(own, load16(s.sums + j)));
      const int64_t at = i * kDeltaStride + j;
      const int before = static_cast<int>(least(16, i - j));
      store16(s.system.at + at, keep_first(mul(rate, mul(load16(s.kk.at + at), between)), before, 0.0f));
      const int seen = static_cast<int>(least(16, i + 1 - j));
      store16(s.weights.at + at, keep_first(mul(load16(s.qk.at + at), between), seen, 0.0f));
    }
  }
}

// Within a block of positions: u_i += sum over j < i of system_ij u_j, for N vectors of columns.
template <int N>
inline void solve_strip(const float* system, float* u, int64_t stride, int64_t rows) {
  for (int64_t i = 1; i < rows; ++i) {
    F16 total[N];
    for (int n = 0; n < N; ++n) total[n] = load16(u + i * stride + n * 16);
    for (int64_t j = 0; j < i; ++j) {
      const F16 factor = set16(system[i * kDeltaStride + j]);
      for (int n = 0; n < N; ++n) total[n] = fma(load16(u + j * stride + n * 16), factor, total[n]);
    }
    for (int n = 0; n < N; ++n) store16(u + i * stride + n * 16, total[n]);
  }
}

inline void solve(const DeltaScratch& s, int64_t n, int64_t columns) {
  const Matrix u = s.written;
  for (int64_t t = 0; t < n; t += 16) {
    const int64_t rows = least(16, n - t);
    const float* system = s.system.at + t * kDeltaStride;
    float* block = u.at + t * u.stride;
    product<Before::kept>({block, u.stride}, nullptr, {s.system.at + t * kDeltaStride, kDeltaStride}, u, rows, columns,
                          t);
    int64_t c = 0;
    for (; c + 64 <= columns; c += 64) solve_strip<4>(system + t, block + c, u.stride, rows);
    for (; c < columns; c += 16) solve_strip<1>(system + t, block + c, u.stride, rows);
  }
}

inline void scale_row(float* row, int64_t n, float by) {
  for (int64_t i = 0; i < n; i += 16) store16(row + i, mul(load16(row + i), set16(by)));
}

inline void chunk(const DeltaWork& w, const DeltaScratch& s, int64_t head, int64_t n) {
  const int64_t columns = w.value_dim;
  const Matrix state{w.states + place(w.state, head) * w.key_dim * columns, columns};
  const Matrix q = s.q(), k = s.k(w), v = s.v(w, head);
  float total = 0;
  for (int64_t t = 0; t < n; ++t) s.sums[t] = total += s.decay[t];
  for (int64_t t = n; t < kDeltaChunk; ++t) s.sums[t] = total;
  for (int64_t t = 0; t < n; t += 16) {
    store16(s.grown + t, exp16(load16(s.sums + t)));
    store16(s.left + t, exp16(sub(set16(total), load16(s.sums + t))));
  }
  decayed_products(s, n);
  product<Before::zero>(s.written, nullptr, k, state, n, columns, w.key_dim);
  for (int64_t t = 0; t < n; ++t) {
    float* row = s.written.at + t * columns;
    const F16 rate = set16(s.rate[t]), grown = set16(s.grown[t]);
    for (int64_t i = 0; i < columns; i += 16)
      store16(row + i, mul(rate, fnma(grown, load16(row + i), load16(v.at + t * v.stride + i))));
  }
  solve(s, n, columns);
  product<Before::zero>(s.out, nullptr, q, state, n, columns, w.key_dim);
  for (int64_t t = 0; t < n; t += 16) {
    const int64_t rows = least(16, n - t);
    product<Before::scaled>({s.out.at + t * columns, columns}, s.grown + t,
                            {s.weights.at + t * kDeltaStride, kDeltaStride}, s.written, rows, columns, t + rows);
  }
  for (int64_t t = 0; t < n; ++t) scale_row(s.written.at + t * columns, columns, s.left[t]);
  const F16 last = set16(__builtin_expf(total));
  float factors[16];
  store16(factors, last);
  for (int64_t d = 0; d < w.key_dim; d += 16)
    product<Before::scaled>({state.at + d * columns, columns}, factors, {s.keys.at + d * kDeltaStride, kDeltaStride},
                            s.written, 16, columns, n);
}

// norm(out) silu(z) of a head's positions [first, first + n).
template <class T>
void gated_norm(const DeltaWork& w, const DeltaScratch& s, int64_t head, int64_t first, int64_t n) {
  for (int64_t t = 0; t < n; ++t) {
    const float* from = s.out.at + t * w.value_dim;
    const T* z = static_cast<const T*>(w.rows.z) + (first + t) * w.rows.z_stride + place(w.z_column, head);
    T* to = static_cast<T*>(w.rows.out) + (first + t) * w.rows.out_stride + place(w.head, head) * w.value_dim;
    const float squares = dot(from, from, w.value_dim) / static_cast<float>(w.value_dim);
    const F16 scale = set16(1.0f / __builtin_sqrtf(squares + w.vectors.norm_eps));
    for (int64_t i = 0; i < w.value_dim; i += 16)
      store16(to + i, mul(mul(mul(load16(from + i), scale), load16(w.vectors.norm + i)), silu16(load16(z + i))));
  }
}

inline void copy_states(const DeltaWork& w, const float* from, DeltaPlaces from_places, float* to,
                        DeltaPlaces to_places) {
  const int64_t size = w.key_dim * w.value_dim;
  for (int64_t h = 0; h < w.heads; ++h) {
    float* at = to + place(to_places, h) * size;
    if (from == nullptr)
      std::memset(at, 0, static_cast<size_t>(size) * sizeof(float));
    else
      copy(from + place(from_places, h) * size, size, at);
  }
}

template <class T>
void delta_work(const DeltaWork& w) {
  const DeltaScratch s(w);
  if (w.from != w.states) copy_states(w, w.from, w.head, w.states, w.state);
  load_past(w, s);
  int64_t saved = 0;
  for (int64_t at = 0; at < w.tokens;) {
    const int64_t stop = saved < w.num_saves ? w.saves[saved].tokens : w.tokens;
    const int64_t n = least(w.most, stop - at);
    convolve<T>(w, s, at, n);
    unit_rows(w, s, n);
    if (n > 1) key_products(w, s, n);
    for (int64_t h = 0; h < w.heads; ++h) {
      gates(w, s, h, at, n);
      if (n > 1)
        chunk(w, s, h, n);
      else
        one_position(w, s, h);
      if (w.rows.out != nullptr) gated_norm<T>(w, s, h, at, n);
    }
    at += n;
    for (; saved < w.num_saves && w.saves[saved].tokens == at; ++saved) {
      copy_states(w, w.states, w.state, w.saves[saved].states, w.head);
      store_past(w, s, w.saves[saved].past);
    }
  }
  if (w.past != nullptr) store_past(w, s, w.past);
}

inline int64_t delta_scratch_floats(const DeltaWork& w) {
  return DeltaScratch(w).floats;
}

constexpr DeltaKernels kDelta = {{delta_work<float>, delta_work<bf16>}, delta_scratch_floats};

}  // namespace ktserve::KT_SIMD
