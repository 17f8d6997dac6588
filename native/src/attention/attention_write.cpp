// How keys and values get into the cache's blocks; attention.cpp computes with them.
#include <emmintrin.h>

#include <cstring>

#include "attention/attention.hpp"

namespace ktserve {
namespace {

// Four tokens' keys, [step][4 tokens] of 4 bytes: steps come in fours, as head dims are multiples of 16.
void write_keys(const char* const (&from)[4], char* to, int64_t steps) {
  for (int64_t step = 0; step < steps; step += 4) {
    __m128i row[4];
    for (int t = 0; t < 4; ++t) row[t] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from[t] + step * 4));
    const __m128i a = _mm_unpacklo_epi32(row[0], row[1]), b = _mm_unpackhi_epi32(row[0], row[1]);
    const __m128i c = _mm_unpacklo_epi32(row[2], row[3]), d = _mm_unpackhi_epi32(row[2], row[3]);
    const __m128i out[4] = {_mm_unpacklo_epi64(a, c), _mm_unpackhi_epi64(a, c), _mm_unpacklo_epi64(b, d),
                            _mm_unpackhi_epi64(b, d)};
    for (int i = 0; i < 4; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(to + (step + i) * kKvBlock * 4), out[i]);
  }
}

// One token pair's values, [16 dims][2]: the second is zero where there is none yet.
void write_pair(uint16_t* tile, const uint16_t* even, const uint16_t* odd, int head_dim, int pair) {
  for (int g = 0; g < head_dim / 16; ++g) {
    uint16_t* to = tile + (g * 8 + pair) * 32;
    if (even != nullptr && odd != nullptr) {
      for (int d = 0; d < 16; d += 8) {
        const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(even + g * 16 + d));
        const __m128i y = _mm_loadu_si128(reinterpret_cast<const __m128i*>(odd + g * 16 + d));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * d), _mm_unpacklo_epi16(x, y));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * d + 8), _mm_unpackhi_epi16(x, y));
      }
      continue;
    }
    for (int d = 0; d < 16; ++d) {
      if (even != nullptr) to[2 * d] = even[g * 16 + d];
      to[2 * d + 1] = odd != nullptr ? odd[g * 16 + d] : uint16_t{0};
    }
  }
}

}  // namespace

void PagedAttention::write_int8(const Call& call, const Write& w, int g) const {
  const int dim = shape_.head_dim;
  const auto quantise = bf16_rows() ? kernels_.quantise_bf16 : kernels_.quantise_float;
  auto* keys = reinterpret_cast<int8_t*>(kv_tile(call.cache, w.block, g));
  int8_t* values = keys + tile_bytes_;
  const auto put_scale = [&](int8_t* tile, int at, float scale) {
    std::memcpy(tile + kKvBlock * dim + 4 * at, &scale, 4);
  };
  int8_t q[kMaxHeadDim];
  for (int i = 0; i < w.count; ++i) {
    const int at = w.offset + i;
    const auto row = [&](const TokenRows<const char>& rows) {
      return rows.data + (w.token + i) * rows.stride + g * dim * row_bytes_;
    };
    put_scale(keys, at, quantise(row(call.k), q, dim));
    for (int d = 0; d < dim; d += 2) std::memcpy(keys + d * kKvBlock + at * 2, q + d, 2);
    put_scale(values, at, quantise(row(call.v), q, dim));
    int8_t* to = values + at / 2 * 32 + at % 2;
    for (int d = 0; d < dim; ++d) to[d / 16 * 16 * kKvBlock + d % 16 * 2] = q[d];
  }
}

void PagedAttention::write(const Call& call, const Write& w, int g) const {
  if (shape_.kv == KvType::int8) return write_int8(call, w, g);
  const int dim = shape_.head_dim;
  const bool rounds = row_bytes_ != element_bytes_;
  uint16_t rounded[kKvBlock * kMaxHeadDim];  // one head's rows
  char* tile = kv_tile(call.cache, w.block, g);
  const auto row = [&](const TokenRows<const char>& rows, int i) {
    const char* from = rows.data + (w.token + i) * rows.stride + g * dim * row_bytes_;
    if (!rounds) return from;
    uint16_t* to = rounded + i * dim;
    kernels_.to_bf16(reinterpret_cast<const float*>(from), to, dim);
    return reinterpret_cast<const char*>(to);
  };
  // Four bytes a step: a pair of bf16 or one float.
  int i = 0;
  for (; i + 4 <= w.count; i += 4) {
    const char* from[4] = {row(call.k, i), row(call.k, i + 1), row(call.k, i + 2), row(call.k, i + 3)};
    write_keys(from, tile + (w.offset + i) * 4, dim * element_bytes_ / 4);
  }
  for (; i < w.count; ++i) {
    const char* from = row(call.k, i);
    char* to = tile + (w.offset + i) * 4;
    for (int64_t step = 0; step < dim * element_bytes_ / 4; ++step)
      std::memcpy(to + step * kKvBlock * 4, from + step * 4, 4);
  }
  char* values = tile + tile_bytes_;
  if (shape_.kv == KvType::bf16) {
    const auto token = [&](int offset) -> const uint16_t* {
      if (offset < w.offset || offset >= w.offset + w.count) return nullptr;
      return reinterpret_cast<const uint16_t*>(row(call.v, offset - w.offset));
    };
    for (int pair = w.offset / 2; pair * 2 < w.offset + w.count; ++pair)
      write_pair(reinterpret_cast<uint16_t*>(values), token(2 * pair), token(2 * pair + 1), dim, pair);
  } else {
    for (int i = 0; i < w.count; ++i)
      for (int d = 0; d < dim; d += 16)
        std::memcpy(values + (d * kKvBlock + (w.offset + i) * 16) * 4, row(call.v, i) + d * 4, 64);
  }
}

}  // namespace ktserve
