// The row operations of Kernels, written once on sixteen-float vectors; included by kernels_avx2.cpp and
// kernels_avx512.cpp.
#pragma once

#include "gemm/kernels.hpp"
#include "simd/math16.hpp"

namespace ktserve::KT_SIMD {

inline const float* elements(const float* x) {
  return x;
}
inline const bf16* elements(const uint16_t* x) {
  return reinterpret_cast<const bf16*>(x);
}

inline int64_t row_bytes(Format format, int64_t k) {
  return row_layout(format, k).bytes;
}

// Values as they are, and zeros behind the row's last.
template <class From, class To>
void pack_plain(const From* x, int64_t k, int64_t first, int64_t last, To* row, int64_t bytes) {
  const int64_t n = last - first;
  convert(x, n, row + first);
  if (last < k) return;
  std::memset(row + last, 0, static_cast<size_t>(bytes) - static_cast<size_t>(last) * sizeof(To));
}

// Blocks of 32 to int8 with scale = max|x| / 127. A block with a non-finite value gets a NaN scale.
template <class From>
void pack_int8(Format format, const From* x, int64_t k, int64_t first, int64_t last, uint8_t* row) {
  const RowLayout layout = row_layout(format, k);
  const int bias = info(format).bias;
  for (int64_t b = first / kBlock; b < last / kBlock; ++b, x += kBlock) {
    const F16 low = load16(x);
    const F16 high = load16(x + 16);
    const uint32_t most_bits = largest(max(magnitude(low), magnitude(high)));
    float most;
    std::memcpy(&most, &most_bits, 4);
    const bool finite = most_bits < 0x7f800000u;
    const bool zero = !finite || most < 1e-30f;
    const float scale = !finite ? __builtin_nanf("") : zero ? 0.0f : most / 127.0f;
    const F16 inverse = set16(zero ? 0.0f : 127.0f / most);
    const I16 q_low = finite ? to_int(mul(low, inverse)) : zero_int16();
    const I16 q_high = finite ? to_int(mul(high, inverse)) : zero_int16();
    store_bytes(row + b * kBlock, q_low, q_high);
    std::memcpy(row + layout.scale + b * 4, &scale, 4);
    const int32_t sums[2] = {sum(q_low), sum(q_high)};
    if (groups_of(format) == 2) {
      const int32_t init[2] = {-bias * sums[0], -bias * sums[1]};
      if (bias != 0) std::memcpy(row + layout.init + b * 8, init, 8);
      const float scaled[2] = {scale * static_cast<float>(sums[0]), scale * static_cast<float>(sums[1])};
      if (info(format).minima) std::memcpy(row + layout.sum + b * 8, scaled, 8);
      continue;
    }
    const int32_t all = sums[0] + sums[1];
    const int32_t init = -bias * all;
    if (bias != 0) std::memcpy(row + layout.init + b * 4, &init, 4);
    const float scaled = scale * static_cast<float>(all);
    if (info(format).minima) std::memcpy(row + layout.sum + b * 4, &scaled, 4);
  }
}

template <class T>
void pack(Format format, const T* x, int64_t k, int64_t first, int64_t last, uint8_t* row) {
  const auto* from = elements(x);
  if (format == Format::bf16)
    pack_plain(from, k, first, last, reinterpret_cast<bf16*>(row), row_bytes(format, k));
  else if (plain(format))
    pack_plain(from, k, first, last, reinterpret_cast<float*>(row), row_bytes(format, k));
  else
    pack_int8(format, from, k, first, last, row);
}

inline void silu_mul(float* gate, const float* up, int64_t n) {
  by_vectors(n, [&](int64_t i, int64_t left) __attribute__((always_inline)) {
    store_some(gate + i, mul(silu16(load_some(gate + i, left)), load_some(up + i, left)), left);
  });
}

// NaN stays NaN: it is the second operand of min and max.
inline void clamped_mul(const Activation& by, float* gate, const float* up, int64_t n) {
  const F16 most = set16(by.limit), lowest = set16(-by.limit), alpha = set16(by.alpha), one = set16(1.0f);
  by_vectors(n, [&](int64_t i, int64_t left) __attribute__((always_inline)) {
    const F16 g = min(most, load_some(gate + i, left));
    const F16 u = max(lowest, min(most, load_some(up + i, left)));
    const F16 soft = div(g, add(one, exp16(sub(zero16(), mul(alpha, g)))));
    store_some(gate + i, mul(soft, add(u, one)), left);
  });
}

template <class T>
void lora_b(const T* b, int64_t panels, int64_t rank, const float* t, float* out) {
  const auto* from = elements(b);
  for (int64_t p = 0; p < panels; ++p, out += kPanel) {
    F16 total = load16(out);
    for (int64_t r = 0; r < rank; ++r, from += kPanel) total = fma(load16(from), set16(t[r]), total);
    store16(out, total);
  }
}

inline void combine(const float* const* rows, const float* weights, int64_t count, int64_t n, float* out) {
  by_vectors(n, [&](int64_t i, int64_t left) __attribute__((always_inline)) {
    F16 total = zero16();
    for (int64_t j = 0; j < count; ++j) {
      if (rows[j] != nullptr) total = fma(set16(weights[j]), load_some(rows[j] + i, left), total);
    }
    store_some(out + i, total, left);
  });
}

inline void to_bf16(const float* x, int64_t n, uint16_t* out) {
  convert(x, n, reinterpret_cast<bf16*>(out));
}

inline void from_bf16(const uint16_t* x, int64_t n, float* out) {
  convert(elements(x), n, out);
}

constexpr Kernels row_kernels(Isa isa, void (*dot)(const DotArgs&)) {
  return {isa,         row_bytes,        pack<float>,   pack<uint16_t>, dot,     silu_mul,
          clamped_mul, lora_b<uint16_t>, lora_b<float>, combine,        to_bf16, from_bf16};
}

}  // namespace ktserve::KT_SIMD
